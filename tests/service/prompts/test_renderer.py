"""Prompts of the default model, word for word, and their limits."""

import re
from collections.abc import Sequence
from dataclasses import replace

import anyio
import anyio.lowlevel
import numpy as np
import pytest
from numpy.typing import NDArray

from engine.text import Encoder, TextAssets, TextError
from service.conversation import Conversation, JSONValue, Message, Tool
from service.errors import ApiError
from service.prompts import PromptRenderer, RenderedPrompt
from tests.service.prompts.conftest import MakeRenderer

DEFAULT_SYSTEM = (
    "<|im_start|>system\n"
    "You are a helpful AI assistant named SmolLM, trained by Hugging Face<|im_end|>\n"
)


def prompt(renderer: PromptRenderer, *messages: Message, open_end: bool = False) -> RenderedPrompt:
    return anyio.run(renderer.render, Conversation(messages, continue_final=open_end))


def refusal(renderer: PromptRenderer, conversation: Conversation) -> ApiError:
    with pytest.raises(ApiError) as caught:
        anyio.run(renderer.render, conversation)
    assert caught.value.status == 400
    return caught.value


def user(text: str) -> Conversation:
    return Conversation((Message("user", text),))


def test_a_user_turn_gets_the_default_system_message(renderer: PromptRenderer) -> None:
    rendered = prompt(renderer, Message("user", "Hi"))
    assert rendered.text == (
        DEFAULT_SYSTEM + "<|im_start|>user\nHi<|im_end|>\n<|im_start|>assistant\n"
    )
    assert rendered.token_ids.dtype == np.int32
    assert rendered.token_ids[:3].tolist() == [1, 9690, 198]
    assert rendered.token_ids[-4:].tolist() == [1, 520, 9531, 198]


def test_an_own_system_message_replaces_it(renderer: PromptRenderer) -> None:
    turns = (
        Message("developer", "Be brief."),
        Message("user", "Grüße 😸"),
        Message("assistant", ""),
        Message("user", "  two\n lines "),
    )
    assert prompt(renderer, *turns).text == (
        "<|im_start|>system\nBe brief.<|im_end|>\n"
        "<|im_start|>user\nGrüße 😸<|im_end|>\n"
        "<|im_start|>assistant\n<|im_end|>\n"
        "<|im_start|>user\n  two\n lines <|im_end|>\n"
        "<|im_start|>assistant\n"
    )


def test_the_last_answer_can_be_left_open(renderer: PromptRenderer) -> None:
    turns = (Message("user", "Count."), Message("assistant", "one, two, "))
    rendered = prompt(renderer, *turns, open_end=True)
    assert rendered.text == (
        DEFAULT_SYSTEM + "<|im_start|>user\nCount.<|im_end|>\n<|im_start|>assistant\none, two, "
    )


def test_an_open_answer_is_trimmed_where_the_template_trims(with_template: MakeRenderer) -> None:
    renderer = with_template("{% for m in messages %}[{{ m.content | trim }}]{% endfor %}")
    turns = (Message("user", "CONTINUE_FINAL_MESSAGE_TAG "), Message("assistant", "one  "))
    assert prompt(renderer, *turns, open_end=True).text == "[CONTINUE_FINAL_MESSAGE_TAG][one"


def test_only_an_answer_that_is_shown_can_be_continued(
    renderer: PromptRenderer, with_template: MakeRenderer
) -> None:
    turn = Conversation((Message("user", "Hi"),), continue_final=True)
    assert refusal(renderer, turn).param == "messages"
    hidden = with_template("{{ messages[0].content }}")
    turns = Conversation((Message("user", "a"), Message("assistant", "b")), continue_final=True)
    assert "does not show the last message" in refusal(hidden, turns).message


def test_markers_written_in_a_message_are_markers(renderer: PromptRenderer) -> None:
    ids = prompt(renderer, Message("user", "a<|im_end|>b")).token_ids.tolist()
    assert ids.count(2) == 3


def test_tools_reach_a_model_whose_template_has_none(renderer: PromptRenderer) -> None:
    tool = Tool("now", {"type": "function", "function": {"name": "now"}})
    conversation = Conversation((Message("user", "Hi"),), (tool,))
    text = anyio.run(renderer.render, conversation).text
    assert text.startswith("<|im_start|>system\n# Tools\n")
    assert '\n{"type": "function", "function": {"name": "now"}}\n</tools>' in text


def test_tools_and_options_reach_a_template_that_reads_them(with_template: MakeRenderer) -> None:
    renderer = with_template(
        "{{ bos_token }}{{ tools | tojson }}{{ depth }}{{ add_generation_prompt }}{{ eos_token }}"
    )
    conversation = Conversation((Message("user", "Hi"),), (Tool("t", {"name": "t"}),), {"depth": 3})
    text = anyio.run(renderer.render, conversation).text
    assert text == '<|im_start|>[{"name": "t"}]3True<|im_end|>'
    assert anyio.run(renderer.render, user("Hi")).text == "<|im_start|>nullTrue<|im_end|>"


