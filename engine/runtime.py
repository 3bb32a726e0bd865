"""Assembly: an `EngineConfig` becomes a core that is ready to step."""

import contextlib
import logging
import os
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from time import monotonic_ns
from types import MappingProxyType
from typing import Any, Final

import msgspec

from engine.api import EngineError
from engine.core import Core
from engine.execution.grammar import GrammarCompiler
from engine.execution.kv_memory import count_pages
from engine.execution.page_reader import PageReader
from engine.execution.runner import ModelRunner
from engine.execution.saved_cache import SavedCache
from engine.models import LoadedModel, load_model
from engine.scheduling.core import EngineCore
from engine.scheduling.itl_controller import ItlController
from engine.scheduling.output import OutputRules
from engine.scheduling.restoring import Restoring
from engine.scheduling.scheduler import Scheduler
from engine.scheduling.step_meter import StepMeter
from engine.start_times import StartTimes
from engine.text import TextAssets, load_text
from engine.types import EngineConfig, EngineInfo
from kernels.contract import BackendUnavailable, KVDType, KVLayout
from kernels.cpu.build import default_cache_dir
from kernels.peaks import Peaks, machine_peaks
from kernels.registry import Selection, select_backend
from kernels.roofline import StepCosts, WeightBytes
from prefix_cache.cache import PrefixCache
from prefix_cache.eviction import ExpectedReuse
from prefix_cache.folder_lock import FolderInUseError, FolderLock
from prefix_cache.restore import Restores
from prefix_cache.snapshot import Identity
from prefix_cache.tiers import DiskTier

_log = logging.getLogger(__name__)
_KV_DTYPES: Final = MappingProxyType({"f16": KVDType.F16, "bf16": KVDType.BF16, "int8": KVDType.I8})


@dataclass(frozen=True, slots=True)
class _Prepared:
    """A model's text side and mapped file, had ahead; None for what could not be."""

    text: TextAssets | None
    model: LoadedModel | None
    stamp: tuple[object, ...]
    times: StartTimes


def prepare_core(config: EngineConfig) -> Callable[[], Core]:
    """`build_core` for a call that comes later, with what can be had ahead for little memory: the
    modules, the text side, and the model's files, mapped. Files that have changed by then are read
    anew. Raises nothing: what is wrong with the files is for the call."""
    times = StartTimes()
    path = Path(config.model)
    text: TextAssets | None = None
    model: LoadedModel | None = None
    stamp = _stamp(path)
    with contextlib.suppress(Exception):
        text = load_text(path)
    times.mark("tokenizer")
    with contextlib.suppress(Exception):
        model = load_model(path)
    times.mark("file")
    prepared = _Prepared(text, model, stamp, times)
    return lambda: build_core(config, prepared)


def _stamp(path: Path) -> tuple[object, ...]:
    """Differs once a model's files are other ones, or were written to."""
    with contextlib.suppress(OSError):
        files = sorted(path.iterdir()) if path.is_dir() else [path]
        found = [(each, each.stat()) for each in files]
        return tuple((str(p), s.st_dev, s.st_ino, s.st_size, s.st_mtime_ns) for p, s in found)
    return ()


def build_core(config: EngineConfig, prepared: _Prepared | None = None) -> Core:
    """Load the model and its text, pick the backend, size and allocate the pages.

    Raises EngineError for numbers that do not fit together, CheckpointError and TextError for
    files that cannot be used, BackendUnavailable and MemoryError for a machine that cannot.
    """
    path = Path(config.model)
    if prepared is None or prepared.stamp != _stamp(path):
        prepared = _Prepared(None, None, (), StartTimes() if prepared is None else prepared.times)
    model, text, times = prepared.model, prepared.text, prepared.times
    times.rest()
    _check_config(config)
    if model is None:
        model = load_model(path)
        times.mark("file")
    if text is None:
        text = load_text(path)
        times.mark("tokenizer")
    threads = config.threads or _num_cpus()
    try:
        selection = select_backend(config.backend, threads=threads, exact=config.exact)
    except MemoryError as error:
        raise EngineError(
            f"--threads {threads}: so many cannot be started; this process may use {_num_cpus()} "
            "cores, so ask for that many or leave it out"
        ) from error
    except BackendUnavailable as error:
        if config.backend == "auto":
            raise
        raise EngineError(f"--backend {config.backend}: {error}") from error
    _log.info("backend %s: %s", selection.name, selection.reason)
    rules = OutputRules(text.vocabulary, text.eos_token_ids)
    grammars = GrammarCompiler(text.vocabulary, text.encoder, text.eos_token_ids)
    config = msgspec.structs.replace(config, threads=threads)
    times.mark("backend")
    try:
        peaks: Peaks | None = Peaks(config.peak_bytes_per_s, config.peak_flops_per_s)
        if not config.peak_bytes_per_s:
            peaks = machine_peaks(selection.backend, default_cache_dir())
        times.mark("peaks")
        core = assemble_core(config, model, rules, selection, grammars, peaks)
        times.mark("weights and pages")
        if config.warm_up:
            core.warm_up()
            times.mark("warm-up")
        _log.info("ready in %s", times)
        return core
    except BaseException:
        selection.backend.close()
        raise


