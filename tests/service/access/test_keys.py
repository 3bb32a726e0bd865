"""The key file: what it says, what is refused, and that a change counts without a restart."""

from pathlib import Path

import pytest

from service.access import keys as module
from service.access.keys import KeyFile, KeyFileError, TenantLimits, hash_key, key_entry, new_key


def entry(key: str, tenant: str = "a", admin: bool = False) -> str:
    return key_entry(hash_key(key), tenant, admin)


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / "keys.toml"


def test_keys_are_found_by_their_hash_and_never_stored(path: Path) -> None:
    mine, theirs = new_key(), new_key()
    path.write_text(entry(mine, "a") + entry(theirs, "ops", admin=True))
    assert mine not in path.read_text()
    keys = KeyFile(path)
    found = keys.find(mine)
    assert found is not None
    assert (found.tenant, found.admin) == ("a", False)
    operator = keys.find(theirs)
    assert operator is not None
    assert (operator.tenant, operator.admin) == ("ops", True)
    assert keys.find(mine + "x") is None
    assert keys.find(hash_key(mine)) is None
    assert keys.find("") is None


def test_limits_of_tenants(path: Path) -> None:
    path.write_text(entry("k") + "[tenants.a]\nrequests_per_minute = 5\n")
    keys = KeyFile(path)
    assert keys.limits("a") == TenantLimits(requests_per_minute=5)
    assert keys.limits("b") == TenantLimits()


@pytest.mark.parametrize(
    ("content", "named"),
    [
        ("", "it holds no keys: `headwater key TENANT` makes one"),
        ("keys = []", "it holds no keys"),
        ("[[keys]]\ntenant = 'a'", r"keys\[0\].hash must be 'sha256:' and 64"),
        ("[[keys]]\nhash = 'sk-plain'\ntenant = 'a'", r"keys\[0\].hash must be 'sha256:' and 64"),
        (entry("k").replace("tenant =", "x =", 1), "has no field 'x'"),
        (entry("k").replace('"a"', '"a b"', 1), r"keys\[0\].tenant must be 1 to 64 letters"),
        (entry("k") + "role = 'x'", r"keys\[0\] has no field 'role', but hash, tenant, admin"),
        (entry("k") + "[server]\nport = 1", "the file has no field 'server', but keys, tenants"),
        ("keys = 1", "keys"),
        (entry("k") + "[tenants.a]\nrequests_per_minute = 0", "requests_per_minute"),
        (
            entry("k") + "[tenants.a]\nrequest_per_minute = 1",
            "tenants.a has no field 'request_per_minute', but requests_per_minute, ",
        ),
        (entry("k") + "[tenants.other]\nrequests_per_minute = 1", "other"),
        ("[[keys", "it is no TOML: .*array declaration"),
    ],
)
def test_a_broken_file_is_refused_by_name(path: Path, content: str, named: str) -> None:
    path.write_text(content)
    with pytest.raises(KeyFileError, match=named) as refused:
        KeyFile(path)
    assert str(path) in str(refused.value)


def test_a_missing_file_tells_how_to_make_one(path: Path) -> None:
    with pytest.raises(KeyFileError, match="headwater key"):
        KeyFile(path)


def test_a_tenants_name_is_plain() -> None:
    with pytest.raises(KeyFileError, match="tenant"):
        key_entry(hash_key("k"), 'a"\nadmin = true', False)


def test_a_changed_file_counts_and_a_broken_one_does_not(
    path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(module, "RELOAD_S", 0.0)
    path.write_text(entry("old"))
    keys = KeyFile(path)
    assert keys.find("old") is not None

    path.write_text(entry("new", "longer-name"))
    assert keys.find("old") is None
    assert keys.find("new") is not None

    path.write_text("[[keys")
    assert keys.find("new") is not None
    assert "count on" in caplog.text
    path.unlink()
    assert keys.find("new") is not None

    path.write_text(entry("third"))
    assert keys.find("third") is not None
