"""One line per request at its end, and the trace in every line of a request."""

import logging
import re
import subprocess
import sys

import pytest

from engine.scripted import Script, ScriptStep, text_script
from service.telemetry.log_context import TRACE_ID, TraceFilter
from tests.service.calls import CHAT, ask, body
from tests.service.conftest import MODEL, run_server

TRACE = "0af7651916cd43dd8448eb211c80319c"
LINE = re.compile(r"ended( [a-z_0-9]+=\S+)+")


def request_lines(caplog: pytest.LogCaptureFixture) -> list[dict[str, str]]:
    """The fields of each request's line."""
    lines = [
        record.getMessage()
        for record in caplog.records
        if record.name == "service.telemetry.request_log"
    ]
    assert all(map(LINE.fullmatch, lines))
    return [dict(re.findall(r"(\S+?)=(\S+)", line)) for line in lines]


def test_a_request_is_one_line_with_its_figures(caplog: pytest.LogCaptureFixture) -> None:
    headers = {"traceparent": f"00-{TRACE}-b7ad6b7169203331-01", "x-request-id": "mine-1"}
    with caplog.at_level(logging.INFO), run_server(text_script("abcdef")) as server:
        answer = server.http.post(CHAT, json=body(max_tokens=5), headers=headers)
        assert answer.status_code == 200
        (record,) = server.ended()
    (line,) = request_lines(caplog)
    assert line["request"] == "mine-1"
    assert line["trace"] == TRACE
    assert line["response"] == record.response_id
    assert line["outcome"] == "length"
    assert (line["output"], line["cached"]) == ("5", "0")
    assert record.usage is not None and line["prompt"] == str(record.usage.prompt_tokens)
    assert 0 <= float(line["ttft_ms"]) <= float(line["total_ms"])
    assert 0 <= float(line["itl_p50_ms"]) <= float(line["itl_p99_ms"])
    assert {"prefill", "decode"} <= set(line)


def test_a_refused_request_is_a_line_too(caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.INFO), run_server(text_script("abc")) as server:
        server.http.post(CHAT, json={**body(), "top_p": 7})
        (record,) = server.ended()
    (line,) = request_lines(caplog)
    assert line["outcome"] == "refused:invalid_value"
    assert (line["param"], line["path"]) == ("top_p", CHAT)
    assert line["trace"] == record.trace_id and len(line["trace"]) == 32
    assert "prompt" not in line


@pytest.mark.parametrize(
    ("path", "fields", "operation", "param"),
    [
        ("/v1/completions", {"prompt": "x", "n": 0}, "text_completion", "n"),
        ("/v1/responses", {"input": "x", "top_p": 7}, "chat", "top_p"),
        ("/v1/messages", {"messages": [], "max_tokens": 0}, "chat", "messages"),
        ("/v1/messages", {"system prompt=1": 1}, "chat", "system_prompt_1"),
    ],
)
def test_a_refusal_names_its_path_and_field(
    caplog: pytest.LogCaptureFixture,
    path: str,
    fields: dict[str, object],
    operation: str,
    param: str,
) -> None:
    with caplog.at_level(logging.INFO), run_server(text_script("abc")) as server:
        assert server.http.post(path, json={"model": MODEL, **fields}).status_code == 400
    (line,) = request_lines(caplog)
    told = (line["path"], line["operation"], line["param"])
    assert told == (path, operation, param)


def test_choices_are_one_line_that_adds_up(caplog: pytest.LogCaptureFixture) -> None:
    script = Script((ScriptStep((97, 98)),), num_cached_tokens=5)
    with caplog.at_level(logging.INFO), run_server(script) as server:
        usage = ask(server, n=4)["usage"]
        assert len({record.trace_id for record in server.ended(4)}) == 1
    (line,) = request_lines(caplog)
    assert (line["choices"], line["outcome"]) == ("4", "stop")
    assert line["prompt"] == str(usage["prompt_tokens"])
    assert line["output"] == str(usage["completion_tokens"])
    assert line["cached"] == "5"


def test_nothing_is_logged_per_step_or_of_the_content(caplog: pytest.LogCaptureFixture) -> None:
    many = Script(tuple(ScriptStep((97,)) for _ in range(50)))
    with caplog.at_level(logging.INFO), run_server(many) as server:
        ask(server, messages=[{"role": "user", "content": "topsecret"}], max_tokens=50)
        ours = [
            record for record in caplog.records if record.name.startswith(("service", "engine"))
        ]
        assert len(ours) == 1
    assert "topsecret" not in caplog.text


def test_every_line_of_a_request_tells_its_trace_once() -> None:
    def told(message: str) -> str:
        record = logging.LogRecord("x", logging.INFO, "x.py", 1, message, None, None)
        assert TraceFilter().filter(record)
        return record.getMessage()

    assert told("before any request") == "before any request"
    token = TRACE_ID.set(TRACE)
    try:
        assert told("it fails at 100 %") == f"it fails at 100 % trace={TRACE}"
        assert told(f"request trace={TRACE}") == f"request trace={TRACE}"
    finally:
        TRACE_ID.reset(token)


def test_the_first_request_s_line_imports_nothing() -> None:
    """np.percentile brings numpy.ma with its first call: 8 ms in which no stream is served."""
    code = (
        "import logging, sys\n"
        "from array import array\n"
        "from service.events import RequestRecord\n"
        "from service.telemetry.request_log import RequestLog\n"
        "logging.basicConfig(level=logging.INFO)\n"
        "known = set(sys.modules)\n"
        "RequestLog().finish(RequestRecord('chat', 'm', 1, 9, token_ns=array('q', [2, 3, 5])))\n"
        "print(*sorted(set(sys.modules) - known))\n"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert "itl_p99_ms=" in done.stderr
    assert done.stdout == "\n"
