"""`python -m loadtest` as a user runs it."""

import asyncio
import json
import random
import re
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from loadtest.report.files import read_json
from tests.loadtest.playing import Play, playing

ROOT = Path(__file__).parent.parent.parent


def start(*arguments: str) -> "subprocess.Popen[str]":
    return subprocess.Popen(
        [sys.executable, "-W", "error", "-m", "loadtest", *arguments],
        cwd=ROOT,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )


def run(*arguments: str) -> tuple[int, str, str]:
    process = start(*arguments)
    out, err = process.communicate(timeout=60)
    return process.returncode, out, err


def test_a_comparison_from_load_to_readme(tmp_path: Path) -> None:
    report, html = tmp_path / "r.json", tmp_path / "r.html"
    with playing(Play()) as ours, playing(Play()) as theirs:
        code, out, err = run(
            *("compare", "--target", f"ours={ours}", "--target", f"theirs={theirs}"),
            *("--concurrency", "1", "2", "--repeats", "2", "--seed", "s", "--json", str(report)),
            *("--html", str(html), "--assert", "errors==0", "--assert", "requests>=8"),
        )
    assert code == 0, err
    assert "ours / theirs" in out
    assert "seed s" in out
    data = json.loads(report.read_text())
    assert len(data["runs"]) == 8
    assert all(verdict["holds"] for verdict in data["verdicts"])
    assert str(tmp_path) not in report.read_text() + html.read_text()
    code, out, _ = run("readme", str(report))
    assert code == 0
    assert "| 2 at once | theirs" in out
    again = tmp_path / "again.html"
    assert run("html", str(report), str(again))[0] == 0
    assert again.read_text() == html.read_text()


def test_exit_codes() -> None:
    with playing(Play()) as url:
        assert run("run", "--url", url, "--concurrency", "1", "--assert", "ttft_p50_ms<0")[0] == 1
        dead = url
    code, _, err = run("run", "--url", dead)
    assert code == 2
    assert "was not measured, as GET " in err
    with playing(Play(status=429)) as url:
        arguments = ("run", "--url", url, "--concurrency", "1")
        assert run(*arguments)[0] == 1
        assert run(*arguments, "--assert", "error_rate<=1")[0] == 0
    assert run("run", "--url", dead, "--workload", "nothing")[0] == 2
    assert run("run", "--assert", "nonsense")[0] == 2


@pytest.mark.parametrize("command", ["run", "compare"])
def test_help_explains_every_option(command: str) -> None:
    code, out, _ = run(command, "--help")
    assert code == 0
    options = [" ".join(text.split()) for text in re.split(r"\n  (?=-)", out)[1:]]
    assert len(options) > 15
    # An option without help is its name, and what it takes, alone.
    assert not [text for text in options if re.fullmatch(r"\S+( \{\S+\}| [A-Z_\[\]. ]+)?", text)]


def test_the_workloads_are_listed() -> None:
    code, out, _ = run("workloads")
    assert code == 0
    assert {line.split()[0] for line in out.splitlines()} >= {"agents", "chat", "rag", "replay"}


def wait_until_it_listens(process: "subprocess.Popen[str]") -> None:
    """Until the process catches SIGTERM: from then on an interrupt is the tool's own affair."""
    status = Path(f"/proc/{process.pid}/status")
    deadline = time.monotonic() + 30
    while time.monotonic() < deadline:
        caught = next(row for row in status.read_text().split("\n") if row.startswith("SigCgt"))
        if int(caught.split()[1], 16) >> (signal.SIGTERM - 1) & 1:
            return
        time.sleep(0.002)
    pytest.fail("the tool did not start")


@pytest.mark.parametrize(
    "moment",
    [0.0, *(pytest.param(random.Random(n).random(), marks=pytest.mark.slow) for n in range(20))],
)
def test_an_interrupt_at_any_moment_leaves_a_valid_report(moment: float, tmp_path: Path) -> None:
    """Moments of a run of about two seconds, imports included, on two transports in turn."""
    report, html = tmp_path / "r.json", tmp_path / "r.html"
    transport = "responses-ws" if round(moment * 1000) % 2 else "chat-sse"
    with playing(Play(pieces=("word ",) * 16, delay_s=0.01)) as url:
        process = start(
            *("run", "--url", url, "--concurrency", "2", "--repeats", "2"),
            *("--transport", transport, "--json", str(report), "--html", str(html)),
        )
        wait_until_it_listens(process)
        time.sleep(moment * 2.5)
        process.send_signal(signal.SIGINT)
        _, err = process.communicate(timeout=30)
    assert "Traceback" not in err
    read = read_json(report)
    assert html.read_text().endswith("</html>\n")
    assert process.returncode == (130 if read.interrupted else 0)
    if not read.interrupted:
        assert [run.figures["requests"] for run in read.runs] == [8, 8]
    assert all(not run.errors for run in read.runs)


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_an_interrupt_leaves_a_valid_report(number: signal.Signals, tmp_path: Path) -> None:
    """The server holds the answers of the third turn; the interrupt comes while they wait."""
    play = Play()

    async def gate() -> None:
        if len(play.bodies) > 3:
            process.send_signal(number)
            await asyncio.sleep(3600)

    play.gate = gate
    report, html = tmp_path / "r.json", tmp_path / "r.html"
    with playing(play) as url:
        process = start(
            *("run", "--url", url, "--concurrency", "1", "--repeats", "2"),
            *("--json", str(report), "--html", str(html)),
        )
        _, err = process.communicate(timeout=60)
    assert process.returncode == 130, err
    data = json.loads(report.read_text())
    assert data["interrupted"] is True
    (only,) = data["runs"]
    assert only["figures"]["requests"] == 2
    assert "Interrupted" in html.read_text()
    assert "Interrupted" in err
