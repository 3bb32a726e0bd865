"""Settings from the command line, and what is refused there."""

import re
from pathlib import Path

import pytest

from kernels import registry
from service import command_line
from service.command_line import NewKey, parse_command, parse_memory
from service.config import Settings, SettingsError


@pytest.mark.parametrize(
    ("text", "num_bytes"),
    [
        ("2GiB", 2 << 30),
        ("512MiB", 512 << 20),
        ("512m", 512 << 20),
        ("1.5 gb", 3 << 29),
        ("4096 b", 4096),
        ("1048576", 1 << 20),
        (" 1k ", 1024),
        ("0", 0),
    ],
)
def test_memory_sizes(text: str, num_bytes: int) -> None:
    assert parse_memory(text) == num_bytes


@pytest.mark.parametrize("text", ["", "GiB", "-1GiB", "2 XiB", "1e9", "2GiBs"])
def test_what_is_no_size(text: str) -> None:
    with pytest.raises(SettingsError, match="write it like"):
        parse_memory(text)


@pytest.mark.parametrize(
    ("text", "meant"), [("2", "2 bytes? Say 2GiB."), ("512", "512GiB"), ("4096", "4096MiB")]
)
def test_a_size_without_its_unit(text: str, meant: str) -> None:
    for option in ("--kv-memory", "--cache-disk", "--request-memory"):
        with pytest.raises(SettingsError, match=f"{option}: .*{re.escape(meant)}"):
            parse(option, text)


@pytest.mark.parametrize(
    ("word", "said"),
    [
        ("--prot=1", "did you mean --port?"),
        ("--kv_memory", "did you mean --kv-memory?"),
        ("--hosts", "did you mean --host?"),
        ("--zzz", "headwater serve --help"),
        ("model.gguf", "headwater serve --help"),
    ],
)
def test_an_option_that_is_none(word: str, said: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as ended:
        parse(word)
    assert ended.value.code == 2
    assert f"unrecognized arguments: {word}" in (line := capsys.readouterr().err)
    assert said in line


def parse(*arguments: str) -> Settings:
    settings = parse_command(["serve", *arguments])
    assert isinstance(settings, Settings)
    return settings


def test_defaults_are_the_settings_own() -> None:
    assert parse() == Settings()


def test_help_tells_every_default(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        parse("--help")
    told = re.split(r"\n  (?=-)", capsys.readouterr().out)[1:]
    options = {text.split()[0]: " ".join(text.split()) for text in told}
    del options["-h,"]
    assert len(options) > 25
    assert not [name for name, text in options.items() if "(" not in text or "default" not in text]


def test_the_backends_are_those_of_the_kernels() -> None:
    assert set(command_line.BACKENDS) == set(registry.BACKENDS)


def test_every_option_arrives() -> None:
    line = (
        "--host ::1 --port 9 --model m.gguf --served-model-name a b --kv-memory 1GiB "
        "--max-context 512 --threads 3 --exact --backend cpu --allowed-host x --allowed-host y "
        "--allowed-origin https://o --log-level debug --kv-dtype int8"
    )
    settings = parse(*line.split())
    assert (settings.host, settings.port, settings.model) == ("::1", 9, Path("m.gguf"))
    assert settings.model_names == ("a", "b")
    assert settings.allowed_hosts == ("x", "y")
    assert settings.allowed_origins == ("https://o",)
    engine = settings.engine_config(Path("m.gguf"))
    assert (engine.model, engine.kv_memory_bytes, engine.max_context) == ("m.gguf", 1 << 30, 512)
    assert (engine.threads, engine.exact, engine.backend) == (3, True, "cpu")
    assert engine.kv_dtype == "int8"


@pytest.mark.parametrize("host", ["0.0.0.0", "::", "192.168.0.1", "gpu.example"])
def test_other_machines_are_let_in_only_on_purpose(host: str) -> None:
    with pytest.raises(SettingsError, match="--allow-public"):
        parse("--host", host)
    assert parse("--host", host, "--allow-public").host == host


def test_keys_open_a_public_address() -> None:
    assert parse("--host", "0.0.0.0", "--keys", "keys.toml").keys == Path("keys.toml")


def test_the_command_that_makes_a_key() -> None:
    assert parse_command(["key", "research", "--admin"]) == NewKey("research", True)


def test_limits_of_the_edge() -> None:
    line = "--write-timeout 5 --max-connections 7 --request-memory 1GiB"
    limits = parse(*line.split()).limits
    assert (limits.write_stall_s, limits.connections) == (5.0, 7)
    assert limits.request_bytes == 1 << 30


@pytest.mark.parametrize("host", ["localhost", "127.0.0.1", "127.1.2.3", "::1"])
def test_loopback_needs_no_leave(host: str) -> None:
    assert parse("--host", host).host == host


@pytest.mark.parametrize(
    "wrong",
    [
        ["--port", "70000"],
        ["--kv-memory", "lots"],
        ["--threads", "-1"],
        ["--max-context", "-5"],
        ["--tls-cert", "missing.pem"],
        ["--tls-key", __file__],
        ["--write-timeout", "0"],
        ["--write-timeout", "inf"],
        ["--max-connections", "0"],
        ["--request-memory", "much"],
        ["--request-memory", "1MiB"],
    ],
)
def test_wrong_values(wrong: list[str]) -> None:
    with pytest.raises(SettingsError):
        parse(*wrong)
