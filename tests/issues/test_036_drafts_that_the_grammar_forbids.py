"""vllm-project/vllm#49694, #52620, #15554: drafts that the grammar forbids are taken, and it fails
to advance. Here every draft is compared with what was sampled under the grammar in its place.
"""

import json
from typing import Any

import msgspec
import pytest

from engine.runtime import build_core
from engine.text import load_text
from engine.types import EngineConfig, FinishReason, SamplingParams
from tests.engine.test_runtime import model_path
from tests.laws.test_forced_tokens import asked, assert_same, run

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
EXAMPLE = (
    '{"number_of_the_ticket": 12, "is_it_urgent": true, "who_is_to_answer": "nobody at all", '
    '"and": "more than is asked for"}'
)
"""What an answer is like, but for what its grammar forbids."""


@pytest.mark.parametrize("num_requests", [24, pytest.param(256, marks=pytest.mark.slow)])
def test_documents_of_one_batch_are_valid_and_as_they_are_alone(num_requests: int) -> None:
    """Few run at a time, so that drafts pay; all share the beginning of their prompts."""
    text = load_text(model_path())
    requests = [
        asked(text, f"city {i}", TICKET, SamplingParams(60, temperature=1.0, seed=i), tail=EXAMPLE)
        for i in range(num_requests)
    ]
    config = EngineConfig(model=str(model_path()), max_context=512, max_running=2)
    core = build_core(config)
    plain = build_core(msgspec.structs.replace(config, speculation=False))
    try:
        answers = run(core, *requests)
        assert core.stats().num_forced_tokens > num_requests
        assert core.stats().num_accepted_tokens > 0
        expected = run(plain, *requests[::8])
    finally:
        core.close()
        plain.close()
    for answer in answers.values():
        assert answer.end.reason is FinishReason.STOP
        said = json.loads(answer.text)
        assert said.keys() == TICKET["properties"].keys()
        assert 0 <= said["number_of_the_ticket"] <= 999
    for name, answer in expected.items():
        assert_same(answers[name], answer)
