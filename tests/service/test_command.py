"""`headwater serve` that cannot: one sentence, an exit code, no traceback."""

import os
import signal
import socket
import subprocess
import sys
from pathlib import Path

import pytest

from service import command
from service.access.keys import KeyFile
from service.config import Settings
from tests.faults.live import children, gone, until

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
    (tmp_path / "config.json").write_text("{}")
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = str(taken.getsockname()[1])
        ended = serve("--port", port, "--model", str(tmp_path))
    assert ended.returncode == 1
    assert f"127.0.0.1:{port} is in use" in ended.stderr
    assert "Traceback" not in ended.stderr


@pytest.mark.parametrize(
    ("arguments", "code", "words"),
    [
        (("--model", "nowhere.gguf"), 1, "--model nowhere.gguf does not exist"),
        (("--model", "org/Name-1B"), 1, "does not exist. Nothing is downloaded: name a GGUF file"),
        (("--model", "org/Name-1B"), 1, "`hf download org/Name-1B --local-dir Name-1B` makes one"),
        (("--model", "README.md"), 1, "README.md: not a GGUF file: it begins with b'# He'"),
        (("--model", "tests"), 1, "--model tests is a folder without a config.json"),
        (("--script", "nowhere.json"), 1, "--script nowhere.json does not exist"),
        (("--backend", "cuda"), 2, "--backend: invalid choice: 'cuda'"),
        (("--kv-memory", "9999999999TiB"), 2, "'9999999999TiB' is more memory than any machine"),
        (("--threads", "100000"), 2, "--threads 100000 is more than machines have cores"),
        (("--step-limit", "0"), 2, "--step-limit 0 is shorter than honest steps"),
        (("--drain", "nan"), 2, "--drain nan is no time"),
        (("--host", "0.0.0.0"), 2, "--allow-public"),
        (("--kv-memory", "lots"), 2, "2GiB"),
        (("--port", "many"), 2, "--port"),
        (("--nope",), 2, "--nope"),
        (("--keys", "nowhere.toml"), 2, "headwater key"),
        (("--tls-cert", __file__), 1, "no usable certificate"),
        (("--itl-target-ms", "nan"), 2, "--itl-target-ms nan is no time: give finite milliseconds"),
        (("--ttft-target-ms", "-1"), 2, "--ttft-target-ms -1 is no time"),
        (("--prefill-chunk", "-1"), 2, "--prefill-chunk -1 is negative"),
        (("--exact", "--kv-dtype", "bf16"), 2, "--kv-dtype bf16 cannot be with --exact"),
        (("--prewarm", "nowhere.jsonl"), 1, "--prewarm nowhere.jsonl: No such file"),
        (("--cache-dir", "README.md/x"), 1, "README.md/x cannot be kept from other servers"),
    ],
)
def test_what_cannot_start(arguments: tuple[str, ...], code: int, words: str) -> None:
    ended = serve(*arguments)
    assert ended.returncode == code
    assert words in ended.stderr
    assert "Traceback" not in ended.stderr


@pytest.mark.parametrize(
    ("line", "words"),
    [
        ("{", "line 1: "),
        ('{"prompts": "a"}', "line 1: Unknown parameter"),
        ("{}", "line 1: Give either 'prompt' or 'messages'"),
        ('{"prompt": "a", "ttl": "9y"}', "line 1: Invalid 'ttl'"),
        ('{"prompt": "a", "tenant": "west"}', "line 1: There are no tenants"),
        ('{"messages": []}', "line 1: "),
    ],
)
def test_prompts_to_warm_are_read_before_an_engine_starts(
    tmp_path: Path, line: str, words: str
) -> None:
    path = tmp_path / "prompts.jsonl"
    path.write_text(line)
    ended = serve("--port", "0", "--prewarm", str(path))
    assert ended.returncode == 1
    assert words in ended.stderr
    assert "loading" not in ended.stderr


@pytest.mark.parametrize("host", ["0.0.0.0", "127.0.0.1"])
def test_the_dashboard_is_where_a_browser_can_go(host: str) -> None:
    seen = "localhost" if host == "0.0.0.0" else host
    said: list[str] = []
    with socket.create_server((host, 0)) as bound, pytest.MonkeyPatch.context() as patch:
        patch.setattr(command, "_say", said.append)
        command._ready(Settings(host=host), bound, 0.0)()
        port = bound.getsockname()[1]
    (line,) = said
    assert f"ready on http://{host}:{port} in " in line
    assert line.endswith(f"; look at http://{seen}:{port}/dashboard")


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


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_a_signal_while_the_model_loads_ends_at_once(tmp_path: Path, number: int) -> None:
    """Loading never ends here: the model is a pipe that nobody writes to."""
    pipe = tmp_path / "model.gguf"
    os.mkfifo(pipe)
    words = [sys.executable, "-m", "service", "serve", "--port", "0", "--model", str(pipe)]
    with subprocess.Popen(words, cwd=ROOT, stderr=subprocess.PIPE, text=True) as process:
        assert process.stderr is not None
        assert "loading" in process.stderr.readline()
        engines = children(process.pid)
        while not engines:
            engines = children(process.pid)
        process.send_signal(number)
        _, log = process.communicate(timeout=30)
    assert process.returncode == 128 + number
    assert log == f"headwater: ended by {signal.Signals(number).name} before the server was ready\n"
    for pid in engines:
        until(lambda pid=pid: gone(pid), 10)  # type: ignore[misc]


def test_without_a_compiler_the_benchmark_says_what_to_do(tmp_path: Path) -> None:
    ended = subprocess.run(
        [sys.executable, "-m", "kernels.bench"],
        cwd=ROOT,
        env={**os.environ, "CXX": "/no/compiler", "XDG_CACHE_HOME": str(tmp_path)},
        capture_output=True,
        text=True,
        timeout=60,
    )
    assert ended.returncode == 1
    assert "install g++" in ended.stderr
    assert "Traceback" not in ended.stderr
