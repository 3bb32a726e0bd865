"""Former token ids in place of new ones: the same text, and the same ids after the seam."""

import numpy as np
import pytest
from anyio import run
from hypothesis import given, settings
from hypothesis import strategies as st
from numpy.typing import NDArray

from engine.text import TextAssets
from service.conversation import Conversation, Message
from service.prompts import PromptRenderer, RenderedPrompt

SYSTEM = Message("system", "Be brief.")
QUESTION = Message("user", "Where is Paris?")
ANSWER = "Paris is the capital of France."
MORE = Message("user", "And Rome?")


def render(
    renderer: PromptRenderer, *messages: Message, former: NDArray[np.int32] | None = None
) -> RenderedPrompt:
    return run(renderer.render, Conversation(messages), former)


def spelled(assets: TextAssets, text: str) -> NDArray[np.int32]:
    """The text's ids one character at a time: what it never is when tokenised as a whole."""
    return np.concatenate([assets.encoder.encode(character) for character in text])


def text_of(assets: TextAssets, token_ids: NDArray[np.int32]) -> str:
    return assets.vocabulary.join(token_ids.tolist()).decode()


@pytest.fixture(scope="module")
def first(renderer: PromptRenderer) -> RenderedPrompt:
    return render(renderer, SYSTEM, QUESTION)


@pytest.mark.parametrize("ended", [True, False])
def test_what_the_model_said_keeps_its_ids(
    assets: TextAssets, renderer: PromptRenderer, first: RenderedPrompt, ended: bool
) -> None:
    said = spelled(assets, ANSWER)
    end = assets.encoder.encode("<|im_end|>")
    former = np.concatenate([first.token_ids, said, *([end] if ended else [])])
    history = (SYSTEM, QUESTION, Message("assistant", ANSWER), MORE)
    again = render(renderer, *history, former=former)
    plain = render(renderer, *history)
    assert again.num_replayed == len(former)
    assert again.token_ids[: len(former)].tolist() == former.tolist()
    assert again.text == plain.text == text_of(assets, again.token_ids)
    tail = len(again.token_ids) - len(former)
    assert again.token_ids[-tail:].tolist() == plain.token_ids[-tail:].tolist()
    assert len(again.token_ids) > len(plain.token_ids)


def test_an_edited_answer_is_tokenised_again(
    assets: TextAssets, renderer: PromptRenderer, first: RenderedPrompt
) -> None:
    former = np.concatenate([first.token_ids, spelled(assets, ANSWER)])
    history = (SYSTEM, QUESTION, Message("assistant", f"{ANSWER[:-1]}!"), MORE)
    again = render(renderer, *history, former=former)
    assert again.token_ids.tolist() == render(renderer, *history).token_ids.tolist()
    # All up to the marker that begins the assistant's turn.
    assert 0 < again.num_replayed < len(first.token_ids)


def test_another_system_message_is_another_prompt(
    renderer: PromptRenderer, first: RenderedPrompt
) -> None:
    history = (Message("system", "Be long."), QUESTION)
    again = render(renderer, *history, former=first.token_ids)
    assert again.token_ids.tolist() == render(renderer, *history).token_ids.tolist()
    assert again.num_replayed == 1


def test_nothing_former_fits(assets: TextAssets, renderer: PromptRenderer) -> None:
    plain = render(renderer, SYSTEM, QUESTION)
    for former in (assets.encoder.encode("Once upon a time"), np.array([], dtype=np.int32)):
        again = render(renderer, SYSTEM, QUESTION, former=former)
        assert again.num_replayed == 0
        assert again.token_ids.tolist() == plain.token_ids.tolist()


def test_hidden_markers_of_an_answer_end_what_is_taken_over(
    assets: TextAssets, renderer: PromptRenderer, first: RenderedPrompt
) -> None:
    hidden = np.array([sorted(assets.vocabulary.special_ids)[0]], dtype=np.int32)
    former = np.concatenate([first.token_ids, hidden, spelled(assets, ANSWER)])
    history = (SYSTEM, QUESTION, Message("assistant", ANSWER), MORE)
    again = render(renderer, *history, former=former)
    assert again.token_ids.tolist() == render(renderer, *history).token_ids.tolist()


TEXTS = st.text(st.sampled_from("ab \n.é😀日<|im_end|>'s"), max_size=24)


@settings(max_examples=60)
@given(st.lists(TEXTS, min_size=1, max_size=4), TEXTS, st.booleans())
def test_the_ids_stand_for_the_rendered_text(
    assets: TextAssets, renderer: PromptRenderer, texts: list[str], answer: str, ended: bool
) -> None:
    history = tuple(
        Message("assistant" if index % 2 else "user", text) for index, text in enumerate(texts)
    )
    before = render(renderer, *history)
    end = assets.encoder.encode("<|im_end|>") if ended else np.array([], dtype=np.int32)
    said = spelled(assets, answer) if answer else end
    former = np.concatenate([before.token_ids, said, end])
    following = (*history, Message("assistant", answer), MORE)
    again = render(renderer, *following, former=former)
    assert text_of(assets, again.token_ids) == again.text == render(renderer, *following).text
    count = again.num_replayed
    assert again.token_ids[:count].tolist() == former[:count].tolist()
