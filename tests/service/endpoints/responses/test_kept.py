"""What a response keeps in the cache for its client, and what every answer calls the model."""

from typing import Any

import pytest

from engine.scripted import Script, text_script
from engine.types import KeepPrefix, unpack_tokens
from tests.service.calls import CHAT
from tests.service.conftest import MODEL, LiveServer, byte_assets
from tests.service.endpoints.responses.calls import PATH
from tests.service.endpoints.stage import Stage

OK = text_script("ok")
HIT = Script(OK.steps, num_cached_tokens=20)


def create(server: LiveServer, **fields: Any) -> dict[str, Any]:
    answer = server.http.post(PATH, json={"model": MODEL, "input": "hi", **fields})
    assert answer.status_code == 200, answer.text
    response: dict[str, Any] = answer.json()
    return response


def part(text: str, *, kept: bool = False) -> dict[str, Any]:
    mark: dict[str, Any] = {"prompt_cache_breakpoint": {"mode": "explicit"}} if kept else {}
    return {"type": "input_text", "text": text, **mark}


@pytest.mark.parametrize(
    ("ttl", "expected_s"), [(None, 1800.0), ("12h", 43_200.0), ("a week", 1800.0)]
)
def test_a_breakpoint_leases_the_prompt_up_to_it(
    stage: Stage, server: LiveServer, ttl: str | None, expected_s: float
) -> None:
    stage.script = HIT
    items = [
        {"role": "user", "content": [part("remember this", kept=True)]},
        {"role": "user", "content": [part("and answer")]},
    ]
    options = {} if ttl is None else {"prompt_cache_options": {"ttl": ttl}}
    first = create(server, input="before", instructions="Be kind.")
    told = create(server, input=items, previous_response_id=first["id"], **options)
    (kept,) = stage.requests[-1].keep
    assert kept.ttl_s == expected_s
    ids = unpack_tokens(stage.requests[-1].token_ids)[: kept.num_tokens].tolist()
    assert byte_assets().vocabulary.join(ids).endswith(b"remember this<|im_end|>\n<|im_start|>")
    details = told["usage"]["input_tokens_details"]
    written = kept.num_tokens - 20
    for_12h = written if ttl == "12h" else 0
    assert details["cache_write_tokens_details"] == {
        "ttl_30m_tokens": written - for_12h,
        "ttl_12h_tokens": for_12h,
    }
    assert server.http.get(f"{PATH}/{told['id']}").json()["usage"] == told["usage"], (
        "as it was told"
    )
    assert "cache_write_tokens_details" not in first["usage"]["input_tokens_details"]


def test_a_breakpoint_in_what_a_tool_returned_counts(stage: Stage, server: LiveServer) -> None:
    stage.script = OK
    call = {"type": "function_call", "call_id": "c1", "name": "f", "arguments": "{}"}
    output = {"type": "function_call_output", "call_id": "c1", "output": [part("it", kept=True)]}
    create(server, input=[{"role": "user", "content": "hi"}, call, output])
    (kept,) = stage.requests[-1].keep
    assert kept == KeepPrefix(len(unpack_tokens(stage.requests[-1].token_ids)), 1800.0)


def test_a_retention_without_a_breakpoint_is_told_of_the_whole_prompt(
    stage: Stage, server: LiveServer
) -> None:
    stage.script = HIT
    usage = create(server, prompt_cache_options={"ttl": "12h"})["usage"]
    details = usage["input_tokens_details"]
    assert details["cache_write_tokens_details"] == {
        "ttl_30m_tokens": 0,
        "ttl_12h_tokens": usage["input_tokens"] - 20,
    }


def test_every_dialect_calls_the_model_by_the_name_that_is_served(server: LiveServer) -> None:
    asks: dict[str, dict[str, Any]] = {
        CHAT: {"messages": [{"role": "user", "content": "hi"}]},
        "/v1/completions": {"prompt": "hi"},
        "/v1/responses": {"input": "hi"},
        "/v1/messages": {"messages": [{"role": "user", "content": "hi"}], "max_tokens": 9},
    }
    for path, fields in asks.items():
        answer = server.http.post(path, json={"model": "default", **fields})
        assert answer.json()["model"] == MODEL, path
