"""What is refused before it is tokenised."""

from typing import cast

import pytest

from engine.api import Engine, EngineOverloaded
from engine.types import Prompt
from service.early_refusal import EarlyRefusal
from service.errors import ApiError


class Full:
    """An engine that takes prompts of so many tokens, and no more."""

    def __init__(self, most: int) -> None:
        self.most = most
        self.asked: list[Prompt] = []

    def check_load(self, prompt: Prompt) -> None:
        self.asked.append(prompt)
        if prompt.num_tokens > self.most:
            raise EngineOverloaded("too much waits", 0.25)


def test_a_refusal_tells_when_to_come_back() -> None:
    engine = Full(10)
    early = EarlyRefusal(cast(Engine, engine))
    early.check(80, "a", 2.0, -1)
    assert engine.asked == [Prompt("a", 2.0, -1, 10)]
    with pytest.raises(ApiError) as refused:
        early.check(88, "a", 2.0, -1)
    assert refused.value.status == 503
    assert refused.value.headers["retry-after-ms"] == "250"


def test_lengths_are_learned_from_what_was_tokenised() -> None:
    engine = Full(10)
    early = EarlyRefusal(cast(Engine, engine))
    early.check(0, "", 1.0, 0)
    assert engine.asked[-1].num_tokens == 1
    for _ in range(200):
        early.learn(300, 100)
    early.learn(0, 5)
    early.learn(5, 0)
    with pytest.raises(ApiError):
        early.check(40, "", 1.0, 0)
    assert engine.asked[-1].num_tokens == 13
