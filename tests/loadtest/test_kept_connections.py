"""A server may close a connection that it kept, at the moment when the client uses it again."""

import asyncio
import json
import time

import pytest

from loadtest.measure.sample import Kind, RequestError, Sample
from loadtest.transports import Dialogue, Target, open_transport

ANSWER = json.dumps({"choices": [{"message": {"content": "yes"}, "finish_reason": "stop"}]})
REPLY = f"HTTP/1.1 200 OK\r\nContent-Length: {len(ANSWER)}\r\n\r\n{ANSWER}".encode()


class Closing:
    """Answers `num_answers` requests on each connection and hangs up on the next one."""

    def __init__(self, num_answers: int) -> None:
        self._num_answers = num_answers
        self.num_requests = 0

    async def serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        answered = 0
        while head := await reader.readuntil(b"\r\n\r\n"):
            length = head.lower().partition(b"content-length: ")[2].partition(b"\r\n")[0]
            await reader.readexactly(int(length))
            self.num_requests += 1
            if answered == self._num_answers:
                break
            answered += 1
            writer.write(REPLY)
            await writer.drain()
        writer.close()


async def ask(closing: Closing, num_turns: int) -> list[str]:
    server = await asyncio.start_server(closing.serve, "127.0.0.1", 0)
    port = server.sockets[0].getsockname()[1]
    transport = open_transport("chat-json", Target("t", f"http://127.0.0.1:{port}", "m"))
    texts = []
    try:
        for turn in range(num_turns):
            sample = Sample("s", "", turn, 8, time.perf_counter())
            await transport.send(Dialogue("s", "", (), ["question"]), sample)
            texts.append(sample.text)
    finally:
        await transport.close()
        server.close()
    return texts


def test_a_request_on_a_kept_connection_is_sent_again() -> None:
    closing = Closing(num_answers=1)
    assert asyncio.run(ask(closing, num_turns=3)) == ["yes"] * 3
    assert closing.num_requests == 5


def test_a_request_on_a_new_connection_is_not() -> None:
    closing = Closing(num_answers=0)
    with pytest.raises(RequestError) as caught:
        asyncio.run(ask(closing, num_turns=1))
    assert caught.value.kind == Kind.CUT
    assert closing.num_requests == 1
