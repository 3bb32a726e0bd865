"""What a response tells beside its text: the cache compared, log-probabilities, thoughts."""

import json
from dataclasses import replace
from typing import Any

import pytest
from openai import OpenAI
from openai.types.responses import Response

from engine.scripted import Script, ScriptStep, text_script
from engine.types import TokenLogprobs
from tests.service.calls import CHAT, body, data_of
from tests.service.conftest import MODEL, TEMPLATE, byte_assets, run_server
from tests.service.endpoints.responses.calls import serving

OK = text_script("ok")
HIT = Script(OK.steps, num_cached_tokens=20)
TOOL: Any = {"type": "function", "name": "f", "parameters": {"type": "object"}}
LOGPROBS: Any = ["message.output_text.logprobs"]
THINKING = f"{TEMPLATE}{{# </think> #}}"


def diagnostics(client: OpenAI, **fields: Any) -> dict[str, Any]:
    """Of a response compared with an earlier one."""
    earlier = client.responses.create(model=MODEL, input="hi there", instructions="Be kind.")
    options: Any = {"comparison_response_id": earlier.id, **fields.pop("options", {})}
    asked: Any = {"input": "hi there", "instructions": "Be kind.", **fields}
    response = client.responses.create(model=MODEL, prompt_cache_options=options, **asked)
    assert isinstance(response, Response)
    found = response.prompt_cache_diagnostics
    assert found is not None and response.prompt_cache_options is not None
    assert response.prompt_cache_options.mode == "implicit"
    retrieved = client.responses.retrieve(response.id)
    assert retrieved.prompt_cache_diagnostics == found
    told: dict[str, Any] = found.to_dict()
    return told


@pytest.mark.parametrize(
    ("changed", "reason"),
    [
        ({"input": "hi you"}, "input_changed"),
        ({"instructions": "Be brief."}, "input_changed"),
        ({"tools": [TOOL]}, "tools_changed"),
        ({"extra_body": {"cache_salt": "mine"}}, "prompt_cache_key_changed"),
    ],
)
def test_a_prompt_that_leaves_an_earlier_one_says_where(
    changed: dict[str, Any], reason: str
) -> None:
    with serving(HIT) as live:
        told = diagnostics(live.client, **changed)
        assert (told["type"], told["reason"]) == ("cache_miss", reason)
        shared = told["comparison_reusable_tokens"]
        prompt = live.prompts[1]
        same = len(live.prompts[0]) if reason == "prompt_cache_key_changed" else shared
        assert live.prompts[0].encode()[: min(same, 20)] == prompt.encode()[: min(same, 20)]
        assert (shared == 0) == (reason == "prompt_cache_key_changed")
        assert told["cache_missed_tokens"] > 0


def test_a_prompt_that_goes_on_hits_or_says_that_nothing_was_found() -> None:
    for script, expected in ((HIT, "cache_hit"), (OK, "unavailable")):
        with serving(script) as live:
            assert diagnostics(live.client) == {"type": expected}


def test_an_unknown_comparison_is_said() -> None:
    with serving(OK) as live:
        told = diagnostics(live.client, options={"comparison_response_id": "resp_none"})
        assert told == {"type": "comparison_response_not_found"}


def scored(token: bytes) -> ScriptStep:
    (token_id,) = token
    logprobs = (TokenLogprobs(-0.5, (token_id, 98), (-0.5, -1.25)),)
    return ScriptStep((token_id,), delay_s=0.02, logprobs=logprobs)


def test_log_probabilities_ride_on_the_deltas_and_stand_in_the_item() -> None:
    say = Script(tuple(scored(bytes([byte])) for byte in "aé".encode()))
    with serving(say) as live:
        asked: Any = {"model": MODEL, "input": "hi", "include": LOGPROBS, "top_logprobs": 2}
        with live.client.responses.stream(**asked) as stream:
            events = list(stream)
        deltas = [each for each in events if each.type == "response.output_text.delta"]
        tokens = [[each.token for each in delta.logprobs] for delta in deltas]
        assert [each for delta in tokens for each in delta] == ["a", "\ufffd", "\ufffd"]
        assert all(delta.delta for delta in deltas), "half a character is no delta"
        (done,) = [each for each in events if each.type == "response.output_text.done"]
        assert len(done.logprobs) == 3
        assert done.logprobs[0].top_logprobs is not None
        assert [each.token for each in done.logprobs[0].top_logprobs] == ["a", "b"]
        whole = live.client.responses.create(**asked)
        part: Any = whole.output[0]
        shown = part.content[0].logprobs
        assert [bytes(each.bytes) for each in shown] == [b"a", b"\xc3", b"\xa9"]
        assert shown[0].top_logprobs[1].logprob == -1.25
        assert whole.top_logprobs == 2
        retrieved: Any = live.client.responses.retrieve(whole.id)
        assert retrieved.output[0].content[0].logprobs == shown


def test_more_log_probabilities_than_are_included_are_refused() -> None:
    with serving(OK) as live:
        answer = live.server.http.post(
            "/v1/responses", json={"model": MODEL, "input": "hi", "top_logprobs": 2}
        )
        assert (answer.status_code, answer.json()["error"]["param"]) == (400, "top_logprobs")


@pytest.mark.parametrize("grouping", [1, 3, 100])
@pytest.mark.parametrize(
    ("said", "num_thought"),
    [
        ("<think>hm</think>Hi", len("<think>hm</think>")),
        ("<think>cut", len("<think>cut")),
        ("No </think> thought", 0),
    ],
)
def test_thoughts_are_counted(said: str, num_thought: int, grouping: int) -> None:
    assets = replace(byte_assets(), chat_template=THINKING)
    with run_server(text_script(said, grouping), assets=assets) as server:
        chat = server.http.post(CHAT, json=body()).json()["usage"]
        assert chat["completion_tokens_details"]["reasoning_tokens"] == num_thought
        assert chat["completion_tokens"] == len(said)
        *_, last, _ = data_of(server.http.post(CHAT, json=body(stream=True)).text)
        assert json.loads(last)["usage"] == chat
        sent = {"model": MODEL, "input": "hi"}
        usage = server.http.post("/v1/responses", json=sent).json()["usage"]
        assert usage["output_tokens_details"]["reasoning_tokens"] == num_thought
