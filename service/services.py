"""`Services`: the parts of a running edge, made once and handed to every endpoint."""

from dataclasses import dataclass

from engine.api import Engine
from engine.text import TextAssets
from service.config import Settings
from service.generation import Generator
from service.model_card import ModelCard
from service.prompts import PromptRenderer
from service.responses_store import ResponsesStore
from service.telemetry.tracing import NoTracing, TraceSink


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
    responses: ResponsesStore


def build_services(
    settings: Settings, engine: Engine, assets: TextAssets, trace: TraceSink | None = None
) -> Services:
    """The services of a started engine."""
    trace = trace or NoTracing()
    renderer = PromptRenderer(assets, engine.info.max_context)
    return Services(
        settings=settings,
        engine=engine,
        assets=assets,
        renderer=renderer,
        generator=Generator(engine, renderer, trace),
        card=ModelCard.of(engine.info, settings.model_names),
        trace=trace,
        responses=ResponsesStore(),
    )
