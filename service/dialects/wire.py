"""From JSON bytes to msgspec structs, and from msgspec's errors to the field that is wrong.

In every wire struct a field that is null counts as unset, and keys it does not name are ignored;
those of a whole body go through `known_fields` first.
"""

import re
from collections.abc import Iterable, Iterator, Mapping
from typing import Any, TypeVar

import msgspec
import msgspec.inspect

from service.dialects.fields import MAX_NAME
from service.errors import ApiError, invalid

T = TypeVar("T")

MAX_JSON_DEPTH = 64
MAX_VALUES = 50_000
"""Values in one piece of free-form JSON; and strings, lists and objects in a body of 1 MB, of which
a larger one may have as many more: while they are made and freed, nothing else runs."""
_BYTES_PER_VALUE = 20

_MARKS = re.compile(rb'\\.|["\[\]{}]', re.DOTALL)
_ESCAPES = re.compile(
    rb"\\(?:u[dD][89abAB][0-9a-fA-F]{2}\\u[dD][c-fC-F][0-9a-fA-F]{2}"
    rb"|(?P<half>u[dD][89a-fA-F][0-9a-fA-F]{2})|.)",
    re.DOTALL,
)
_COLON = re.compile(rb"[ \t\r\n]*:")
_PATH = re.compile(r" - at (?:`key` in )?`\$\.?(.*?)`$")
_STEP = re.compile(r"\[[^\]]*\]|[^.\[]+")
_MISSING = re.compile(r"Object missing required field `(.*?)`")
_BOUND = re.compile(r"Expected `(\w+)` (of length )?([<>]=?) (.+)")
_BOUND_WORDS = {"<=": "at most", ">=": "at least", "<": "below", ">": "above"}
_LENGTH_UNITS = {"array": "items", "str": "characters", "object": "keys"}


def decode(data: bytes | str | msgspec.Raw, kind: type[T], path: str = "") -> T:
    """JSON as a `kind`; `path` says where in the body `data` stands.

    Raises ApiError 400 whose `param` is the dotted path of the field that is wrong.
    """
    try:
        return msgspec.json.decode(data, type=kind)
    except msgspec.ValidationError as error:
        raise _refusal(str(error), path, kind) from None
    except msgspec.DecodeError as error:
        fault = _fault(data, error) if len(data) else "empty: a JSON object is expected."
        raise ApiError(400, f"The body is {fault}", code="invalid_json") from None
    except RecursionError:
        raise ApiError(400, "The body is nested too deeply.", code="invalid_json") from None


def _fault(data: bytes | str | msgspec.Raw, error: msgspec.DecodeError) -> str:
    """What is wrong with JSON; of half a character the parser says other things."""
    raw = data.encode(errors="replace") if isinstance(data, str) else bytes(data)
    for escape in _ESCAPES.finditer(raw):
        if escape["half"]:
            return (
                f"not Unicode: \\{escape['half'].decode()} at byte {escape.start()} is half a "
                "character, a surrogate without its other half; the text was cut inside of one."
            )
    return f"not valid JSON: {error}."


