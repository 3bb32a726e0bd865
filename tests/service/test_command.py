"""`headwater serve` that cannot: one sentence, an exit code, no traceback."""

import socket
import subprocess
import sys
from pathlib import Path

import pytest

from service.access.keys import KeyFile

ROOT = Path(__file__).parent.parent.parent


def serve(*arguments: str) -> "subprocess.CompletedProcess[str]":
    return run("serve", *arguments)


def run(*arguments: str) -> "subprocess.CompletedProcess[str]":
    return subprocess.run(
        [sys.executable, "-m", "service", *arguments],
        cwd=ROOT,
        capture_output=True,
        text=True,
        timeout=60,
    )


def test_a_taken_port(tmp_path: Path) -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = str(taken.getsockname()[1])
        ended = serve("--port", port, "--model", str(tmp_path))
    assert ended.returncode == 1
    assert f"127.0.0.1:{port} is in use" in ended.stderr
    assert "Traceback" not in ended.stderr


@pytest.mark.parametrize(
    ("arguments", "code", "words"),
    [
        (("--model", "nowhere.gguf"), 1, "nowhere.gguf does not exist"),
        (("--host", "0.0.0.0"), 2, "--allow-public"),
        (("--kv-memory", "lots"), 2, "2GiB"),
        (("--port", "many"), 2, "--port"),
        (("--nope",), 2, "--nope"),
        (("--keys", "nowhere.toml"), 2, "headwater key"),
        (("--tls-cert", __file__), 1, "no usable certificate"),
    ],
)
def test_what_cannot_start(arguments: tuple[str, ...], code: int, words: str) -> None:
    ended = serve(*arguments)
    assert ended.returncode == code
    assert words in ended.stderr
    assert "Traceback" not in ended.stderr


def test_a_key_is_shown_and_its_entry_printed(tmp_path: Path) -> None:
    made = run("key", "research", "--admin")
    assert made.returncode == 0
    path = tmp_path / "keys.toml"
    path.write_text(made.stdout)
    key = made.stderr.split()[-1]
    assert key not in made.stdout
    found = KeyFile(path).find(key)
    assert found is not None
    assert (found.tenant, found.admin) == ("research", True)
    refused = run("key", "two words")
    assert refused.returncode == 2
    assert "Traceback" not in refused.stderr
