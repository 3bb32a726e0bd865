"""After ROCm/ATOM#1441: requests that are not streamed leave nothing behind, in any registry or in
memory. `tests/engine/transport/test_streams.py` looks at the registries of the border."""

from pathlib import Path

import pytest

from engine.scripted import ScriptFile, text_script
from tests.faults.live import FaultyServer, body_of, serving
from tests.issues.test_054_unbounded_buffers import rss_bytes

CHAT = "/v1/chat/completions"
SCRIPT = ScriptFile(scripts=(text_script("ok"),))


def ask(server: FaultyServer, times: int) -> None:
    body = body_of(CHAT, stream=False, max_tokens=4)
    for _ in range(times):
        answer = server.http.post(CHAT, json=body)
        assert answer.json()["choices"][0]["message"]["content"] == "ok"


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_five_thousand_small_requests(tmp_path: Path) -> None:
    with serving(tmp_path, script=SCRIPT) as server:
        ask(server, 1000)
        pids = server.process.pid, server.engine_pid()
        before = [rss_bytes(pid) for pid in pids]
        ask(server, 5000)
        after = [rss_bytes(pid) for pid in pids]
        stats = server.stats()
        assert (stats["running"], stats["waiting"]) == (0, 0)
        assert stats["num_requests"] == 6000
        assert stats["referenced"] == 0
    for old, new in zip(before, after, strict=True):
        assert new - old < 5 << 20
