"""Open requests of every kind, and how each of them ends."""

import json
import threading
from contextlib import suppress
from typing import Any

import httpx
from websockets.exceptions import ConnectionClosed
from websockets.sync.client import connect

from tests.faults.live import PATHS, FaultyServer, body_of, ends_of

LONG = "Tell a story of a thousand words about a river and everybody who lives on it."
"""A model that may end its answer, as Messages lets it, does not do so soon."""
TERMINAL = ("response.completed", "response.failed", "response.incomplete", "error")


class Requests:
    """One streamed and one plain request of each endpoint, and one over WebSocket, all open."""

    def __init__(self, server: FaultyServer, *, closes: bool = False) -> None:
        """`closes` says that the server closes the WebSocket after its end."""
        self._url = server.url
        self._close_s = 30 if closes else 0.2
        self.streams: dict[str, str] = {}
        self.plain: dict[str, httpx.Response] = {}
        self.frames: list[dict[str, Any]] = []
        self.close_code: int | None = None
        kinds = [(path, stream) for path in PATHS for stream in (True, False)]
        self._threads = [threading.Thread(target=self._post, args=kind) for kind in kinds]
        self._threads.append(threading.Thread(target=self._socket))
        for thread in self._threads:
            thread.start()
        server.wait_running(len(self._threads))

    def join(self) -> None:
        """Until all have ended."""
        for thread in self._threads:
            thread.join(60)
            assert not thread.is_alive()

    def _post(self, path: str, stream: bool) -> None:
        body = body_of(path, stream=stream, text=LONG)
        answer = httpx.post(self._url + path, json=body, timeout=60, trust_env=False)
        if stream:
            assert answer.status_code == 200
            self.streams[path] = answer.text
        else:
            self.plain[path] = answer

    def _socket(self) -> None:
        url = self._url.replace("http", "ws") + "/v1/responses"
        with connect(url, proxy=None) as socket:
            body = body_of("/v1/responses", stream=False, text=LONG)
            del body["stream"]
            socket.send(json.dumps({"type": "response.create", **body}))
            for data in socket:
                self.frames.append(json.loads(data))
                if self.frames[-1]["type"] in TERMINAL:
                    break
            with suppress(TimeoutError, ConnectionClosed):  # nothing comes but perhaps the close
                self.frames.append(json.loads(socket.recv(timeout=self._close_s)))
            self.close_code = socket.close_code

    def check_each_ended_once(self, words: str) -> None:
        """One terminal event each, which says `words`; refusals tell when to try again."""
        self.join()
        assert len(self.streams) == len(self.plain) == len(PATHS)
        for path, text in self.streams.items():
            (end,) = ends_of(path, text)
            assert words in json.dumps(end), end
        for path, answer in self.plain.items():
            assert answer.status_code == (529 if path == "/v1/messages" else 503), answer.text
            assert int(answer.headers["retry-after"]) >= 1
            assert words in answer.json()["error"]["message"]
        overloaded = self.plain["/v1/messages"].json()
        assert (overloaded["type"], overloaded["error"]["type"]) == ("error", "overloaded_error")
        (end,) = [frame for frame in self.frames if frame["type"] in TERMINAL]
        assert words in json.dumps(end)
