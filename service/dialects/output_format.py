"""What an answer must match: `response_format`, `text.format` and `structured_outputs`."""

import json
from typing import Any, Final

import msgspec

from service.conversation import OutputFormat
from service.dialects import wire
from service.dialects.known_fields import KnownFields
from service.errors import invalid

MAX_GRAMMAR_CHARACTERS: Final = 1 << 20
ANY_OBJECT: Final = '{"type":"object"}'
_EXTRAS: Final = {"json": "json_schema", "regex": "regex", "choice": "choice", "grammar": "lark"}


class JsonSchema(msgspec.Struct, frozen=True, omit_defaults=True):
    """The description of a schema on the wire."""

    schema: dict[str, Any] | bool | None = None
    name: str | None = None
    strict: bool | None = None
    description: str | None = None


class ResponseFormat(JsonSchema, frozen=True, kw_only=True, omit_defaults=True):
    """Chat nests the schema's description, the Responses dialect does not."""

    type: str
    json_schema: JsonSchema | None = None


FORMAT_FIELDS: Final = KnownFields.within(
    ResponseFormat, json_schema=KnownFields.within(JsonSchema)
)


def decode_format(given: ResponseFormat | None, path: str, *, nested: bool) -> OutputFormat | None:
    """None for plain text. Raises ApiError 400 with the path of the field that is wrong."""
    if given is None or given.type == "text":
        return None
    if given.type == "json_object":
        return OutputFormat("json_schema", ANY_OBJECT, path)
    if given.type != "json_schema":
        message = f"Invalid '{path}.type': expected text, json_object or json_schema."
        raise invalid(f"{path}.type", message, "unsupported_value")
    described: JsonSchema | None = given.json_schema if nested else given
    path = f"{path}.json_schema" if nested else path
    if described is None:
        raise wire.missing_parameter(path)
    if described.schema is None:
        raise wire.missing_parameter(f"{path}.schema")
    return _bounded("json_schema", described.schema, f"{path}.schema")


def decode_extras(given: dict[str, Any] | None) -> OutputFormat | None:
    """vLLM's `structured_outputs`: one of json, regex, choice, grammar (Lark)."""
    path = "structured_outputs"
    asked = {key: value for key, value in (given or {}).items() if value is not None}
    if not asked:
        return None
    if unknown := sorted(asked.keys() - _EXTRAS.keys()):
        raise wire.unsupported_value(f"{path}.{unknown[0]}")
    if len(asked) > 1:
        raise invalid(path, f"'{path}' takes one of {', '.join(_EXTRAS)}.")
    [(key, value)] = asked.items()
    path = f"{path}.{key}"
    if key == "json" and isinstance(value, str):
        try:
            value = json.loads(value)
        except (ValueError, RecursionError):
            raise invalid(path, f"Invalid '{path}': it is not JSON.") from None
    if key == "json":
        fits = isinstance(value, dict | bool)
    elif key == "choice":
        fits = isinstance(value, list) and bool(value) and all(isinstance(v, str) for v in value)
    else:
        fits = isinstance(value, str) and bool(value)
    if not fits:
        raise invalid(path, f"Invalid '{path}': this is no {key}.", "invalid_type")
    if key in ("regex", "grammar"):
        return _checked(OutputFormat("regex" if key == "regex" else "lark", value, path))
    return _bounded("choice" if key == "choice" else "json_schema", value, path)


def _bounded(kind: Any, value: Any, path: str) -> OutputFormat:
    wire.require_shallow(value, path)
    return _checked(OutputFormat(kind, json.dumps(value, ensure_ascii=False), path))


def _checked(format: OutputFormat) -> OutputFormat:
    if len(format.source) > MAX_GRAMMAR_CHARACTERS:
        raise invalid(
            format.path,
            f"'{format.path}' is longer than {MAX_GRAMMAR_CHARACTERS} characters.",
        )
    return format
