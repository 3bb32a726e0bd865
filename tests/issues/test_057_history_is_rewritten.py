"""QwenLM/Qwen3.8#131, anomalyco/opencode#26750 and others: an old turn is rendered otherwise than
it was generated, so that each turn of an agent misses its cache from there on."""

import itertools
import json
from dataclasses import replace
from typing import Any

import pytest

from engine.scripted import Script, text_script
from engine.types import EngineRequest, pack_tokens
from tests.service.conftest import MODEL, TEMPLATE, LiveServer, byte_assets, run_server

NUM_TURNS = 10
TOOL = {"type": "function", "name": "look", "parameters": {"type": "object"}}
THINKING = f"{TEMPLATE}{{# </think> #}}"


SAID = 'I look.\n<tool_call>\n{"name": "look", "arguments": {}}\n</tool_call>'


@pytest.mark.parametrize("chained", [True, False], ids=["chain", "full history"])
@pytest.mark.parametrize("thought", ["", "<think>\nhm\n</think>\n\n"], ids=["plain", "thinks"])
def test_each_prompt_begins_with_what_was_computed(chained: bool, thought: str) -> None:
    """Thoughts are no part of later prompts, so behind them nothing can be found again."""
    seen: list[bytes] = []

    def script_for(request: EngineRequest) -> Script:
        seen.append(request.token_ids)
        return text_script(thought + SAID, 7)

    assets = replace(byte_assets(), chat_template=THINKING)
    with run_server(script_for=script_for, assets=assets) as server:
        loop(server, chained=chained)
    assert len(seen) == NUM_TURNS
    kept = b"" if thought else pack_tokens(list(SAID.encode()))
    for earlier, later in itertools.pairwise(seen):
        assert later.startswith(earlier + kept)


def loop(server: LiveServer, *, chained: bool) -> None:
    """An agent that sends back what it got, whole or by its id."""
    history: list[Any] = [{"role": "user", "content": "Look around."}]
    previous: dict[str, Any] = {}
    for _ in range(NUM_TURNS):
        sent = {"model": MODEL, "tools": [TOOL], "input": history, **previous}
        answer = server.http.post("/v1/responses", content=json.dumps(sent))
        assert answer.status_code == 200, answer.text
        response = answer.json()
        (call,) = [item for item in response["output"] if item["type"] == "function_call"]
        output = {"type": "function_call_output", "call_id": call["call_id"], "output": "seen"}
        if chained:
            history, previous = [output], {"previous_response_id": response["id"]}
        else:
            history += [*response["output"], output]
