"""`PromptRenderer`: a conversation to the token ids that the engine computes."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final

import numpy as np
from anyio import CapacityLimiter, to_thread
from numpy.typing import NDArray

from engine.text import TextAssets
from engine.types import KeepPrefix
from service.conversation import Conversation, JSONValue
from service.errors import ApiError, context_exceeded, invalid
from service.prompts.messages import template_messages
from service.prompts.replay import TokenReplay
from service.prompts.template import ChatTemplate, OutputTooLong
from service.prompts.transcripts import PromptText, Transcripts

_NUM_WORKERS: Final = 2
_MAX_NFC_SHRINK: Final = 3
"""Normalisation to NFC makes no text shorter than a third of its UTF-8 bytes (Hangul does)."""

_LIKELY_CHARACTERS: Final = 8
"""A token of most texts stands for fewer."""
_CUT_TOKENS: Final = 64
"""More than a cut through a text can add to its tokens."""

_CONTINUE_TAG: Final = "CONTINUE_FINAL_MESSAGE_TAG "
"""Marks where the last message ends in the rendered text; its space shows whether the template
trims."""


@dataclass(frozen=True, slots=True, eq=False)
class RenderedPrompt:
    """token_ids: shape [num_tokens], int32, at least 1; text: what was tokenised.

    The first `num_replayed` ids are those of a former prompt and its answer. `known_as` is what
    its own answer will be remembered with, where it will be. `kept` says which of its beginnings
    are to be leased.
    """

    token_ids: NDArray[np.int32]
    text: str
    num_replayed: int = 0
    known_as: PromptText | None = None
    kept: tuple[KeepPrefix, ...] = ()


class PromptRenderer:
    """Renders and tokenises in worker threads of its own, never on the event loop.

    Special tokens written out in a message ("<|im_end|>") become these tokens: the rendered text
    is tokenised as a whole, as transformers and the common servers do. Who puts foreign text into
    messages must strip them.

    Cancelling a call lets its worker end by itself and drops the result.
    """

    def __init__(self, assets: TextAssets, max_context: int) -> None:
        """max_context: tokens of prompt and answer together. Raises TextError where the model has
        no usable chat template."""
        self._assets = assets
        self._template = ChatTemplate(assets.path, assets.chat_template)
        self._special = {"bos_token": assets.bos_token, "eos_token": assets.eos_token}
        self._replay = TokenReplay(assets.tokenizer, assets.vocabulary, assets.encoder.encode)
        self._max_context = max_context
        shrink = 1 if assets.tokenizer.normalizer is None else _MAX_NFC_SHRINK
        self._max_token_bytes = assets.vocabulary.max_token_bytes * shrink
        self._limiter = CapacityLimiter(_NUM_WORKERS)
        specials = map(assets.vocabulary.token_bytes, assets.vocabulary.special_ids)
        self._transcripts = Transcripts(list(specials))

    async def render(
        self,
        conversation: Conversation,
        former: NDArray[np.int32] | None = None,
        scope: str | None = None,
    ) -> RenderedPrompt:
        """The prompt of a conversation. `former` are the ids of a prompt and of what was generated
        after it: where the rendered text begins with theirs, they are taken over. Without them
        they are looked for among the answers remembered in `scope`, unless that is None.

        Raises ApiError, all 400: for messages that the template refuses, for a prompt of
        `max_context` tokens or more (code "context_length_exceeded"; one token must be left for
        the answer) and for one of none. A prompt that cannot fit is refused before it is
        tokenised.
        """
        return await to_thread.run_sync(
            self._render, conversation, former, scope, limiter=self._limiter
        )

    def remember(self, prompt: RenderedPrompt, answer: Sequence[int]) -> None:
        """Keep the tokens of an answer for when they come back as text in its scope."""
        if prompt.known_as is None:
            return
        vocabulary = self._assets.vocabulary
        num_tokens = len(answer)
        while num_tokens and vocabulary.is_special(answer[num_tokens - 1]):
            num_tokens -= 1
        if num_tokens:
            said = np.array(answer[:num_tokens], dtype=np.int32)
            key = prompt.known_as.followed_by(vocabulary.join(answer[:num_tokens]))
            self._transcripts.add(key, np.concatenate([prompt.token_ids, said]))

    async def tokenize(self, text: str, add_special_tokens: bool) -> NDArray[np.int32]:
        """Token ids of a text, of any length. Raises ApiError (400) where it is not Unicode."""
        return await to_thread.run_sync(
            self._encode, text, add_special_tokens, limiter=self._limiter
        )

    async def detokenize(self, token_ids: Sequence[int] | NDArray[np.int32]) -> str:
        """The text of tokens, special ones included; U+FFFD for bytes that are no text.

        Raises ApiError (400, param "tokens") for an id outside the vocabulary.
        """
        return await to_thread.run_sync(self._decode, token_ids, limiter=self._limiter)

    def _render(
        self,
        conversation: Conversation,
        former: NDArray[np.int32] | None,
        scope: str | None,
    ) -> RenderedPrompt:
        text = self._render_text(conversation)
        data = _utf8(text, "messages")
        num_bytes = len(data)
        if num_bytes > self._max_context * self._max_token_bytes:
            raise self._too_long(f"at least {-(-num_bytes // self._max_token_bytes)}")
        self._refuse_by_its_beginning(text)
        known_as: PromptText | None = None
        if scope is not None:
            found, known_as = self._transcripts.find(scope, data)
            former = found if former is None else former
        if former is None:
            token_ids, num_replayed = self._assets.encoder.encode(text), 0
        else:
            token_ids, num_replayed = self._replay.splice(data, former)
        if len(token_ids) >= self._max_context:
            raise self._too_long(str(len(token_ids)))
        if not len(token_ids):
            raise invalid("messages", "The messages render to no tokens.")
        return RenderedPrompt(token_ids, text, num_replayed, known_as)

    def _refuse_by_its_beginning(self, text: str) -> None:
        """Raises ApiError for a text whose first part alone has too many tokens: what few texts
        fit in this length is not tokenised as a whole for nothing. A cut changes no more than the
        tokens beside it."""
        head = _LIKELY_CHARACTERS * self._max_context
        if len(text) > 2 * head:
            num_tokens = len(self._assets.encoder.encode(text[:head]))
            if num_tokens >= self._max_context + _CUT_TOKENS:
                raise self._too_long(f"at least {num_tokens - _CUT_TOKENS}")

    def _render_text(self, conversation: Conversation) -> str:
        if not conversation.messages:
            raise invalid("messages", "There are no messages.")
        template = self._template
        messages = template_messages(conversation, template)
        if conversation.continue_final:
            if messages[-1]["role"] != "assistant":
                raise invalid("messages", "Only a last message of the assistant can be continued.")
            messages[-1]["content"] = f"{messages[-1]['content']}{_CONTINUE_TAG}"
        tools = [tool.spec for tool in conversation.tools] or None
        variables: dict[str, JSONValue] = {
            "messages": [*messages],
            "tools": [*tools] if tools else None,
            "add_generation_prompt": conversation.asks_answer and not conversation.continue_final,
            **self._special,
        }
        if taken := sorted(variables.keys() & conversation.template_kwargs.keys()):
            raise invalid("chat_template_kwargs", f"{taken[0]!r} is set by the server.")
        variables.update(conversation.template_kwargs)
        max_characters = 2 * self._max_context * self._max_token_bytes
        try:
            text = template.render(variables, max_characters)
        except OutputTooLong as error:
            raise self._too_long(f"at least {2 * self._max_context}") from error
        return _left_open(text) if conversation.continue_final else text

    def _encode(self, text: str, add_special_tokens: bool) -> NDArray[np.int32]:
        _utf8(text, "prompt")
        return self._assets.encoder.encode(text, add_special_tokens=add_special_tokens)

    def _decode(self, token_ids: Sequence[int] | NDArray[np.int32]) -> str:
        size = self._assets.vocabulary.size
        if bad := next((each for each in token_ids if not 0 <= each < size), None):
            raise invalid("tokens", f"{bad} is outside the vocabulary of {size} tokens.")
        # Unlike `decode`, this lets the event loop run meanwhile.
        ids = token_ids.tolist() if isinstance(token_ids, np.ndarray) else token_ids
        (text,) = self._assets.tokenizer.decode_batch([ids], skip_special_tokens=False)
        return str(text)

    def _too_long(self, num_tokens: str) -> ApiError:
        return context_exceeded(
            "messages",
            f"This model's maximum context length is {self._max_context} tokens, at least one of "
            f"them for the answer; the messages resulted in {num_tokens} tokens.",
        )


def _utf8(text: str, param: str) -> bytes:
    try:
        return text.encode()
    except UnicodeEncodeError as error:
        raise invalid(param, "The text holds lone surrogates, which are not Unicode.") from error


def _left_open(text: str) -> str:
    """The text up to the end of the last message, as transformers' `continue_final_message`."""
    at = text.rfind(_CONTINUE_TAG.rstrip())
    if at < 0:
        raise invalid("messages", "The model's chat template does not show the last message.")
    return text[:at] if text.startswith(_CONTINUE_TAG, at) else text[:at].rstrip()
