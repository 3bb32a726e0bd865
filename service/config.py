"""`Settings`: everything that can be chosen at start, once, immutable from then on.

The command line is the only source, but for OpenTelemetry's standard variables: no other place in
the server reads the environment.
"""

import math
from dataclasses import dataclass, field
from ipaddress import ip_address
from pathlib import Path

import msgspec

from engine.types import EngineConfig
from service.telemetry.settings import TelemetrySettings
from service.tools.formats import FormatName

MAX_THREADS = 1024


class SettingsError(Exception):
    """A setting that cannot stand; the message says what to do."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Limits:
    """Bounds of the edge: what is larger is refused, never queued."""

    body_bytes: int = 32 << 20
    offload_bytes: int = 64 << 10  # bodies above this are decoded off the event loop
    ws_frame_bytes: int = 32 << 20
    ws_queue_frames: int = 32
    ws_ping_interval_s: float = 20.0
    ws_ping_timeout_s: float = 30.0
    keep_alive_s: float = 15.0  # longest silence of a stream
    send_buffer_bytes: int = 64 << 10  # the kernel's, per client
    write_buffer_bytes: int = 16 << 10  # ours before its writer waits, per client
    write_stall_s: float = 30.0  # a client that takes nothing of what waits for it
    connections: int = 1024
    idle_s: float = 75.0  # of a connection between two requests
    header_s: float = 30.0  # from a request's first byte to the end of its header
    header_bytes: int = 64 << 10
    header_fields: int = 256
    body_silence_s: float = 30.0  # between two pieces of a body
    body_s: float = 300.0  # for all of it
    request_bytes: int = 256 << 20  # of all requests that are read or answered, together
    responses_ttl_s: float = 3600.0  # of a stored response, from its last use
    responses_bytes: int = 256 << 20
    background_responses: int = 64  # running at a time


@dataclass(frozen=True, slots=True, kw_only=True)
class Settings:
    """The server's settings. Zero and None mean: choose from the machine and the model.

    `model_names`: the first is the served id, the others are aliases; empty for the model's own.
    `script`: a file of scripted tokens that are served in place of the model's (load tests).
    `drain_s`: how long running requests may take to finish when the server is told to end.
    `cache_dir`: where what is cached is kept from one start to the next; `cache_disk_bytes`: room
    on disk for what is evicted.
    `prewarm`: a file of prompts that are computed before the server is ready.
    `step_limit_s`: the engine counts as hung after so long a silence; `engine_restarts`: how often
    within a minute it is started again.
    `telemetry`: what is exported, to where the OTEL_* variables say.
    `tool_format`: how the model writes calls; None for what its chat template shows.
    `itl_target_ms`, `ttft_target_ms`: what is kept under load, between tokens and up to the first.
    `prefill_chunk`: prompt tokens per step, fixed; 0 for what the time allows.
    `speculation`: steps also compute what may come next, where that pays.
    `keys`: the file of API keys (see `access/keys.py`); None for a server that knows no tenants.
    `allowed_hosts` and `allowed_origins` add to what is allowed anyway (see `access.py`).
    """

    host: str = "127.0.0.1"
    port: int = 8000
    model: Path | None = None
    script: Path | None = None
    model_names: tuple[str, ...] = ()
    kv_memory_bytes: int = 0
    max_context: int = 0
    threads: int = 0
    exact: bool = False
    kv_dtype: str = "auto"
    backend: str = "auto"
    itl_target_ms: float = 0.0
    ttft_target_ms: float = 0.0
    prefill_chunk: int = 0
    speculation: bool = True
    allowed_hosts: tuple[str, ...] = ()
    allowed_origins: tuple[str, ...] = ()
    allow_public: bool = False
    keys: Path | None = None
    tls_cert: Path | None = None
    tls_key: Path | None = None
    tool_format: FormatName | None = None
    prewarm: Path | None = None
    cache_dir: Path | None = None
    cache_disk_bytes: int = 0
    drain_s: float = 30.0
    step_limit_s: float = 120.0
    engine_restarts: int = 5
    log_level: str = "info"
    telemetry: TelemetrySettings = field(default_factory=TelemetrySettings)
    limits: Limits = field(default_factory=Limits)

    def engine_config(self, model: Path) -> EngineConfig:
        """What the engine process is started with."""
        if self.script is not None:
            return EngineConfig(
                model=str(self.script), backend="scripted", log_level=self.log_level
            )
        config = EngineConfig(
            model=str(model),
            kv_memory_bytes=self.kv_memory_bytes,
            max_context=self.max_context,
            threads=self.threads,
            exact=self.exact,
            kv_dtype=self.kv_dtype,
            backend=self.backend,
            cache_disk_bytes=self.cache_disk_bytes,
            cache_dir="" if self.cache_dir is None else str(self.cache_dir.absolute()),
            log_level=self.log_level,
            decode_token_budget=self.prefill_chunk,
            itl_target_ms=self.itl_target_ms,
            ttft_target_ms=self.ttft_target_ms,
            speculation=self.speculation,
        )
        chunk = self.prefill_chunk or config.token_budget
        return msgspec.structs.replace(config, token_budget=chunk)


def check_settings(settings: Settings) -> None:
    """Raises SettingsError for what cannot stand, in the words of the command line."""
    if not 0 <= settings.port <= 65535:
        raise SettingsError(f"--port {settings.port} is no port: choose 0 to 65535.")
    if settings.max_context < 0 or settings.threads < 0:
        raise SettingsError("--max-context and --threads cannot be negative.")
    if settings.threads > MAX_THREADS:
        raise SettingsError(
            f"--threads {settings.threads} is more than machines have cores: leave it out for "
            "one thread per core."
        )
    if settings.exact and settings.kv_dtype == "bf16":
        raise SettingsError(
            "--kv-dtype bf16 cannot be with --exact, whose pages are finer: leave out one of them."
        )
    _check_scheduling(settings)
    for option, path in (("--tls-cert", settings.tls_cert), ("--tls-key", settings.tls_key)):
        if path is not None and not path.is_file():
            raise SettingsError(f"{option} {path} is no file.")
    if settings.tls_key is not None and settings.tls_cert is None:
        raise SettingsError("--tls-key needs --tls-cert.")
    _check_supervision(settings)
    _check_limits(settings.limits)
    guarded = settings.keys is not None or settings.allow_public
    if not is_loopback(settings.host) and not guarded:
        raise SettingsError(
            f"--host {settings.host} lets other machines in, and anyone who reaches it could use "
            "it. Give it keys with --keys FILE (make one: `headwater key TENANT`), or say "
            "--allow-public if open is what you want."
        )


def _check_scheduling(settings: Settings) -> None:
    targets = (
        ("--itl-target-ms", settings.itl_target_ms),
        ("--ttft-target-ms", settings.ttft_target_ms),
    )
    for option, target_ms in targets:
        if not 0 <= target_ms < math.inf:
            raise SettingsError(
                f"{option} {target_ms:g} is no time: give finite milliseconds, or 0 for none."
            )
    if settings.prefill_chunk < 0:
        raise SettingsError(f"--prefill-chunk {settings.prefill_chunk} is negative.")
    if settings.prefill_chunk and settings.itl_target_ms:
        raise SettingsError("--prefill-chunk fixes what --itl-target-ms would choose: give one.")


def _check_supervision(settings: Settings) -> None:
    if not math.isfinite(settings.drain_s) or settings.drain_s < 0:
        raise SettingsError(f"--drain {settings.drain_s:g} is no time: give seconds, 0 or more.")
    if not math.isfinite(settings.step_limit_s) or settings.step_limit_s < 1:
        raise SettingsError(
            f"--step-limit {settings.step_limit_s:g} is shorter than honest steps: give at least 1 "
            "second."
        )
    if settings.engine_restarts < 0:
        raise SettingsError(f"--engine-restarts {settings.engine_restarts} is negative.")


def _check_limits(limits: Limits) -> None:
    if not math.isfinite(limits.write_stall_s) or limits.write_stall_s < 1:
        raise SettingsError(
            f"--write-timeout {limits.write_stall_s:g} is too short for honest networks: give at "
            "least 1 second."
        )
    if limits.connections < 1:
        raise SettingsError(f"--max-connections {limits.connections} lets nobody in.")
    if limits.request_bytes < limits.body_bytes:
        raise SettingsError(
            f"--request-memory {limits.request_bytes} has no room for one body, which may have "
            f"{limits.body_bytes >> 20}MiB."
        )


def is_loopback(host: str) -> bool:
    """Whether a bind address is reachable from this machine only."""
    if host == "localhost":
        return True
    try:
        return ip_address(host).is_loopback
    except ValueError:
        return False
