"""Two servers and one `--cache-dir`: the second is told, and a killed holder has it no longer."""

from pathlib import Path

import pytest

from tests.faults.live import PATHS, FaultyServer, body_of, serving, start

SIZES = ("--kv-memory", "64MiB", "--cache-disk", "64MiB", "--max-context", "1024")


def ask(server: FaultyServer) -> None:
    body = body_of(PATHS[0], stream=False, text="keep this " * 40, max_tokens=4)
    server.http.post(PATHS[0], json=body).raise_for_status()


def test_a_folder_has_one_server_until_it_ends_or_is_killed(tmp_path: Path) -> None:
    folder = tmp_path / "cache"
    arguments = (*SIZES, "--cache-dir", str(folder))
    first, second, third = (tmp_path / name for name in ("first", "second", "third"))
    for each in (first, second, third):
        each.mkdir()
    with serving(first, *arguments) as server:
        ask(server)
    with serving(first, *arguments) as server:
        kept = sorted(folder.iterdir())
        holder = server.engine_pid()
        with pytest.raises(AssertionError) as told:
            start(second, *arguments)
        said = (second / "log").read_text().strip().splitlines()[-1]
        assert f"--cache-dir {folder}: the engine of another server" in said
        assert f"(process {holder})" in said
        assert "give this one a folder of its own" in said
        assert "Traceback" not in str(told.value)
        assert sorted(folder.iterdir()) == kept, "it touched what is not its own"
        ask(server)
        server.process.kill()
        server.process.wait()
        with serving(third, *arguments) as successor:
            assert successor.stats()["cached"] > 0
