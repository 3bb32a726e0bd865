"""The process border: starts an engine and returns the `Engine` that speaks to it."""

from engine.logs import start_logging
from engine.transport.client import EngineClient
from engine.transport.process import start_process_engine
from engine.transport.supervisor import EngineSupervisor, Supervision, start_supervised_engine
from engine.transport.thread import start_thread_engine

__all__ = [
    "EngineClient",
    "EngineSupervisor",
    "Supervision",
    "start_logging",
    "start_process_engine",
    "start_supervised_engine",
    "start_thread_engine",
]
