"""The output items of one response as they grow: messages, reasoning and function calls."""

from collections.abc import Callable
from typing import Any, Final, TypeAlias

import msgspec

from service.dialects.logprobs import ShownToken

Fields: TypeAlias = dict[str, Any]
Frame: TypeAlias = Callable[[str, Fields], bytes]

_json = msgspec.json.Encoder().encode


class OutputItem:
    """One item between `response.output_item.added` and `response.output_item.done`.

    The same identity stands in every event of an item; items follow one another, so an index is
    never used twice.
    """

    __slots__ = (
        "_done",
        "_fields",
        "_logprobs",
        "_part",
        "_pieces",
        "_place",
        "_says",
        "delta",
        "key",
    )

    def __init__(self, key: str | int, index: int, fields: Fields, part: Fields | None) -> None:
        """`key` tells what belongs to this item; `part` is its one content part, still empty, or
        None for a function call, whose text is its arguments."""
        self.key = key
        self._fields = fields
        self._part = part
        self._pieces: list[str] = []
        self._place: Fields = {"item_id": fields["id"], "output_index": index}
        kind = "function_call_arguments" if part is None else str(part["type"])
        self._logprobs: list[ShownToken] = []
        if part is None:
            self._done = ("arguments", f"response.{kind}.done")
        else:
            self._done = ("text", f"response.{kind}.done")
            self._place["content_index"] = 0
        self._says = kind == "output_text"
        place = _json({"type": f"response.{kind}.delta"} | self._place)[1:-1]
        logprobs = b',"logprobs":[]' if self._says else b""
        self.delta = (b"{" + place + b',"delta":', logprobs + b',"sequence_number":')

    def opened(self, frame: Frame) -> list[bytes]:
        """The frames that begin the item."""
        fields = self._fields | {"status": "in_progress"}
        empty: Fields = {"arguments": ""} if self._part is None else {"content": []}
        item = fields | empty
        index = self._place["output_index"]
        frames = [frame("response.output_item.added", {"output_index": index, "item": item})]
        if self._part is not None:
            part = self._place | {"part": self._part}
            frames.append(frame("response.content_part.added", part))
        return frames

    def add(self, text: str) -> None:
        """Take in the text of a delta."""
        self._pieces.append(text)

    def add_tokens(self, tokens: list[ShownToken]) -> bytes:
        """Take in the tokens of a delta's text. What stands in its frame between the text and the
        number then."""
        self._logprobs += tokens
        return b',"logprobs":' + _json(list(map(_without_bytes, tokens))) + b',"sequence_number":'

    def closed(self, frame: Frame, status: str) -> tuple[list[bytes], Fields]:
        """The frames that end the item, and the item as it stands in `output`."""
        text = "".join(self._pieces)
        name, event = self._done
        done = self._place | {name: text}
        if self._says:
            done["logprobs"] = list(map(_without_bytes, self._logprobs))
        item = self._fields | {"status": status}
        if self._part is None:
            done["name"] = self._fields["name"]
            item["arguments"] = text
            frames = [frame(event, done)]
        else:
            part = self._part | {"text": text}
            if self._logprobs:
                part["logprobs"] = self._logprobs
            item["content"] = [part]
            part_done = self._place | {"part": part}
            frames = [frame(event, done), frame("response.content_part.done", part_done)]
        index = self._place["output_index"]
        frames.append(frame("response.output_item.done", {"output_index": index, "item": item}))
        return frames, item


def _without_bytes(token: ShownToken) -> ShownToken:
    """As an event shows it."""
    top = [{"token": each["token"], "logprob": each["logprob"]} for each in token["top_logprobs"]]
    return {"token": token["token"], "logprob": token["logprob"], "top_logprobs": top}


MESSAGE: Final = "message"
REASONING: Final = "reasoning"


def message_item(response_id: str, index: int) -> OutputItem:
    """What the assistant says."""
    fields = {"id": _id("msg", response_id, index), "type": "message", "role": "assistant"}
    return OutputItem(
        MESSAGE, index, fields, {"type": "output_text", "text": "", "annotations": []}
    )


def reasoning_item(response_id: str, index: int) -> OutputItem:
    """What the model thinks before it speaks."""
    fields: Fields = {"id": _id("rs", response_id, index), "type": "reasoning", "summary": []}
    return OutputItem(REASONING, index, fields, {"type": "reasoning_text", "text": ""})


def call_item(response_id: str, index: int, call_index: int, call_id: str, name: str) -> OutputItem:
    """A function call; its key is its number among the calls."""
    fields = {
        "id": _id("fc", response_id, index),
        "type": "function_call",
        "call_id": call_id,
        "name": name,
    }
    return OutputItem(call_index, index, fields, None)


def _id(prefix: str, response_id: str, index: int) -> str:
    suffix = response_id.removeprefix("resp_")
    return f"{prefix}_{suffix}_{index}" if index else f"{prefix}_{suffix}"
