"""What a command line asks for: its words as `Settings`, or one of the smaller commands."""

import argparse
import difflib
import os
import re
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from importlib.metadata import version
from pathlib import Path

from service.config import Limits, Settings, SettingsError, check_settings
from service.telemetry.settings import read_telemetry
from service.tools.formats import FORMAT_NAMES

_MEMORY = re.compile(r"(\d+(?:\.\d+)?)\s*(b|kib|mib|gib|tib|kb|mb|gb|tb|k|m|g|t)?", re.IGNORECASE)
_BINARY_STEPS = "bkmgt"
BACKENDS = ("auto", "triton", "cpu", "reference")
MAX_MEMORY_BYTES = 1 << 60
LEAST_PLAIN_BYTES = 1 << 20


def parse_memory(text: str) -> int:
    """Bytes of "2GiB", "512M", "1.5g" or a plain number; units are binary, as RAM is sold.

    Raises SettingsError, also for a plain number so small that its unit must have been forgotten.
    """
    match = _MEMORY.fullmatch(text.strip())
    if match is None:
        raise SettingsError(f"{text!r} is not a size; write it like 2GiB or 512MiB.")
    number, unit = match.groups()
    size = float(number) * 1024 ** _BINARY_STEPS.index((unit or "b")[0].lower())
    if unit is None and 0 < size < LEAST_PLAIN_BYTES:
        raise SettingsError(f"{number} bytes? Say {number}{'GiB' if size < 1024 else 'MiB'}.")
    if size > MAX_MEMORY_BYTES:
        raise SettingsError(f"{text!r} is more memory than any machine has: ask for less.")
    return int(size)


@dataclass(frozen=True, slots=True)
class PlanModel:
    """The command `headwater plan`: its arguments are for `engine.plan` to read."""

    arguments: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class NewKey:
    """The command that makes an API key."""

    tenant: str
    admin: bool


def parse_command(
    arguments: Sequence[str] | None = None,
) -> Settings | NewKey | PlanModel:
    """What a command line, by default this process's, asks for: to serve, a key, a plan.

    Exits with 2 and a sentence on a wrong option; raises SettingsError for a wrong value.
    """
    words = list(sys.argv[1:] if arguments is None else arguments)
    if words[:1] == ["plan"]:
        return PlanModel(tuple(words[1:]))
    parser, serve = _parsers()
    given, unknown = parser.parse_known_args(words)
    if unknown:
        parser.error(_unknown(unknown, serve))
    if given.command == "key":
        return NewKey(given.tenant, given.admin)
    return _settings(given)


def _unknown(words: Sequence[str], serve: argparse.ArgumentParser) -> str:
    """What is said of words that no command knows, with the option they may stand for."""
    known = re.findall(r"--[a-z-]+", serve.format_usage())
    option = words[0].partition("=")[0]
    close = difflib.get_close_matches(option, known, n=1)
    hint = (
        f"; did you mean {close[0]}?" if close else "; headwater serve --help lists what there is"
    )
    return f"unrecognized arguments: {' '.join(words)}{hint}"


def _settings(given: argparse.Namespace) -> Settings:
    settings = Settings(
        host=given.host,
        port=given.port,
        model=given.model,
        script=given.script,
        model_names=tuple(given.served_model_name),
        kv_memory_bytes=_memory("--kv-memory", given.kv_memory),
        max_context=given.max_context,
        threads=given.threads,
        exact=given.exact,
        kv_dtype=given.kv_dtype,
        backend=given.backend,
        itl_target_ms=given.itl_target_ms,
        ttft_target_ms=given.ttft_target_ms,
        prefill_chunk=given.prefill_chunk,
        speculation=given.speculation == "auto",
        allowed_hosts=tuple(given.allowed_host),
        allowed_origins=tuple(given.allowed_origin),
        allow_public=given.allow_public,
        keys=given.keys,
        tls_cert=given.tls_cert,
        tls_key=given.tls_key,
        tool_format=given.tool_format,
        drain_s=given.drain,
        step_limit_s=given.step_limit,
        prewarm=given.prewarm,
        cache_dir=given.cache_dir,
        cache_disk_bytes=_memory("--cache-disk", given.cache_disk),
        engine_restarts=given.engine_restarts,
        log_level=given.log_level,
        telemetry=read_telemetry(os.environ),
        limits=Limits(
            write_stall_s=given.write_timeout,
            connections=given.max_connections,
            request_bytes=_memory("--request-memory", given.request_memory),
        ),
    )
    check_settings(settings)
    return settings


def _memory(option: str, text: str) -> int:
    try:
        return parse_memory(text)
    except SettingsError as error:
        raise SettingsError(f"{option}: {error}") from None