def assemble_core(
    config: EngineConfig,
    model: LoadedModel,
    rules: OutputRules,
    selection: Selection,
    grammars: GrammarCompiler | None = None,
    peaks: Peaks | None = None,
    clock_ns: Callable[[], int] = monotonic_ns,
) -> EngineCore:
    """A core from its loaded parts; closing it closes the backend. Raises as `build_core`."""
    spec, backend = model.spec, selection.backend
    max_context = config.max_context or spec.max_context
    if max_context > spec.max_context:
        raise EngineError(
            f"--max-context asks for {max_context} tokens, but {model.name} was made for "
            f"{spec.max_context}: ask for at most that"
        )
    shape = (spec.num_layers, spec.num_kv_heads, spec.head_dim, config.page_size)
    layout = KVLayout(*shape, _KV_DTYPES.get(config.kv_dtype, backend.kv_dtype))
    loaded = backend.load(spec, model.weights)
    model.let_go()
    free = backend.free_device_bytes()
    num_pages = count_pages(layout, max_context, config.kv_memory_bytes, free)
    kv = backend.alloc_kv(layout, num_pages)
    info = EngineInfo(
        model_name=model.name,
        model_digest=model.digest,
        family=spec.family,
        vocab_size=spec.vocab_size,
        max_context=min(max_context, num_pages * config.page_size),
        page_size=config.page_size,
        num_pages=num_pages,
        page_bytes=layout.page_bytes,
        backend=selection.name,
        numeric_mode=backend.numeric_mode,
        threads=config.threads,
        kv_dtype=layout.dtype.value,
        peak_bytes_per_s=peaks.bytes_per_s if peaks else 0.0,
        peak_flops_per_s=peaks.flops_per_s if peaks else 0.0,
    )
    meter = StepMeter(StepCosts(spec, WeightBytes.of(model.weights), layout), peaks)
    cache = PrefixCache(num_pages, config.page_size, ExpectedReuse(config.page_size))
    controller = ItlController(
        token_budget=config.token_budget,
        fixed_chunk=config.decode_token_budget,
        page_size=config.page_size,
        itl_target_ms=config.itl_target_ms,
    )
    runner = ModelRunner(backend, loaded, kv)
    restoring: Restoring | None = None
    tier: DiskTier | None = None
    lock = _lock_folder(Path(config.cache_dir)) if config.cache_dir else None
    if config.cache_disk_bytes:
        tier = _disk_tier(config, info, runner)
        cache.attach(tier)
        reader, restores = PageReader(tier.read), Restores(cache, tier)
        restoring = Restoring(restores, runner.import_page, info.page_bytes, reader)
    scheduler = Scheduler(
        cache,
        controller,
        page_size=config.page_size,
        max_running=config.max_running,
        ttft_target_ms=config.ttft_target_ms,
        clock_ns=clock_ns,
        restoring=restoring,
        speculation=config.speculation,
    )
    saved: SavedCache | None = None
    if config.cache_dir:
        identity = Identity(
            info.model_digest,
            info.numeric_mode,
            layout.dtype.value,
            info.page_size,
            info.page_bytes,
        )
        saved = SavedCache(Path(config.cache_dir), identity, cache, runner, tier, lock)
        saved.load()
    return EngineCore(
        info,
        layout.dtype.value,
        runner,
        cache,
        scheduler,
        rules,
        max_live=config.max_running + config.max_waiting,
        meter=meter,
        grammars=grammars,
        clock_ns=clock_ns,
        saved=saved,
        idle_audit_s=config.idle_audit_s,
        restoring=restoring,
    )


def _lock_folder(folder: Path) -> FolderLock:
    """Raises EngineError where there can be none: two engines that both went on without it would
    each delete what the other keeps."""
    try:
        return FolderLock(folder)
    except FolderInUseError as error:
        holder = f"process {error.holder}" if error.holder else "another process"
        raise EngineError(
            f"--cache-dir {folder}: the engine of another server ({holder}) keeps its cache there: "
            "end that server first, or give this one a folder of its own"
        ) from error
    except OSError as error:
        raise EngineError(
            f"--cache-dir {folder} cannot be kept from other servers: {error.filename or folder}: "
            f"{error.strerror or error}: mend or remove that, or give another folder"
        ) from error


def _disk_tier(config: EngineConfig, info: EngineInfo, runner: ModelRunner[Any, Any]) -> DiskTier:
    folder = Path(config.cache_dir) if config.cache_dir else None
    try:
        if folder is not None:
            folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        return DiskTier(
            runner,
            num_device_pages=info.num_pages,
            page_size=info.page_size,
            page_bytes=info.page_bytes,
            num_bytes=config.cache_disk_bytes,
            folder=folder,
            keep=folder is not None,
        )
    except (OSError, ValueError) as error:
        raise EngineError(f"--cache-disk: {error}") from error


def _check_config(config: EngineConfig) -> None:
    if config.kv_dtype not in ("auto", *_KV_DTYPES):
        names = ", ".join(("auto", *_KV_DTYPES))
        raise EngineError(f"--kv-dtype is {config.kv_dtype!r}; there are {names}")
    for name in ("token_budget", "max_running", "page_size"):
        if getattr(config, name) < 1:
            raise EngineError(f"{name} is {getattr(config, name)}, it must be at least 1")
    for name in (
        "kv_memory_bytes",
        "max_context",
        "threads",
        "max_waiting",
        "max_waiting_tokens",
        "decode_token_budget",
        "itl_target_ms",
        "ttft_target_ms",
    ):
        if getattr(config, name) < 0:
            raise EngineError(f"{name} is {getattr(config, name)}, it must not be negative")


def _num_cpus() -> int:
    """CPUs this process may run on."""
    if hasattr(os, "sched_getaffinity"):
        return len(os.sched_getaffinity(0))
    return os.cpu_count() or 1
