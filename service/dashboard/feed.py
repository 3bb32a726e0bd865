"""The feed of the page: one look at the engine for all who watch, none while nobody does."""

import asyncio
import secrets
import time
from collections.abc import AsyncGenerator, Mapping
from contextlib import aclosing, suppress
from contextvars import Context
from typing import Any, Final

import anyio
import msgspec
from anyio.abc import TaskGroup
from anyio.streams.memory import MemoryObjectSendStream
from starlette.websockets import WebSocket, WebSocketDisconnect

from engine.api import Engine, EngineError
from engine.views import EngineView, TreeView
from service.config import Settings
from service.dashboard.lanes import EndedRequests, Lanes
from service.errors import ApiError, draining, overloaded
from service.events import RequestRecord
from service.model_card import ModelCard
from service.roofline import describe_machine, describe_work
from service.transport.handshake import SERVICE_RESTART, accepted_protocol, deny

BUSY_S: Final = 0.25
IDLE_S: Final = 0.5
TREE_S: Final = 1.0
"""A survey of the tree begins at most so often, and only when something ran since the last."""
ROOFLINE_S: Final = 1.0
MAX_WATCHERS: Final = 32
_MAX_BEHIND: Final = 64
"""Frames. Who is farther behind is let go, and comes back to a snapshot."""

Watcher = MemoryObjectSendStream[str]


class Feed:
    """Messages in JSON; each watcher gets a snapshot, then what changes. It belongs to one event
    loop."""

    def __init__(
        self,
        engine: Engine,
        settings: Settings,
        card: ModelCard,
        open_records: Mapping[str, RequestRecord],
        ended: EndedRequests,
    ) -> None:
        self._engine = engine
        self._settings = settings
        self._card = card
        self._epoch_ns = time.monotonic_ns()
        self._boot = secrets.token_hex(8)
        self._lanes = Lanes(open_records, ended, self._ms)
        self._watchers: set[Watcher] = set()
        self._task: asyncio.Task[None] | None = None
        self._draining = False
        self._last: dict[str, Any] = {}
        self._tree: TreeView | None = None
        self._tree_begun_ns = self._changed_ns = 0
        self._num_steps = -1
        self._roofline_ns = 0
        self._plot: dict[str, Any] = {}

    async def watch(self) -> AsyncGenerator[str, None]:
        """The frames of one watcher, until the server drains or it does not keep up. Raises
        ApiError at the first read where too many watch already."""
        if self._draining:
            raise draining("open the dashboard again later")
        if len(self._watchers) >= MAX_WATCHERS:
            raise overloaded(f"The dashboard is watched by {MAX_WATCHERS} already: close one.")
        sender, receiver = anyio.create_memory_object_stream[str](_MAX_BEHIND)
        sender.send_nowait(_frame(self._hello()))
        self._watchers.add(sender)
        if self._task is None or self._task.done():
            loop = asyncio.get_running_loop()
            # It outlives the request that begins it, so its lines are not that one's.
            self._task = loop.create_task(self._look_on(), context=Context())
        try:
            async with receiver:
                async for frame in receiver:
                    yield frame
        finally:
            self._drop(sender)
            if not self._watchers and self._task is not None:
                self._task.cancel()

    async def drain(self) -> None:
        """Let all watchers go; they may come back to the next server."""
        self._draining = True
        for watcher in list(self._watchers):
            self._drop(watcher)

    async def _look_on(self) -> None:
        while self._watchers:
            message, busy = await self._look()
            if message:
                frame = _frame(message)
                for watcher in list(self._watchers):
                    try:
                        watcher.send_nowait(frame)
                    except (anyio.WouldBlock, anyio.BrokenResourceError):
                        self._drop(watcher)
            await asyncio.sleep(BUSY_S if busy else IDLE_S)

    async def _look(self) -> tuple[dict[str, Any], bool]:
        """What has changed (nothing: empty), and whether anything runs."""
        health = self._engine.health
        present: dict[str, Any] = {"engine": health.state, "reason": health.reason}
        news: dict[str, Any] = {}
        busy = False
        try:
            view = await self._engine.view(tree=self._wants_tree())
        except EngineError as error:
            present["reason"] = present["reason"] or str(error)
            news["lanes"] = self._lanes.advance((), time.monotonic_ns())
        else:
            busy = bool(view.lanes)
            present["stats"] = self._stats(view)
            news["lanes"] = self._lanes.advance(view.lanes, view.time_ns)
            if view.tree is not None:
                if self._tree is None or _tree(view.tree) != _tree(self._tree):
                    news["tree"] = _tree(view.tree)
                self._tree = view.tree
            if view.time_ns - self._roofline_ns > ROOFLINE_S * 1e9:
                news |= self._roofline(view)
        if present == self._last and not any(news.values()):
            return {}, busy
        self._last = present
        return {"type": "view", "now": self._now(), **present, **news}, busy

    def _wants_tree(self) -> bool:
        """When a survey is not complete yet, or something may have changed since the last."""
        now_ns = time.monotonic_ns()
        if self._tree is None or self._tree.time_ns < self._tree_begun_ns:
            return True
        is_soon = now_ns - self._tree_begun_ns < TREE_S * 1e9
        if is_soon or self._tree.time_ns > self._changed_ns:
            return False
        self._tree_begun_ns = now_ns
        return True

    def _stats(self, view: EngineView) -> dict[str, Any]:
        stats = view.stats
        mark = stats.num_steps + sum(stats.evicted_pages.values()) + stats.pool.pinned
        if mark != self._num_steps:
            self._num_steps, self._changed_ns = mark, view.time_ns
        return {
            "pool": stats.pool,
            "running": stats.running,
            "waiting": stats.waiting,
            "paused": stats.paused,
            "evicted": stats.evicted_pages,
            "disk": stats.num_disk_pages,
            "steps": stats.num_steps,
            "queried": stats.num_queried_tokens,
            "cached": stats.num_cached_tokens,
            "computed": stats.num_computed_tokens,
            "output": stats.num_output_tokens,
            "preemptions": stats.num_preemptions,
        }

    def _roofline(self, view: EngineView) -> dict[str, Any]:
        """The steps by kind and one by one, where there are new ones."""
        stats = view.stats
        steps = [
            (work.kind, work.intensity, work.flops / work.wall_ns, work.num_tokens)
            for work in stats.recent_steps
            if work.wall_ns
        ]
        if not steps or steps == self._plot.get("steps"):
            return {}
        self._roofline_ns = view.time_ns
        phases = [describe_work(work) for work in stats.work]
        machine = describe_machine(self._engine.info, stats)
        self._plot = {"machine": machine, "phases": phases, "steps": steps}
        return {"roofline": self._plot}

    def _hello(self) -> dict[str, Any]:
        info, settings = self._engine.info, self._settings
        return {
            "type": "hello",
            "boot": self._boot,
            "now": self._now(),
            "model": self._card.id,
            "backend": info.backend,
            "numeric_mode": info.numeric_mode,
            "threads": info.threads,
            "max_context": info.max_context,
            "page_size": info.page_size,
            "page_bytes": info.page_bytes,
            "itl_target_ms": settings.itl_target_ms,
            "ttft_target_ms": settings.ttft_target_ms,
            "lanes": self._lanes.snapshot(),
            **({"tree": _tree(self._tree)} if self._tree else {}),
            **({"roofline": self._plot} if self._plot else {}),
            **self._last,
        }

    def _drop(self, watcher: Watcher) -> None:
        self._watchers.discard(watcher)
        watcher.close()

    def _now(self) -> float:
        return self._ms(time.monotonic_ns())

    def _ms(self, time_ns: int) -> float:
        return round((time_ns - self._epoch_ns) / 1e6, 1)


