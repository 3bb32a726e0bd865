"""What callers are told about the cache: reports of requests, explanations, leases."""

import time
from dataclasses import dataclass

import msgspec

from engine.scheduling.request import Request
from engine.types import (
    CacheAnswer,
    CacheCall,
    CacheEventInfo,
    CacheReport,
    EngineInfo,
    ExplainPrompt,
    ExtendLease,
    KeepPrefix,
    LeaseInfo,
    ListLeases,
    ReleaseLease,
    pack_tokens,
    unpack_tokens,
)
from prefix_cache.cache import Explanation, Lease, PrefixCache
from prefix_cache.explain import MissReason
from prefix_cache.key import Namespace


@dataclass(frozen=True, slots=True)
class CacheDesk:
    """Speaks of one cache in the engine's terms; used on the engine's thread."""

    cache: PrefixCache
    info: EngineInfo
    kv_dtype: str

    def namespace(self, tenant: str, salt: str) -> Namespace:
        """Where the pages of such requests are: what computes them is the engine's, who may see
        them the credential's, and a salt only narrows."""
        info = self.info
        return Namespace(info.model_digest, info.numeric_mode, self.kv_dtype, tenant, salt)

    def report(self, request: Request) -> CacheReport:
        """Of a request that was just admitted."""
        assert request.explanation is not None
        num_cached = request.num_cached_tokens
        num_in_flight = 0
        if request.num_matched_on_arrival >= 0:
            found_later = num_cached - request.num_matched_on_arrival
            num_in_flight = max(0, found_later - request.num_disk_tokens)
        if request.sampling.prompt_logprobs is not None:
            return CacheReport(num_cached, reason=MissReason.DISABLED, position=num_cached)
        report = _report(request.explanation, num_cached, num_in_flight)
        return msgspec.structs.replace(report, num_disk_tokens=request.num_disk_tokens)

    def keep(self, request: Request) -> None:
        """Grant what leases the request asks for; its prompt is computed."""
        request.leases = [self._keep(request, each) for each in request.keep]
        request.keep = ()

    def ask(self, call: CacheCall) -> CacheAnswer:
        """See `engine.core.Core.ask_cache`."""
        match call:
            case ExplainPrompt(tenant, salt, token_ids):
                tokens = unpack_tokens(token_ids)
                found = self.cache.explain(self.namespace(tenant, salt), tokens)
                # A request computes its last token in any case, for its logits.
                return _report(found, max(0, min(found.num_matched, len(tokens) - 1)), 0)
            case ListLeases(tenant):
                return tuple(map(self._info, self.cache.leases.of(tenant)))
            case ExtendLease(tenant, lease_id, ttl_s):
                lease = self.cache.leases.extend(tenant, lease_id, ttl_s)
            case ReleaseLease(tenant, lease_id):
                lease = self.cache.leases.release(tenant, lease_id)
        return () if lease is None else (self._info(lease),)

    def take_events(self) -> tuple[CacheEventInfo, ...]:
        """What became cached or ceased to be since the last call, while it is watched."""
        return tuple(
            CacheEventInfo(
                event.kind,
                event.namespace.tenant if event.namespace else "",
                event.namespace.salt if event.namespace else "",
                event.pages,
                event.parent,
                event.lease_id,
            )
            for event in self.cache.events.take()
        )

    def _keep(self, request: Request, asked: KeepPrefix) -> LeaseInfo:
        num_tokens = request.num_prompt_tokens
        if asked.num_tokens >= 0:
            num_tokens = min(num_tokens, asked.num_tokens)
        prefix = request.token_ids[:num_tokens]
        lease = self.cache.leases.grant(request.namespace, prefix, asked.ttl_s)
        if lease is None:
            return LeaseInfo("", 0, num_tokens, asked.ttl_s, 0.0, salt=request.namespace.salt)
        return self._info(lease)

    def _info(self, lease: Lease) -> LeaseInfo:
        return LeaseInfo(
            lease.id,
            len(lease.pages) * self.info.page_size,
            lease.num_tokens_asked,
            lease.ttl_s,
            max(0.0, lease.expires_s - time.monotonic()),
            lease.num_hits,
            lease.namespace.salt,
        )


def _report(found: Explanation, num_cached: int, num_in_flight: int) -> CacheReport:
    return CacheReport(
        num_cached,
        num_in_flight,
        reason=found.reason or "",
        position=found.num_matched,
        stored=pack_tokens(found.stored),
        evicted_ago_s=found.evicted_ago_s,
    )