def _parsers() -> tuple[argparse.ArgumentParser, argparse.ArgumentParser]:
    """That of all commands, and that of `serve` within it."""
    parser = argparse.ArgumentParser(
        prog="headwater", description="Streams language models to agents."
    )
    parser.add_argument("--version", action="version", version=f"headwater {version('headwater')}")
    commands = parser.add_subparsers(required=True, dest="command")
    commands.add_parser("plan", help="what a model needs and how fast it can be, from its header")
    key = commands.add_parser("key", help="make an API key for a tenant and its entry for --keys")
    key.add_argument("tenant", help="whose key it is, like research")
    key.add_argument("--admin", action="store_true", help="let it use /admin and /metrics")
    serve = commands.add_parser(
        "serve", help="serve a model over HTTP and WebSocket", description="Serve a model."
    )
    add, defaults = serve.add_argument, Limits()
    add("--host", default="127.0.0.1", help="address to listen on (default: %(default)s)")
    add("--port", type=int, default=8000, help="port to listen on (default: %(default)s)")
    add(
        "--allow-public",
        action="store_true",
        help="allow a --host that other machines reach without --keys (default: refuse to start)",
    )
    add(
        "--keys",
        type=Path,
        metavar="FILE",
        help="serve only who shows an API key of this file (make one: headwater key TENANT; "
        "default: whoever reaches the address)",
    )
    add(
        "--tls-cert",
        type=Path,
        metavar="FILE",
        help="serve TLS with this certificate chain, PEM (default: plain HTTP)",
    )
    add("--tls-key", type=Path, metavar="FILE", help="its private key (default: in the same file)")
    add("--model", type=Path, help="GGUF file or Hugging Face folder (default: the embedded one)")
    add(
        "--script",
        type=Path,
        metavar="FILE",
        help="serve the tokens of this JSON script, at its pace, instead of computing any "
        "(default: compute)",
    )
    add(
        "--served-model-name",
        nargs="+",
        default=[],
        metavar="NAME",
        help="the model's id, then its aliases (default: the model's own name)",
    )
    add(
        "--kv-memory",
        default="0",
        metavar="SIZE",
        help="memory for KV pages, like 2GiB (default: a quarter of what is free, at most 16 whole "
        "contexts; on a GPU four fifths of what the weights leave)",
    )
    add(
        "--max-context",
        type=int,
        default=0,
        metavar="TOKENS",
        help="longest prompt and answer together (default: the model's own, or what the pages "
        "hold)",
    )
    add("--threads", type=int, default=0, help="compute threads (default: one per core)")
    add(
        "--exact",
        action="store_true",
        help="compute with full-precision activations, slower (default: 8 bits per block of 32)",
    )
    add(
        "--kv-dtype",
        choices=("auto", "f16", "bf16", "int8"),
        default="auto",
        help="how pages hold keys and values; int8 takes half the memory (default: the backend's)",
    )
    add(
        "--backend",
        choices=BACKENDS,
        default="auto",
        help="kernels to use (default: auto, the fastest that runs here; reference is slow)",
    )
    add(
        "--itl-target-ms",
        type=float,
        default=0.0,
        metavar="MS",
        help="time between tokens of running streams to keep: prompts get what it leaves "
        "(default: 0, off: up to 8 times what the streams alone would take)",
    )
    add(
        "--ttft-target-ms",
        type=float,
        default=0.0,
        metavar="MS",
        help="time to the first token to keep: what would be late is refused, with a time to retry "
        "(default: 0, off: nothing is refused for that)",
    )
    add(
        "--prefill-chunk",
        type=int,
        default=0,
        metavar="TOKENS",
        help="compute that many tokens per step, whatever it takes (default: what the time allows)",
    )
    add(
        "--speculation",
        choices=("auto", "off"),
        default="auto",
        help="compute in a step what was said after the same words before, where that pays; "
        "answers are the same (default: %(default)s)",
    )
    add(
        "--allowed-host",
        action="append",
        default=[],
        metavar="NAME",
        help="another name this server answers to in the Host header; repeatable (default: "
        "localhost, that of --host, and any IP address)",
    )
    add(
        "--allowed-origin",
        action="append",
        default=[],
        metavar="ORIGIN",
        help="web pages that may use the server, like https://app.example; repeatable (default: "
        "its own)",
    )
    add(
        "--cache-dir",
        type=Path,
        metavar="DIR",
        help="keep the cache here over restarts: written at the end, read at the start (default: "
        "begin empty)",
    )
    add(
        "--cache-disk",
        default="0",
        metavar="SIZE",
        help="keep what is evicted on disk, up to this size (default: drop it)",
    )
    add(
        "--prewarm",
        type=Path,
        metavar="FILE",
        help="compute these prompts first: per line a body as of POST /v1/cache/prewarm (default: "
        "none)",
    )
    add(
        "--tool-format",
        choices=FORMAT_NAMES,
        help="how the model writes tool calls (default: as its chat template shows)",
    )
    add(
        "--drain",
        type=float,
        default=30.0,
        metavar="SECONDS",
        help="how long running requests may take to finish after SIGTERM (default: %(default)g)",
    )
    add(
        "--step-limit",
        type=float,
        default=120.0,
        metavar="SECONDS",
        help="start the engine again when it is silent for so long; more than the longest step "
        "of a large model on few cores takes (default: %(default)g)",
    )
    add(
        "--engine-restarts",
        type=int,
        default=5,
        metavar="N",
        help="how often within a minute the engine is started again before the server gives up "
        "(default: %(default)s)",
    )
    add(
        "--write-timeout",
        type=float,
        default=defaults.write_stall_s,
        metavar="SECONDS",
        help="drop a client that takes nothing of what waits for it for so long "
        "(default: %(default)g)",
    )
    add(
        "--max-connections",
        type=int,
        default=defaults.connections,
        metavar="N",
        help="connections at a time; one more is refused (default: %(default)s)",
    )
    add(
        "--request-memory",
        default=f"{defaults.request_bytes >> 20}MiB",
        metavar="SIZE",
        help="what all requests that are read or answered may bring together "
        "(default: %(default)s)",
    )
    add(
        "--log-level",
        default="info",
        choices=["debug", "info", "warning", "error"],
        help="the least that is logged, to standard error (default: %(default)s)",
    )
    return parser, serve
