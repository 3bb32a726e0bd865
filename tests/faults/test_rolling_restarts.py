"""Restarts under load, with a client that retries as the SDKs do: no answer is lost or doubled."""

import itertools
import json
import signal
import threading
from pathlib import Path

import openai
import pytest
from openai.types.chat import ChatCompletionChunk, ChatCompletionMessageParam

from engine.scripted import ScriptFile, text_script
from tests.faults.live import FaultyServer, start

TEXT = "all of it, once"
SCRIPT = ScriptFile(scripts=(text_script(TEXT, delay_s=0.01),))


class Client:
    """Asks one thing after another until it is stopped; every answer must be whole."""

    def __init__(self, port: int, numbers: "itertools.count[int]") -> None:
        self._sdk = openai.OpenAI(
            base_url=f"http://127.0.0.1:{port}/v1", api_key="x", max_retries=20, timeout=60
        )
        self._numbers = numbers
        self._stop = threading.Event()
        self.answered: list[str] = []
        self.wrong: list[str] = []
        self._thread = threading.Thread(target=self._run)
        self._thread.start()

    def end(self) -> None:
        self._stop.set()
        self._thread.join(120)
        assert not self._thread.is_alive()
        self._sdk.close()

    def _run(self) -> None:
        while not self._stop.is_set():
            number = next(self._numbers)
            name = f"n-{number}"
            try:
                text = self._ask(name, stream=number % 2 == 0)
            except Exception as error:
                self.wrong.append(f"{name}: {error!r}")
                continue
            self.answered.append(name)
            if text != TEXT:
                self.wrong.append(f"{name}: {text!r}")

    def _ask(self, name: str, *, stream: bool) -> str | None:
        headers = {"x-request-id": name}
        messages: list[ChatCompletionMessageParam] = [{"role": "user", "content": name}]
        create = self._sdk.chat.completions.create
        if not stream:
            answer = create(model="default", messages=messages, extra_headers=headers)
            return answer.choices[0].message.content
        pieces = create(model="default", messages=messages, stream=True, extra_headers=headers)
        chunks = [piece for piece in pieces if isinstance(piece, ChatCompletionChunk)]
        choices = [choice for chunk in chunks for choice in chunk.choices]
        assert [c.finish_reason for c in choices if c.finish_reason] == ["stop"]
        return "".join(choice.delta.content or "" for choice in choices)


def roll(folder: Path, times: int) -> None:
    """Start, let it work, tell it to end, and the next one takes its port."""

    def begin(port: int = 0) -> FaultyServer:
        return start(folder, script=SCRIPT, port=port)

    server = begin()
    numbers = itertools.count()
    clients = [Client(server.port, numbers) for _ in range(4)]
    try:
        for _ in range(times):
            before = [len(client.answered) for client in clients]
            while any(len(c.answered) == n for c, n in zip(clients, before, strict=True)):
                threading.Event().wait(0.01)
                assert server.process.poll() is None, server.log
            server.process.send_signal(signal.SIGTERM)
            server.http.close()
            ended = server.wait_end()
            assert ended.code == 0, ended.log
            server = begin(server.port)
    finally:
        for client in clients:
            client.end()
        server.process.send_signal(signal.SIGTERM)
        server.http.close()
        server.process.wait(30)
    assert [each for client in clients for each in client.wrong] == []
    answered = [each for client in clients for each in client.answered]
    assert len(set(answered)) == len(answered) == next(numbers)
    records = [json.loads(line) for line in (folder / "records").read_text().splitlines()]
    whole = [each["request_id"] for each in records if each["whole"]]
    assert sorted(whole) == sorted(answered)


def test_two_restarts(tmp_path: Path) -> None:
    roll(tmp_path, 2)


@pytest.mark.slow
@pytest.mark.timeout(1800)
def test_a_hundred_restarts(tmp_path: Path) -> None:
    roll(tmp_path, 100)
