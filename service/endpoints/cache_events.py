"""`GET /v1/cache/events`: what becomes cached and what ceases to be, as server-sent events."""

import asyncio
from collections.abc import AsyncGenerator
from contextlib import aclosing
from typing import Any

import msgspec
from starlette.types import Receive, Scope, Send

from engine.types import CacheEventInfo
from service.services import Services
from service.transport.http import while_connected

_KEEP_ALIVE = b": keep-alive\n\n"


class CacheEvents:
    """The tenant's events, from now on; "resync" first, and whenever events were lost. Ends with
    the engine. A page's name is the same for the same prefix in every server of the model."""

    def __init__(self, services: Services) -> None:
        self._services = services

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        tenant = scope["state"]["tenant"]
        page_size = self._services.engine.info.page_size
        silence_s = self._services.settings.limits.keep_alive_s

        async def stream() -> None:
            async with aclosing(self._services.engine.cache_events()) as events:
                await send({"type": "http.response.start", "status": 200, "headers": _HEADERS})
                async with aclosing(_with_pauses(events, silence_s)) as told:
                    async for event in told:
                        if event is None:
                            await _write(send, _KEEP_ALIVE, more=True)
                        elif event.tenant in ("", tenant):
                            await _write(send, _frame(event, page_size), more=True)
            await _write(send, b"", more=False)

        await while_connected(receive, stream)


async def _with_pauses(
    events: AsyncGenerator[CacheEventInfo, None], silence_s: float
) -> AsyncGenerator[CacheEventInfo | None, None]:
    """The events, and None after each silence; an event that is waited for is not lost by that."""
    while True:
        pending = asyncio.ensure_future(anext(events, None))
        try:
            while not (await asyncio.wait({pending}, timeout=silence_s))[0]:
                yield None
            event = pending.result()
        finally:
            pending.cancel()
            await asyncio.wait({pending})
        if event is None:
            return
        yield event


_HEADERS = [(b"content-type", b"text/event-stream"), (b"cache-control", b"no-store")]


def _frame(event: CacheEventInfo, page_size: int) -> bytes:
    fields: dict[str, Any] = {"type": event.kind, "page_size": page_size}
    if event.kind != "resync":
        fields["pages"] = [name.hex() for name in event.pages]
        fields["parent"] = event.parent.hex() or None
        fields["cache_salt"] = event.salt or None
    if event.lease_id:
        fields["lease"] = event.lease_id
    return b"event: %b\ndata: %b\n\n" % (event.kind.encode(), msgspec.json.encode(fields))


async def _write(send: Send, body: bytes, *, more: bool) -> None:
    await send({"type": "http.response.body", "body": body, "more_body": more})
