"""vllm-project/vllm#49694, #52620, #15554: tokens that were not sampled under the grammar are
taken, and it fails to advance. Here the only such tokens are those that the grammar itself forces.
"""

import json
from typing import Any

import pytest

from engine.runtime import build_core
from engine.text import load_text
from engine.types import EngineConfig, FinishReason, SamplingParams
from tests.engine.test_runtime import model_path
from tests.laws.test_forced_tokens import Answer, asked, assert_same, run, stepwise

TICKET: Any = {
    "type": "object",
    "properties": {
        "number_of_the_ticket": {"type": "integer", "minimum": 0, "maximum": 999},
        "is_it_urgent": {"type": "boolean"},
        "who_is_to_answer": {"enum": ["support", "sales", "nobody at all"]},
    },
    "required": ["number_of_the_ticket", "is_it_urgent", "who_is_to_answer"],
    "additionalProperties": False,
}


@pytest.mark.parametrize("num_requests", [40, pytest.param(256, marks=pytest.mark.slow)])
def test_documents_of_one_batch_are_valid_and_as_they_are_alone(num_requests: int) -> None:
    text = load_text(model_path())
    requests = [
        asked(text, f"city {i}", TICKET, SamplingParams(60, temperature=1.0, seed=i))
        for i in range(num_requests)
    ]
    core = build_core(EngineConfig(model=str(model_path()), max_context=512))
    try:
        answers = run(core, *requests)
        assert core.stats().num_forced_tokens > num_requests
        alone: dict[str, Answer] = {}
        for request in requests[::16]:
            alone |= run(core, stepwise(request))
    finally:
        core.close()
    for answer in answers.values():
        assert answer.end.reason is FinishReason.STOP
        said = json.loads(answer.text)
        assert said.keys() == TICKET["properties"].keys()
        assert 0 <= said["number_of_the_ticket"] <= 999
    for name, answer in alone.items():
        assert_same(answers[name], answer)
