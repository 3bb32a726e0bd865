"""Thoughts apart from the answer, for every grouping of characters."""

import pytest

from service.tools.reasoning import ThinkSplitter


@pytest.mark.parametrize(
    ("text", "thinking", "thought", "said"),
    [
        ("<think>\nI <b> think\n\n</think>\n\nHi </think>", False, "I <b> think", "Hi </think>"),
        ("hm </think>yo", True, "hm", "yo"),
        ("\n<think></think>yo", False, "", "yo"),
        (" <thin", False, "", " <thin"),
        ("plain <think>", False, "", "plain <think>"),
        ("<think>cut </thi", False, "cut </thi", ""),
    ],
)
def test_every_grouping_splits_alike(text: str, thinking: bool, thought: str, said: str) -> None:
    for first in range(len(text)):
        for second in range(first, len(text)):
            splitter = ThinkSplitter(thinking=thinking)
            parts = [splitter.feed(t) for t in (text[:first], text[first:second], text[second:])]
            parts.append(splitter.finish())
            assert "".join(part[0] for part in parts) == thought
            assert "".join(part[1] for part in parts) == said
