"""What a response read, as items: the canonical messages of its chain in this dialect again."""

from typing import Any, Final, Literal, TypeAlias

from service.conversation import Message
from service.errors import invalid
from service.responses.store import StoredResponse

Item: TypeAlias = dict[str, Any]
Order: TypeAlias = Literal["asc", "desc"]

MAX_PAGE: Final = 100


def input_items(stored: StoredResponse) -> list[Item]:
    """The items a response was generated from, oldest first: those of the responses it continues,
    what these said, and its own input. An item has the same id whenever it is listed."""
    items: list[Item] = []
    for node in reversed(list(stored.chain())):
        if node.previous is not None:
            said = node.previous.id.removeprefix("resp_")
            for message in node.inherited:
                items += _items(message, said, "")
        own = node.id.removeprefix("resp_")
        for index, message in enumerate(node.input):
            items += _items(message, own, f"_in{index}")
    return items


def page(items: list[Item], after: str | None, limit: int, order: Order) -> Item:
    """One page of a list, in the shape that SDKs page by. Raises ApiError 400 for an `after` that
    is no item of it."""
    if order == "desc":
        items = items[::-1]
    start = 0
    if after is not None:
        ids = [item["id"] for item in items]
        if after not in ids:
            raise invalid("after", f"Invalid 'after': no item has the id {after!r}.")
        start = ids.index(after) + 1
    data = items[start : start + limit]
    return {
        "object": "list",
        "data": data,
        "first_id": data[0]["id"] if data else None,
        "last_id": data[-1]["id"] if data else None,
        "has_more": start + limit < len(items),
    }


def _items(message: Message, response: str, place: str) -> list[Item]:
    """Ids of what a response said are those that its own events had."""
    if message.role == "tool":
        output = {"call_id": message.tool_call_id, "output": message.text}
        return [_item("fco", "function_call_output", response, place) | output]
    items: list[Item] = []
    if message.text or not message.tool_calls:
        kind = "output_text" if message.role == "assistant" else "input_text"
        part: Item = {"type": kind, "text": message.text}
        if kind == "output_text":
            part["annotations"] = []
        said = {"role": message.role, "content": [part]}
        items.append(_item("msg", "message", response, place) | said)
    for call in message.tool_calls:
        number = f"{place}_{len(items)}" if items else place
        called = {"call_id": call.id, "name": call.name, "arguments": call.arguments}
        items.append(_item("fc", "function_call", response, number) | called)
    return items


def _item(prefix: str, type: str, response: str, place: str) -> Item:
    return {"id": f"{prefix}_{response}{place}", "type": type, "status": "completed"}
