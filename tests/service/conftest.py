"""A live server over real sockets, on a scripted engine in a thread."""

import asyncio
import contextlib
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import Future
from dataclasses import dataclass, field, replace
from functools import cache
from pathlib import Path
from typing import TypeAlias

import httpx
import pytest
import uvloop
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers

from engine.api import Engine, EngineError
from engine.scripted import Script, ScriptedCore, ScriptStep, in_order, text_script
from engine.text import Encoder, TextAssets, Vocabulary
from engine.text.vocabulary import byte_alphabet
from engine.transport import start_thread_engine
from engine.types import EngineInfo, EngineRequest
from service.access.keys import KeyFile
from service.app import App, create_app
from service.config import Limits, Settings
from service.events import RequestRecord
from service.server import Server, bind
from service.services import Services, build_services

MODEL = "scripted-model"
CONTEXT = 4096
VOCAB = 258
TEMPLATE = (
    "{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
INFO = EngineInfo(
    model_name=MODEL,
    model_digest="0123456789abcdef",
    family="scripted",
    vocab_size=VOCAB,
    max_context=CONTEXT,
    page_size=16,
    num_pages=1024,
    page_bytes=4096,
    backend="scripted",
    numeric_mode="exact",
    threads=1,
)

ScriptFor: TypeAlias = Callable[[EngineRequest], Script]


@cache
def byte_assets() -> TextAssets:
    """A model's text side of one token per byte, and two special tokens; ChatML template."""
    alphabet = byte_alphabet()
    vocab = {alphabet[byte]: byte for byte in range(256)}
    tokenizer = Tokenizer(models.BPE(vocab=vocab, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    tokenizer.decoder = decoders.ByteLevel()
    specials = ["<|im_start|>", "<|im_end|>"]
    tokenizer.add_special_tokens([AddedToken(text, special=True) for text in specials])
    pieces = tuple(bytes([byte]) for byte in range(256)) + tuple(t.encode() for t in specials)
    return TextAssets(
        path=Path("scripted"),
        tokenizer=tokenizer,
        encoder=Encoder(tokenizer),
        vocabulary=Vocabulary(pieces, (256, 257)),
        chat_template=TEMPLATE,
        bos_token="",
        eos_token="<|im_end|>",
        eos_token_ids=frozenset({257}),
        add_bos=False,
    )


@dataclass(slots=True)
class Records:
    """A trace sink that keeps what it was given."""

    finished: list[RequestRecord] = field(default_factory=list)

    def finish(self, record: RequestRecord) -> None:
        self.finished.append(record)


HELD_S = 3600.0


def held(text: str, num_first: int = 1) -> Script:
    """Says the first bytes of the text at once, and the rest when the test lets it:
    `LiveServer.go_on`."""
    data = text.encode()
    first, second = ScriptStep(tuple(data[:num_first])), data[num_first : num_first + 1]
    rest = text_script(data[num_first + 1 :]).steps
    return Script((first, ScriptStep(tuple(second), delay_s=HELD_S), *rest))


@dataclass(slots=True)
class Clock:
    """The engine's time: the machine's, until a test lets an hour pass."""

    ahead_ns: int = 0

    def __call__(self) -> int:
        return time.monotonic_ns() + self.ahead_ns


@dataclass(frozen=True, slots=True)
class LiveServer:
    """A server that runs; `http` talks to it, `records` has the requests that ended."""

    port: int
    http: httpx.Client
    records: list[RequestRecord]
    loop: asyncio.AbstractEventLoop
    server: Server
    engine: Engine
    clock: Clock
    bounds: list[float]
    """Within how many seconds it has to have ended, as it was said at each stop."""

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.port}"

    def stop(self) -> None:
        """What the first SIGTERM does; called again, what the second does."""
        self.loop.call_soon_threadsafe(self.server.stop)

    def pool(self) -> dict[str, int]:
        """Pages by state, and the engine's counts, when it has time for them."""
        while (answer := self.http.get("/admin/pool")).status_code == 503:
            pass
        counts: dict[str, int] = answer.raise_for_status().json()
        return counts

    def wait_for_idle(self) -> dict[str, int]:
        """Ask until nothing runs; the test's timeout bounds it."""
        while True:
            pool = self.pool()
            if pool["running"] == 0 and pool["waiting"] == 0:
                return pool

    def ended(self, number: int = 1) -> list[RequestRecord]:
        """The records of so many requests, once there are; the test's timeout bounds it. The
        engine is idle a little earlier."""
        while len(self.records) < number:
            time.sleep(0.001)
        assert len(self.records) == number
        return self.records

    def go_on(self) -> None:
        """What the engine holds is due now, and so is every deadline."""
        self.clock.ahead_ns += int(HELD_S * 1e9)
        with contextlib.suppress(EngineError):  # a draining one may end with it
            asyncio.run_coroutine_threadsafe(self.engine.stats(), self.loop).result(30)


@contextlib.contextmanager
def run_server(
    *scripts: Script,
    script_for: ScriptFor | None = None,
    settings: Settings | None = None,
    info: EngineInfo = INFO,
    app_for: Callable[[Services], App] = create_app,
    max_open: int = 1024,
    keys: KeyFile | None = None,
    assets: TextAssets | None = None,
) -> Iterator[LiveServer]:
    """A server on a free port; the n-th request gets the n-th script, round and round."""
    settings = replace(settings or Settings(), port=0, drain_s=5.0)
    play = script_for or in_order(scripts, repeat=True)
    text = assets or byte_assets()
    started: Future[LiveServer] = Future()

    def run() -> None:
        with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
            runner.run(_serve(settings, play, info, app_for, max_open, keys, text, started))

    thread = threading.Thread(target=run, name="server")
    thread.start()
    try:
        live = started.result(timeout=30)
        try:
            with live.http:
                yield live
        finally:
            with contextlib.suppress(RuntimeError):  # it has ended already
                live.stop()
    finally:
        thread.join(timeout=60)
        assert not thread.is_alive(), "the server does not end"


async def _serve(
    settings: Settings,
    script_for: ScriptFor,
    info: EngineInfo,
    app_for: Callable[[Services], App],
    max_open: int,
    keys: KeyFile | None,
    assets: TextAssets,
    started: "Future[LiveServer]",
) -> None:
    clock = Clock()
    try:
        engine = await start_thread_engine(
            lambda: ScriptedCore(
                script_for, info=info, eos_token_ids=assets.eos_token_ids, clock_ns=clock
            ),
            max_open=max_open,
        )
        records = Records()
        services = build_services(settings, engine, assets, records, keys=keys)
        server = Server(app_for(services), engine, settings)
        sock = bind(settings)
        port = sock.getsockname()[1]
        http = httpx.Client(base_url=f"http://127.0.0.1:{port}", timeout=30, trust_env=False)
        loop = asyncio.get_running_loop()
        bounds: list[float] = []
        live = LiveServer(port, http, records.finished, loop, server, engine, clock, bounds)
        try:
            await server.serve(sock, lambda: started.set_result(live), bounds.append)
        finally:
            await engine.close()
    except BaseException as error:
        if not started.done():
            started.set_exception(error)
        raise


@pytest.fixture
def live_server() -> Iterator[Callable[..., LiveServer]]:
    """`run_server` for one test: call it with scripts; the server ends with the test."""
    with contextlib.ExitStack() as stack:
        yield lambda *scripts, **options: stack.enter_context(run_server(*scripts, **options))


def quick(**limits: float) -> Settings:
    """Settings with other limits."""
    return Settings(limits=replace(Limits(), **limits))  # type: ignore[arg-type]
