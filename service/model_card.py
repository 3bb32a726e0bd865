"""`ModelCard`: the served model as clients see it."""

import time
from dataclasses import dataclass

from engine.types import EngineInfo
from service.errors import ApiError

DEFAULT_NAME = "default"


@dataclass(frozen=True, slots=True)
class ModelCard:
    """`names[0]` is the served id, the others are aliases; "default" always is one."""

    names: tuple[str, ...]
    loaded_at: int
    max_context: int
    vocab_size: int
    fingerprint: str

    @property
    def id(self) -> str:
        return self.names[0]

    @classmethod
    def of(cls, info: EngineInfo, names: tuple[str, ...]) -> "ModelCard":
        """The card of a started engine; `names` empty for the model's own name."""
        return cls(
            names=names or (info.model_name,),
            loaded_at=int(time.time()),
            max_context=info.max_context,
            vocab_size=info.vocab_size,
            fingerprint=f"fp_{info.model_digest[:12]}",
        )

    def require(self, name: str) -> None:
        """Raises ApiError 404 `model_not_found` unless `name` is served."""
        if name not in self.names and name != DEFAULT_NAME:
            others = (*self.names[1:], *[DEFAULT_NAME] * (DEFAULT_NAME not in self.names))
            raise ApiError(
                404,
                f"The model {name!r} does not exist; this server serves {self.id!r}, also as "
                f"{', '.join(map(repr, others))}; --served-model-name gives it other names.",
                code="model_not_found",
                param="model",
            )