class FeedSocket:
    """`GET /admin/feed`: what the page shows, over a WebSocket on which only the server speaks."""

    def __init__(self, feed: Feed) -> None:
        self._feed = feed

    async def endpoint(self, websocket: WebSocket) -> None:
        """Until the watcher leaves, does not keep up, or the server drains."""
        async with aclosing(self._feed.watch()) as frames:
            try:
                first = await anext(frames)
            except ApiError as error:
                await deny(websocket.send, error)
                return
            await websocket.accept(accepted_protocol(websocket.scope["subprotocols"]))
            async with anyio.create_task_group() as tasks:
                tasks.start_soon(_write, websocket, first, frames, tasks)
                while (await websocket.receive())["type"] != "websocket.disconnect":
                    pass
                tasks.cancel_scope.cancel()


async def _write(
    websocket: WebSocket, first: str, frames: AsyncGenerator[str, None], tasks: TaskGroup
) -> None:
    with suppress(WebSocketDisconnect):
        await websocket.send_text(first)
        async for frame in frames:
            await websocket.send_text(frame)
        await websocket.close(SERVICE_RESTART)
    tasks.cancel_scope.cancel()


def _tree(tree: TreeView) -> dict[str, Any]:
    return {"nodes": tree.nodes, "num_nodes": tree.num_nodes, "num_pages": tree.num_pages}


def _frame(message: dict[str, Any]) -> str:
    return msgspec.json.encode(message).decode()
