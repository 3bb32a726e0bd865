"""`Services`: the parts of a running edge, made once and handed to every endpoint."""

from dataclasses import dataclass

from engine.api import Engine
from engine.text import TextAssets
from service.access.keys import KeyFile, TenantLimits
from service.access.limiter import TenantLimiter
from service.config import Settings
from service.generation import Generator
from service.model_card import ModelCard
from service.prompts import PromptRenderer
from service.responses import Responses
from service.responses_store import ResponsesStore
from service.telemetry.tracing import NoTracing, TraceSink
from service.tools.formats import format_of
from service.tools.reader import AnswerReaders


@dataclass(frozen=True, slots=True)
class Services:
    """What endpoints may use. All of it belongs to one event loop."""

    settings: Settings
    engine: Engine
    assets: TextAssets
    renderer: PromptRenderer
    generator: Generator
    card: ModelCard
    trace: TraceSink
    responses: Responses
    keys: KeyFile | None


def build_services(
    settings: Settings,
    engine: Engine,
    assets: TextAssets,
    trace: TraceSink | None = None,
    keys: KeyFile | None = None,
) -> Services:
    """The services of a started engine; without `keys` it knows no tenants."""
    trace = trace or NoTracing()
    limiter = TenantLimiter(_unlimited if keys is None else keys.limits)
    renderer = PromptRenderer(assets, engine.info.max_context)
    readers = AnswerReaders(assets, format_of(assets.chat_template, settings.tool_format))
    generator = Generator(engine, renderer, readers, trace, limiter)
    card = ModelCard.of(engine.info, settings.model_names)
    limits = settings.limits
    store = ResponsesStore(ttl_s=limits.responses_ttl_s, max_bytes=limits.responses_bytes)
    return Services(
        settings=settings,
        engine=engine,
        assets=assets,
        renderer=renderer,
        generator=generator,
        card=card,
        trace=trace,
        responses=Responses(generator, store, card.id, limits.background_responses),
        keys=keys,
    )


def _unlimited(tenant: str) -> TenantLimits:
    return TenantLimits()
