"""The cache by hand: why a prompt would miss, warming one, and leases on prefixes.

All of it is a tenant's own: other tenants' prefixes and leases are as if they were not.
"""

import time
from typing import Final, TypeVar

import msgspec
from starlette.types import Receive, Scope, Send

from engine.types import (
    ExplainPrompt,
    ExtendLease,
    LeaseInfo,
    ListLeases,
    ReleaseLease,
    pack_tokens,
)
from service.cache.report import ShownLease, summarise
from service.dialects import wire
from service.dialects.known_fields import KnownFields
from service.errors import ApiError, asked
from service.prewarm import FIELDS, TTL_NAMES, PromptBody, Ttl, WarmBody, read_prompt, seconds, warm
from service.services import Services
from service.transport.http import begin_record, read_decoded, send_json, while_connected

DEFAULT_TTL_S: Final = 300.0

Body = TypeVar("Body")


class ExtendBody(msgspec.Struct, frozen=True):
    ttl: Ttl


_EXTEND_FIELDS: Final = KnownFields.of(ExtendBody, harmless="", meant=TTL_NAMES)


class Explain:
    """`POST /v1/cache/explain`: what the cache would have of a prompt; nothing is computed."""

    def __init__(self, services: Services) -> None:
        self._services = services

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        services = self._services
        body = await _body(scope, receive, services, PromptBody, FIELDS)

        async def answer() -> None:
            conversation, token_ids = await read_prompt(body, services)
            salt = body.cache_salt or ""
            call = ExplainPrompt(scope["state"]["tenant"], salt, pack_tokens(token_ids))
            report = await asked(services.engine.explain(call))
            cache = summarise(report, token_ids, services.assets.vocabulary, conversation)
            fields = {"prompt_tokens": len(token_ids), "cache": cache}
            await send_json(send, {"object": "cache.explanation", **fields})

        await while_connected(receive, answer)


class Prewarm:
    """`POST /v1/cache/prewarm`: compute a prompt now; with a `ttl` it is leased too."""

    def __init__(self, services: Services) -> None:
        self._services = services

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        lease, fields = await _warm(scope, receive, self._services)
        await send_json(send, {"object": "cache.prewarm", **fields, "lease": lease})


class Leases:
    """`GET /v1/cache/leases`: the tenant's leases; `POST`: one more, of a prompt that is computed
    first where it is not cached."""

    def __init__(self, services: Services) -> None:
        self._services = services

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["method"] == "POST":
            lease, _ = await _warm(scope, receive, self._services, DEFAULT_TTL_S)
            if lease is None:
                raise ApiError(501, "This engine keeps no cache.", code="no_cache")
            await send_json(send, lease)
            return
        leases = await asked(self._services.engine.leases(ListLeases(scope["state"]["tenant"])))
        await send_json(
            send, {"object": "list", "data": [ShownLease.of(lease) for lease in leases]}
        )


class OneLease:
    """`GET /v1/cache/leases/{id}` tells of a lease, `POST` lets it last `ttl` from now, `DELETE`
    ends it."""

    def __init__(self, services: Services) -> None:
        self._services = services

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        tenant, lease_id = scope["state"]["tenant"], scope["path_params"]["id"]
        if scope["method"] in ("GET", "HEAD"):
            held = await asked(self._services.engine.leases(ListLeases(tenant)))
            these = tuple(lease for lease in held if lease.id == lease_id)
            await send_json(send, ShownLease.of(_found(these, lease_id)))
            return
        if scope["method"] == "POST":
            body = await _body(scope, receive, self._services, ExtendBody, _EXTEND_FIELDS)
            call = ExtendLease(tenant, lease_id, seconds(body.ttl))
            lease = _found(await asked(self._services.engine.leases(call)), lease_id)
            await send_json(send, ShownLease.of(lease))
            return
        released = await asked(self._services.engine.leases(ReleaseLease(tenant, lease_id)))
        _found(released, lease_id)
        fields = {"id": lease_id, "object": "cache.lease.deleted", "deleted": True}
        await send_json(send, fields)


async def _warm(
    scope: Scope, receive: Receive, services: Services, default_ttl_s: float | None = None
) -> tuple[ShownLease | None, dict[str, int]]:
    """Compute the prompt of a body; its lease, where one was asked for, and its tokens."""
    start_ns = time.monotonic_ns()
    body = await _body(scope, receive, services, WarmBody, FIELDS)
    model = services.card.id
    record = begin_record(scope, operation="prewarm", model=model, start_ns=start_ns, stream=False)
    leases: list[ShownLease] = []
    fields: dict[str, int] = {}

    async def compute() -> None:
        usage = (await warm(services, body, record, default_ttl_s)).usage
        leases.extend(usage.cache.leases if usage.cache else ())
        fields["prompt_tokens"] = usage.prompt_tokens
        fields["cached_tokens"] = usage.cached_tokens
        fields["computed_tokens"] = usage.prompt_tokens - usage.cached_tokens

    await while_connected(receive, compute, [record])
    return (leases[0] if leases else None), fields


def _found(leases: tuple[LeaseInfo, ...], lease_id: str) -> LeaseInfo:
    if not leases:
        raise ApiError(404, f"No lease has the id {lease_id!r}.", code="lease_not_found")
    return leases[0]


async def _body(
    scope: Scope, receive: Receive, services: Services, kind: type[Body], known: KnownFields
) -> Body:
    def decode(data: bytes) -> Body:
        known.check(data)
        return wire.decode(data, kind)

    return await read_decoded(scope, receive, decode, services.settings.limits)