@pytest.mark.parametrize("name", ["messages", "tools", "add_generation_prompt", "bos_token"])
def test_options_cannot_replace_what_the_server_sets(renderer: PromptRenderer, name: str) -> None:
    options: dict[str, JSONValue] = {name: "x"}
    error = refusal(renderer, replace(user("Hi"), template_kwargs=options))
    assert error.param == "chat_template_kwargs" and name in error.message


def test_what_the_template_refuses_is_a_400(with_template: MakeRenderer) -> None:
    renderer = with_template("{{ raise_exception('no system role') }}")
    error = refusal(renderer, user("Hi"))
    assert error.param == "messages" and "no system role" in error.message


@pytest.mark.parametrize("text", ["a\ud800b", "\udfff" * 3])
def test_lone_surrogates_are_refused(renderer: PromptRenderer, text: str) -> None:
    assert "surrogates" in refusal(renderer, user(text)).message


def test_no_messages_and_no_tokens_are_refused(
    renderer: PromptRenderer, with_template: MakeRenderer
) -> None:
    assert refusal(renderer, Conversation(())).param == "messages"
    assert refusal(with_template("{{ messages[0].content }}"), user("")).param == "messages"


def test_the_context_limit_is_exact(assets: TextAssets) -> None:
    """One token must be left for the answer; see vllm-project/vllm#55750 for the kind of fault."""
    size = len(prompt(PromptRenderer(assets, 8192), Message("user", "Hi")).token_ids)
    fits = PromptRenderer(assets, size + 1)
    assert len(prompt(fits, Message("user", "Hi")).token_ids) == size
    for limit in (size, size - 1):
        error = refusal(PromptRenderer(assets, limit), user("Hi"))
        assert (error.code, error.param) == ("context_length_exceeded", "messages")
        assert f"is {limit} tokens" in error.message and f"in {size} tokens" in error.message


class _NoEncoder:
    def encode(self, text: str) -> None:
        raise AssertionError("the text was tokenised")


@pytest.mark.parametrize("text", ["x" * 900, "é" * 450, "x" * 90_000])
def test_what_cannot_fit_is_refused_before_it_is_tokenised(assets: TextAssets, text: str) -> None:
    blind = replace(assets, encoder=_NoEncoder(), chat_template="{{ messages[0].content }}")  # type: ignore[arg-type]
    error = refusal(PromptRenderer(blind, 10), user(text))
    assert error.code == "context_length_exceeded"
    assert "is 10 tokens" in error.message and re.search("at least [12][0-9] tokens", error.message)


class _Watched:
    """An encoder that knows the longest text it was given."""

    def __init__(self, encoder: Encoder) -> None:
        self._encoder = encoder
        self.longest = 0

    def encode(self, text: str) -> NDArray[np.int32]:
        self.longest = max(self.longest, len(text))
        return self._encoder.encode(text)


def test_a_text_far_over_the_context_is_refused_by_its_beginning(assets: TextAssets) -> None:
    watched = _Watched(assets.encoder)
    plain = replace(assets, encoder=watched, chat_template="{{ messages[0].content }}")  # type: ignore[arg-type]
    error = refusal(PromptRenderer(plain, 400), user("a b c " * 5000))
    assert error.code == "context_length_exceeded"
    assert watched.longest == 8 * 400


def test_a_long_text_of_few_tokens_is_taken(assets: TextAssets) -> None:
    text = " " * 7000
    plain = replace(assets, chat_template="{{ messages[0].content }}")
    assert len(prompt(PromptRenderer(plain, 400), Message("user", text)).token_ids) < 400


def test_a_model_without_template_cannot_start(assets: TextAssets) -> None:
    with pytest.raises(TextError, match="no chat template"):
        PromptRenderer(replace(assets, chat_template=None), 8192)


def test_the_event_loop_runs_on_while_a_megabyte_renders(assets: TextAssets) -> None:
    renderer = PromptRenderer(assets, 1_000_000)
    conversation = user("All work and no play, 1 day. " * 35_000)

    async def main() -> tuple[RenderedPrompt, int]:
        turns = 0
        rendered: list[RenderedPrompt] = []

        async def work() -> None:
            rendered.append(await renderer.render(conversation))

        async with anyio.create_task_group() as tasks:
            tasks.start_soon(work)
            while not rendered:
                await anyio.lowlevel.checkpoint()
                turns += 1
        return rendered[0], turns

    rendered, turns = anyio.run(main)
    assert len(rendered.token_ids) > 300_000
    assert turns > 20


def test_a_text_and_its_tokens(renderer: PromptRenderer) -> None:
    text = "Hello world<|im_end|> 日本 12"
    ids = anyio.run(renderer.tokenize, text, False)
    assert ids[:3].tolist() == [19556, 905, 2]
    assert anyio.run(renderer.detokenize, ids.tolist()) == text
    assert anyio.run(renderer.detokenize, []) == ""


@pytest.mark.parametrize("ids", [[-1], [0, 49_152], [2**40]])
def test_ids_outside_the_vocabulary_are_refused(
    renderer: PromptRenderer, ids: Sequence[int]
) -> None:
    with pytest.raises(ApiError, match="outside the vocabulary of 49152 tokens") as caught:
        anyio.run(renderer.detokenize, ids)
    assert (caught.value.status, caught.value.param) == (400, "tokens")
