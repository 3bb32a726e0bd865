"""Answers found again by their text: the longest, in their scope only, within a bound."""

import numpy as np
import pytest
from anyio import run
from hypothesis import given
from hypothesis import strategies as st

from engine.text import TextAssets
from service.conversation import Conversation, Message
from service.prompts import PromptRenderer, RenderedPrompt
from service.prompts.transcripts import Transcripts

END = b"<e>"


def ids(*values: int) -> "np.ndarray[tuple[int], np.dtype[np.int32]]":
    return np.array(values, dtype=np.int32)


def found(transcripts: Transcripts, text: bytes, scope: str = "s") -> list[int] | None:
    token_ids, _ = transcripts.find(scope, text)
    transcripts.audit()
    return None if token_ids is None else token_ids.tolist()


def add(transcripts: Transcripts, prompt: bytes, answer: bytes, *values: int) -> None:
    _, text = transcripts.find("s", prompt)
    transcripts.add(text.followed_by(answer), ids(*values))
    transcripts.audit()


def test_the_longest_answer_is_found_where_a_special_token_follows() -> None:
    transcripts = Transcripts([END])
    add(transcripts, b"ask", b"yes", 1)
    add(transcripts, b"ask", b"yes and no", 2)
    add(transcripts, b"askyes<e>more", b"well", 3)
    assert found(transcripts, b"askyes<e>") == [1]
    assert found(transcripts, b"askyes and no<e>") == [2]
    assert found(transcripts, b"askyes<e>morewell<e>x") == [3]
    assert found(transcripts, b"askyes<e>moreother<e>x") == [1]
    assert found(transcripts, b"askyes") is None
    assert found(transcripts, b"askno<e>") is None
    assert found(transcripts, b"askyes<e>", scope="other") is None


def test_a_scope_is_never_read_as_text() -> None:
    transcripts = Transcripts([END])
    _, text = transcripts.find("ab", b"c")
    transcripts.add(text.followed_by(b"d"), ids(1))
    for scope, prompt in (("a", b"bcd<e>"), ("abc", b"d<e>"), ("", b"abcd<e>")):
        assert found(transcripts, prompt, scope) is None


def test_the_least_recently_used_goes_first() -> None:
    transcripts = Transcripts([END], max_bytes=3 * 304)
    for number in range(3):
        add(transcripts, b"%d" % number, b"a", number)
    assert found(transcripts, b"0a<e>") == [0]
    add(transcripts, b"3", b"a", 3)
    assert found(transcripts, b"1a<e>") is None
    assert [found(transcripts, b"%da<e>" % n) for n in (0, 2, 3)] == [[0], [2], [3]]
    add(transcripts, b"4", b"a", *range(1000))  # larger than all there may be
    assert found(transcripts, b"4a<e>") is None
    assert found(transcripts, b"3a<e>") == [3]


@given(st.lists(st.tuples(st.binary(max_size=3), st.integers(0, 40)), max_size=60))
def test_the_books_are_right_whatever_is_added(added: list[tuple[bytes, int]]) -> None:
    transcripts = Transcripts([END], max_bytes=1000)
    for answer, size in added:
        add(transcripts, b"p", answer, *range(size))


def history(*answers: str) -> Conversation:
    messages = [Message("user", "Where is Paris?")]
    for answer in answers:
        messages += [Message("assistant", answer), Message("user", "Go on.")]
    return Conversation(tuple(messages))


@pytest.mark.parametrize("ended", [True, False])
def test_an_answer_that_comes_back_as_text_has_the_ids_it_had(
    assets: TextAssets, ended: bool
) -> None:
    renderer = PromptRenderer(assets, 8192)

    def render(*answers: str, scope: str | None = "s") -> RenderedPrompt:
        return run(renderer.render, history(*answers), None, scope)

    end = assets.encoder.encode("<|im_end|>").tolist()
    prompt = render()
    prompts = [prompt.token_ids.tolist()]
    for turn in (1, 2):
        said = [token for letter in f"Answer {turn}." for token in assets.encoder.encode(letter)]
        renderer.remember(prompt, [*said, *end] if ended else said)
        prompt = render(*(f"Answer {number}." for number in range(1, turn + 1)))
        known = [*prompts[-1], *said]
        assert prompt.num_replayed == len(known)
        assert prompt.token_ids.tolist()[: len(known)] == known
        assert assets.vocabulary.join(prompt.token_ids.tolist()).decode() == prompt.text
        prompts.append(prompt.token_ids.tolist())

    edited = render("Answer 1.", "Another.")
    assert edited.num_replayed == len(prompts[0]) + len("Answer 1.")
    for scope in ("other", None):
        assert render("Answer 1.", "Answer 2.", scope=scope).num_replayed == 0
