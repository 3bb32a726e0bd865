"""Typed reading of a checkpoint's configuration: GGUF metadata or config.json."""

from collections.abc import Mapping
from pathlib import Path

from engine.weights.checkpoint_file import CheckpointError


class Settings:
    """Values of one mapping of a checkpoint. `prefix` goes before each key, there and in errors.

    A key that is absent or null is missing; reading a missing key without a default, or a value
    of the wrong type or range, raises CheckpointError naming file and key.
    """

    def __init__(self, path: Path, values: Mapping[str, object], prefix: str = "") -> None:
        self.path = path
        self._values = values
        self._prefix = prefix

    def error(self, key: str, reason: str) -> CheckpointError:
        return CheckpointError(self.path, reason, item=self._prefix + key)

    def has(self, key: str) -> bool:
        return self._values.get(self._prefix + key) is not None

    def value(self, key: str, default: object = None) -> object:
        value = self._values.get(self._prefix + key)
        if value is None:
            value = default
        if value is None:
            raise self.error(key, "is missing")
        return value

    def size(self, key: str, default: int | None = None, *, most: int = 2**31 - 1) -> int:
        """A positive whole number."""
        value = self.value(key, default)
        if isinstance(value, bool) or not isinstance(value, int) or not 1 <= value <= most:
            raise self.error(key, f"{value!r} is not a whole number from 1 to {most}")
        return value

    def number(self, key: str, default: float | None = None, *, above: float = 1e-30) -> float:
        """A number above `above` and below 1e30."""
        value = self.value(key, default)
        if isinstance(value, bool) or not isinstance(value, int | float):
            raise self.error(key, f"{value!r} is not a number")
        if not above < value < 1e30:
            raise self.error(key, f"{value!r} is not between {above:g} and 1e30")
        return float(value)

    def flag(self, key: str, default: bool) -> bool:
        value = self.value(key, default)
        if not isinstance(value, bool):
            raise self.error(key, f"{value!r} is not true or false")
        return value

    def text(self, key: str, default: str | None = None) -> str:
        value = self.value(key, default)
        if not isinstance(value, str):
            raise self.error(key, f"{value!r} is not a string")
        return value

    def nested(self, key: str) -> "Settings":
        """The mapping under `key`, empty where it is missing; errors name `key.inner`."""
        value = self.value(key, {})
        if not isinstance(value, dict):
            raise self.error(key, f"{value!r} is not an object")
        prefix = f"{self._prefix}{key}."
        return Settings(self.path, {prefix + str(k): v for k, v in value.items()}, prefix)

    def refuse(self, key: str, harmless: tuple[object, ...], reason: str) -> None:
        """Raise if `key` has a value other than the `harmless` ones: it asks for a variant of the
        model that a DecoderSpec cannot say."""
        if self.has(key) and self.value(key) not in harmless:
            raise self.error(key, f"{self.value(key)!r} is not supported: {reason}")
