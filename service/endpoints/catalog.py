"""`GET /v1/models`, in one shape that OpenAI's and Anthropic's clients both read."""

from datetime import UTC, datetime

from starlette.types import Receive, Scope, Send

from service.conversation import JSONValue
from service.model_card import ModelCard
from service.transport.http import send_json

OWNER = "headwater"


class Models:
    """The list of served models."""

    def __init__(self, card: ModelCard) -> None:
        self._card = card

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        models = [describe(self._card, name) for name in self._card.names]
        await send_json(
            send,
            {
                "object": "list",
                "data": models,
                "first_id": self._card.names[0],
                "last_id": self._card.names[-1],
                "has_more": False,
            },
        )


class Model:
    """One served model, by any of its names; a name may hold slashes."""

    def __init__(self, card: ModelCard) -> None:
        self._card = card

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        name = scope["path_params"]["model"]
        self._card.require(name)
        await send_json(send, describe(self._card, name))


def describe(card: ModelCard, name: str) -> dict[str, JSONValue]:
    """A served model: OpenAI's fields, vLLM's `max_model_len`, Anthropic's fields."""
    return {
        "id": name,
        "object": "model",
        "created": card.loaded_at,
        "owned_by": OWNER,
        "root": card.id,
        "max_model_len": card.max_context,
        "type": "model",
        "display_name": name,
        "lifecycle": "active",
        "created_at": datetime.fromtimestamp(card.loaded_at, UTC).isoformat(),
        "max_input_tokens": card.max_context,
        "max_tokens": card.max_context,
    }
