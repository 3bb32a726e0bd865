"""`Answer`: the pieces of one generation, joined into what an unstreamed answer shows."""

from dataclasses import dataclass, field

from service.conversation import Message, ToolCall
from service.events import (
    Event,
    ReasoningDelta,
    TextDelta,
    TokenText,
    ToolCallDelta,
    ToolCallStarted,
)


@dataclass(slots=True)
class Answer:
    """What was said so far: exactly the streamed pieces, so both forms of an answer agree.

    A call that was cut is there with the arguments it got.
    """

    tokens: list[TokenText] = field(default_factory=list)
    _text: list[str] = field(default_factory=list)
    _reasoning: list[str] = field(default_factory=list)
    _calls: list[ToolCallStarted] = field(default_factory=list)
    _arguments: list[list[str]] = field(default_factory=list)

    def add(self, event: Event) -> None:
        """Take in a piece; events that are none are ignored."""
        match event:
            case TextDelta():
                self._text.append(event.text)
                self.tokens += event.tokens
            case ReasoningDelta():
                self._reasoning.append(event.text)
            case ToolCallStarted():
                self._calls.append(event)
                self._arguments.append([])
            case ToolCallDelta():
                self._arguments[event.index].append(event.arguments)
            case _:
                pass

    @property
    def text(self) -> str:
        return "".join(self._text)

    @property
    def reasoning(self) -> str:
        return "".join(self._reasoning)

    @property
    def calls(self) -> tuple[ToolCall, ...]:
        return tuple(
            ToolCall(call.id, call.name, "".join(arguments))
            for call, arguments in zip(self._calls, self._arguments, strict=True)
        )

    def message(self) -> Message:
        """The assistant's turn as a later prompt holds it; what was thought is not part of it."""
        return Message("assistant", self.text, tool_calls=self.calls)
