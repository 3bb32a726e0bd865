"""From the text of an answer to its events: thoughts, text, and tool calls."""

import secrets
import string
from dataclasses import replace

import numpy as np
from numpy.typing import NDArray

from engine.text import TextAssets, Vocabulary
from engine.types import unpack_tokens
from service.conversation import GenerationRequest
from service.events import (
    Event,
    ReasoningDelta,
    TextDelta,
    TokenText,
    ToolCallDelta,
    ToolCallDone,
    ToolCallStarted,
)
from service.tools import reasoning
from service.tools.formats import AnswerFormat
from service.tools.grammar import grammar_for, schemas_of
from service.tools.grammar_check import GrammarChecker
from service.tools.pieces import Arguments, CallDone, CallStarted, Piece, Text, ToolParser
from service.tools.reasoning import ThinkSplitter, ThoughtCounter

TokenIds = NDArray[np.int32] | list[int]

_TAIL_TOKENS = 16  # enough for a marker and the white space after it
_ALPHABET = string.ascii_letters + string.digits


class AnswerReader:
    """One answer's text to events, driven by characters; `num_calls` counts complete calls."""

    def __init__(
        self,
        splitter: ThinkSplitter | None,
        parser: ToolParser | None,
        format: AnswerFormat,
        vocabulary: Vocabulary,
    ) -> None:
        """Without a splitter or a parser there are no thoughts or no calls to be found."""
        self._splitter = splitter
        self._thoughts = ThoughtCounter(vocabulary)
        self._parser = parser
        self._format = format
        self._num_started = 0
        self.num_calls = 0

    def feed(self, text: str, tokens: tuple[TokenText, ...] = ()) -> list[Event]:
        """The events that the next characters make certain; `tokens` ride on a TextDelta."""
        if self._splitter is None and self._parser is None:
            return [TextDelta(text, tokens)] if text or tokens else []
        events: list[Event] = []
        if self._splitter is not None:
            thought, text = self._splitter.feed(text)
            events += [ReasoningDelta(thought)] if thought else []
        events += self._said(text)
        if not tokens:
            return events
        if events and isinstance(events[0], TextDelta):
            return [replace(events[0], tokens=tokens), *events[1:]]
        return [TextDelta("", tokens), *events]

    def count(self, token_ids: bytes) -> None:
        """Tell the tokens, packed, of what is fed next."""
        if self._splitter is not None:
            self._thoughts.add(unpack_tokens(token_ids).tolist())

    @property
    def num_thought_tokens(self) -> int:
        """How many of them were thoughts, with the marker that ends them."""
        thought = self._splitter is not None and self._splitter.has_thought
        return self._thoughts.num_tokens if thought else 0

    def finish(self) -> list[Event]:
        """What was held back when the answer ended."""
        events: list[Event] = []
        text = ""
        if self._splitter is not None:
            thought, text = self._splitter.finish()
            events += [ReasoningDelta(thought)] if thought else []
        events += self._said(text)
        if self._parser is not None:
            events += map(self._event, self._parser.finish())
        return events

    def _said(self, text: str) -> list[Event]:
        if self._parser is None:
            return [TextDelta(text)] if text else []
        return [self._event(piece) for piece in self._parser.feed(text)]

    def _event(self, piece: Piece) -> Event:
        match piece:
            case Text():
                return TextDelta(piece.text)
            case CallStarted():
                self._num_started += 1
                return ToolCallStarted(self._num_started - 1, self._call_id(), piece.name)
            case Arguments():
                return ToolCallDelta(self._num_started - 1, piece.text)
            case CallDone():
                self.num_calls += 1
                return ToolCallDone(self._num_started - 1)

    def _call_id(self) -> str:
        """Mistral's templates take ids of exactly nine letters and digits only."""
        if self._format.name.startswith("mistral"):
            return "".join(secrets.choice(_ALPHABET) for _ in range(9))
        return f"call_{secrets.token_hex(12)}"


class AnswerReaders:
    """Makes the reader of each request, by the format of the model that is served."""

    def __init__(self, assets: TextAssets, format: AnswerFormat) -> None:
        self.vocabulary = assets.vocabulary
        self._format = format
        self._checker = GrammarChecker()
        ids = {marker: assets.tokenizer.token_to_id(marker) for marker in format.markers}
        special = assets.vocabulary.special_ids
        self._marker_ids = {marker: each for marker, each in ids.items() if each in special}

    async def grammar(self, request: GenerationRequest, prompt: TokenIds) -> str:
        """What the answer to this prompt must match; "" for anything.

        Raises ApiError 400 with the path of what cannot be compiled.
        """
        thinking = self._thinks(request) and self._opened(prompt)
        grammar = grammar_for(request, self._format, self._marker_ids, thinking)
        if grammar:
            asked = request.options.output_format
            path = "tools" if asked is None else asked.path
            await self._checker.check(grammar, schemas_of(request), path)
        return grammar

    def reader(self, request: GenerationRequest, prompt: TokenIds) -> AnswerReader:
        """For a request whose prompt is these tokens. A request that is no conversation is
        answered with plain text."""
        splitter = None
        if self._thinks(request):
            splitter = ThinkSplitter(thinking=self._opened(prompt))
        names, options = request.callable_tools, request.options
        parser = None
        if names:
            parser = self._format.parser(
                names,
                parallel=options.parallel_tool_calls,
                by_grammar=options.tool_choice.mode == "required" or bool(options.output_format),
            )
        return AnswerReader(splitter, parser, self._format, self.vocabulary)

    def shown_ids(self, request: GenerationRequest) -> tuple[int, ...]:
        """Special tokens whose text the reader must see."""
        reads = self._thinks(request) or bool(request.callable_tools)
        return tuple(self._marker_ids.values()) if reads else ()

    def _thinks(self, request: GenerationRequest) -> bool:
        return self._format.thinks and bool(request.conversation.messages)

    def _opened(self, prompt: TokenIds) -> bool:
        """Whether the prompt ends with the beginning of the thoughts."""
        tail = self.vocabulary.join(list(prompt[-_TAIL_TOKENS:]))
        return tail.rstrip().endswith(reasoning.OPEN.encode())