def require_few_values(data: bytes) -> None:
    """Raises ApiError 400, with the top field at fault, for JSON of so many values that only
    reading it would stall others.

    What brackets and quotes there are is enough for nearly all; else those outside of strings are
    counted, one by one, so that other threads may run meanwhile. Numbers cost little.
    """
    most = max(MAX_VALUES, len(data) // _BYTES_PER_VALUE)
    if data.count(b'"') // 2 + data.count(b"[") + data.count(b"{") <= most:
        return
    count = depth = 0
    opened = -1
    top = b""
    for mark in _MARKS.finditer(data):
        kind = mark.group()
        if kind == b'"':
            if opened < 0:
                opened = mark.start()
                count += 1
                continue
            if depth == 1 and _COLON.match(data, mark.end()):
                top = data[opened + 1 : mark.start()]
            opened = -1
        elif opened < 0 and kind in b"[{":
            count += 1
            depth += 1
        elif opened < 0 and kind in b"]}":
            depth -= 1
        if count > most:
            param = top.decode("utf-8", "replace")[:MAX_NAME] or None
            where = f"Invalid '{param}': it" if param else "The body"
            message = f"{where} has more than {most} strings, lists and objects."
            raise ApiError(400, message, code="invalid_value", param=param)


def convert(fields: dict[str, str], kind: type[T]) -> T:
    """Texts, as a query string holds them, as a `kind`. Raises ApiError 400 as `decode` does."""
    try:
        return msgspec.convert(fields, kind, strict=False)
    except msgspec.ValidationError as error:
        raise _refusal(str(error), "", kind) from None


def _refusal(message: str, prefix: str, asked: Any) -> ApiError:
    where = _PATH.search(message)
    what = message[: where.start()] if where else message
    path = _join(prefix, where.group(1) if where else "")
    if missing := _MISSING.fullmatch(what):
        return missing_parameter(_join(path, missing.group(1)))
    subject = f"'{path}'" if path else "body"
    if bound := _BOUND.fullmatch(what):
        kind, length, relation, limit = bound.groups()
        code, detail = "invalid_value", f"must be {_BOUND_WORDS[relation]} {limit}"
        if length:
            detail = f"{detail} {_LENGTH_UNITS.get(kind, 'long')}"
    else:
        code = "invalid_type" if ", got " in what else "invalid_value"
        detail = what[0].lower() + what[1:].replace("`", "")
        if what.startswith("Invalid enum value"):
            detail += f"; expected one of {', '.join(allowed_values(asked, where))}"
    return ApiError(400, f"Invalid {subject}: {detail}.", code=code, param=path or None)


def allowed_values(asked: Any, where: re.Match[str] | None) -> list[str]:
    """Of the enumeration that stands at a place in a `asked`, all values; of those that different
    kinds of objects have there, all of them."""
    kinds = [msgspec.inspect.type_info(asked)]
    for step in _STEP.findall(where.group(1)) if where else ():
        kinds = [inner for kind in _flat(kinds) for inner in _inside(kind, step)]
    enums = (kind for kind in _flat(kinds) if isinstance(kind, msgspec.inspect.LiteralType))
    return list(dict.fromkeys(str(value) for kind in enums for value in kind.values))


def _flat(kinds: list[msgspec.inspect.Type]) -> Iterator[msgspec.inspect.Type]:
    for kind in kinds:
        if isinstance(kind, msgspec.inspect.Metadata):
            yield from _flat([kind.type])
        elif isinstance(kind, msgspec.inspect.UnionType):
            yield from _flat([*kind.types])
        else:
            yield kind


def _inside(kind: msgspec.inspect.Type, step: str) -> list[msgspec.inspect.Type]:
    if isinstance(kind, msgspec.inspect.StructType):
        return [field.type for field in kind.fields if field.encode_name == step]
    if isinstance(kind, msgspec.inspect.ListType) and step.startswith("["):
        return [kind.item_type]
    if isinstance(kind, msgspec.inspect.DictType) and step == "[...]":
        return [kind.value_type]
    return []


def _join(path: str, rest: str) -> str:
    return f"{path}.{rest}" if path and rest and not rest.startswith("[") else path + rest


def missing_parameter(param: str) -> ApiError:
    """400 for a field that must be there."""
    return invalid(param, f"Missing required parameter: '{param}'.", "missing_required_parameter")


def require_neutral(body: msgspec.Struct, neutral: Mapping[str, tuple[object, ...]]) -> None:
    """Raises ApiError 400 for a field that asks for what this server cannot do: which of its values
    ask for nothing, `neutral` says."""
    for name, values in neutral.items():
        value = getattr(body, name)
        if value is not None and value not in values:
            raise unsupported_value(name)


def require_name(value: object, param: str) -> str:
    """A name in free-form JSON. Raises ApiError 400."""
    if not isinstance(value, str) or not 1 <= len(value) <= MAX_NAME:
        raise invalid(param, f"Invalid '{param}': must be a string of 1 to {MAX_NAME} characters.")
    return value


def unsupported_value(param: str) -> ApiError:
    """400 for what the protocol allows and this server cannot do yet."""
    return invalid(
        param, f"This value of '{param}' is not supported by this server yet.", "unsupported_value"
    )


def one_line(encoded: bytes) -> bytes:
    """JSON without the raw line ends that some clients split SSE at: U+0085, U+2028, U+2029."""
    if encoded.isascii():
        return encoded
    return (
        encoded.replace(b"\xc2\x85", b"\\u0085")
        .replace(b"\xe2\x80\xa8", b"\\u2028")
        .replace(b"\xe2\x80\xa9", b"\\u2029")
    )


def require_shallow(value: Any, param: str) -> None:
    """Raises ApiError 400 if free-form JSON is nested deeper than templates can be given, or has
    more than MAX_VALUES values."""
    level = [value]
    count = 0
    for _ in range(MAX_JSON_DEPTH):
        level = [child for node in level for child in _children(node)]
        if not level:
            return
        count += len(level)
        if count > MAX_VALUES:
            raise invalid(param, f"Invalid '{param}': it has more than {MAX_VALUES} values.")
    raise invalid(param, f"Invalid '{param}': nested deeper than {MAX_JSON_DEPTH} levels.")


def _children(node: Any) -> Iterable[Any]:
    if isinstance(node, dict):
        return node.values()
    return node if isinstance(node, list) else ()
