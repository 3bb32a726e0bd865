"""A file of prompts at the start: whose they are, and what is wrong with a line."""

import json
import time
from pathlib import Path
from typing import Any, Literal

import pytest

from engine.scripted import Script, ScriptedCore, text_script
from engine.transport import start_thread_engine
from engine.types import EngineRequest, unpack_tokens
from service.access.keys import KeyFile, hash_key, key_entry, new_key
from service.config import Settings
from service.dialects.chat_messages import WireMessage
from service.events import RequestRecord
from service.prewarm import PrewarmError, WarmBody, read_prewarm, warm, warm_lines
from service.services import build_services
from tests.service.conftest import INFO, byte_assets


async def tenants_of(tmp_path: Path, lines: list[dict[str, Any]], *, with_keys: bool) -> list[str]:
    """Whose requests the engine gets for a file of these lines."""
    keys, prompts = tmp_path / "keys.toml", tmp_path / "prompts.jsonl"
    keys.write_text(key_entry(hash_key(new_key()), "north", False) + "\n")
    prompts.write_text("".join(json.dumps(line) + "\n" for line in lines))
    asked: list[str] = []

    def play(request: EngineRequest) -> Script:
        asked.append(request.tenant)
        return text_script("x")

    engine = await start_thread_engine(lambda: ScriptedCore(play, info=INFO))
    try:
        services = build_services(Settings(), engine, byte_assets())
        await warm_lines(services, read_prewarm(prompts, KeyFile(keys) if with_keys else None))
    finally:
        await engine.close()
    return asked


@pytest.mark.anyio
@pytest.mark.parametrize(
    ("roles", "end"),
    [
        (["system"], "<|im_end|>"),
        (["user"], "assistant"),
        (["user", "assistant"], "<|im_end|>"),
    ],
)
async def test_only_where_an_answer_follows_its_head_is_computed(
    roles: list[Literal["system", "user", "assistant"]], end: str
) -> None:
    """What stands behind a system message is no answer: later prompts would part from it there."""
    prompts: list[str] = []

    def play(request: EngineRequest) -> Script:
        prompts.append(
            assets.tokenizer.decode(unpack_tokens(request.token_ids).tolist(), False).strip()
        )
        return text_script("x")

    assets = byte_assets()
    engine = await start_thread_engine(lambda: ScriptedCore(play, info=INFO))
    try:
        services = build_services(Settings(), engine, assets)
        body = WarmBody(messages=[WireMessage(role, "hello") for role in roles])
        now = time.monotonic_ns()
        await warm(services, body, RequestRecord(operation="prewarm", model="m", start_ns=now))
    finally:
        await engine.close()
    (prompt,) = prompts
    assert prompt.endswith(end)


@pytest.mark.anyio
async def test_with_keys_a_line_names_its_tenant(tmp_path: Path) -> None:
    lines = [{"prompt": "hello", "tenant": "north"}]
    assert await tenants_of(tmp_path, lines, with_keys=True) == ["north"]
    assert await tenants_of(tmp_path, [{"prompt": "hello"}], with_keys=False) == ["public"]


@pytest.mark.anyio
@pytest.mark.parametrize(
    ("line", "with_keys", "sentence"),
    [
        ({"prompt": "b"}, True, "line 2: With --keys, 'tenant' says whose"),
        ({"prompt": "b", "tenant": "west"}, True, "line 2: No key is of the tenant 'west'"),
        ({"prompt": "b", "tenant": "north"}, False, "line 2: There are no tenants without"),
    ],
)
async def test_a_line_nobody_would_find_is_refused(
    tmp_path: Path, line: dict[str, Any], with_keys: bool, sentence: str
) -> None:
    good: dict[str, Any] = {"prompt": "a", "tenant": "north"} if with_keys else {"prompt": "a"}
    with pytest.raises(PrewarmError, match=sentence):
        await tenants_of(tmp_path, [good, line], with_keys=with_keys)


@pytest.mark.anyio
@pytest.mark.parametrize(
    ("fields", "meant"),
    [({"cache_salts": "a"}, "cache_salt"), ({"tenants": "north"}, "tenant"), ({"ttl_s": 9}, "ttl")],
)
async def test_a_slip_in_a_line_is_told_with_its_line(
    tmp_path: Path, fields: dict[str, Any], meant: str
) -> None:
    with pytest.raises(PrewarmError, match=f"line 2: Unknown parameter.*Did you mean '{meant}'"):
        await tenants_of(tmp_path, [{"prompt": "a"}, {"prompt": "b", **fields}], with_keys=False)
