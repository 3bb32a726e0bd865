"""`Services`: the parts of a running edge, made once and handed to every endpoint."""

from dataclasses import dataclass

from engine.api import Engine
from engine.text import TextAssets
from service.access.keys import KeyFile, TenantLimits
from service.access.limiter import TenantLimiter
from service.config import Settings
from service.dashboard.feed import Feed
from service.dashboard.lanes import EndedRequests
from service.generation import Generator
from service.model_card import ModelCard
from service.prompts import PromptRenderer
from service.responses.store import ResponsesStore
from service.responses.turns import Responses
from service.telemetry.metrics import Metrics
from service.telemetry.request_log import RequestLog
from service.telemetry.request_metrics import RequestMetrics
from service.telemetry.samples import Counts
from service.telemetry.sinks import RecordSink, Sinks
from service.telemetry.tracing import RequestTracer
from service.tools.formats import format_of
from service.tools.reader import AnswerReaders
from service.transport.connections import Connections
from service.transport.intake import Intake


@dataclass(frozen=True, slots=True)
class Services:
    """What endpoints may use. All of it belongs to one event loop."""

    settings: Settings
    engine: Engine
    assets: TextAssets
    renderer: PromptRenderer
    generator: Generator
    card: ModelCard
    records: RecordSink
    connections: Connections
    counts: Counts
    metrics: Metrics
    responses: Responses
    keys: KeyFile | None
    intake: Intake
    feed: Feed


def build_services(
    settings: Settings,
    engine: Engine,
    assets: TextAssets,
    *sinks: RecordSink,
    keys: KeyFile | None = None,
) -> Services:
    """The services of a started engine; `sinks` are told of every request that has ended. Without
    `keys` it knows no tenants."""
    limiter = TenantLimiter(_unlimited if keys is None else keys.limits)
    renderer = PromptRenderer(assets, engine.info.max_context)
    readers = AnswerReaders(assets, format_of(assets.chat_template, settings.tool_format))
    card = ModelCard.of(engine.info, settings.model_names)
    counts, connections = Counts(), Connections(settings.limits)
    tracers = [sink for sink in sinks if isinstance(sink, RequestTracer)]
    served = RequestMetrics(counts, card.id, settings.host, settings.port)
    ended = EndedRequests()
    records = Sinks(served, ended, RequestLog(), *sinks)
    captures = settings.telemetry.captures_content
    generator = Generator(engine, renderer, readers, records, limiter, captures_content=captures)
    limits = settings.limits
    store = ResponsesStore(ttl_s=limits.responses_ttl_s, max_bytes=limits.responses_bytes)
    return Services(
        settings=settings,
        engine=engine,
        assets=assets,
        renderer=renderer,
        generator=generator,
        card=card,
        records=records,
        connections=connections,
        counts=counts,
        metrics=Metrics(counts, connections, engine, card.id, tracers),
        responses=Responses(
            generator, store, card.id, assets.vocabulary, limits.background_responses
        ),
        keys=keys,
        intake=Intake(limits),
        feed=Feed(engine, settings, card, generator.open, ended),
    )


def _unlimited(tenant: str) -> TenantLimits:
    return TenantLimits()
