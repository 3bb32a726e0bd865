"""The way in of every request that generates, in any dialect: read, decoded, refused on record."""

import time
from abc import ABC, abstractmethod
from dataclasses import dataclass
from typing import ClassVar, Generic, TypeVar

from starlette.types import Receive, Scope, Send

from service.errors import ApiError
from service.events import RequestRecord
from service.services import Services
from service.telemetry.sinks import finish_refused
from service.transport.http import begin_record, read_decoded

Request = TypeVar("Request")


@dataclass(frozen=True, slots=True)
class Call:
    """An HTTP request that has been received and is to be answered; it began at `start_ns`."""

    scope: Scope
    receive: Receive
    send: Send
    operation: str
    start_ns: int

    def record(self, model: str, *, stream: bool) -> RequestRecord:
        """The record of one generation."""
        return begin_record(
            self.scope,
            operation=self.operation,
            model=model,
            start_ns=self.start_ns,
            stream=stream,
        )


class Generates(ABC, Generic[Request]):
    """An endpoint, as an ASGI application: a dialect says how a body is decoded and answered."""

    operation: ClassVar[str] = "chat"
    """What telemetry calls it."""

    def __init__(self, services: Services) -> None:
        self._services = services

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Raises ApiError while nothing has been answered; ClientGone if the client left."""
        call = Call(scope, receive, send, self.operation, time.monotonic_ns())
        services = self._services
        try:
            request = await read_decoded(scope, receive, self._decode, services.settings.limits)
        except ApiError as error:
            finish_refused(services.records, call.record("", stream=False), error)
            raise
        await self._answer(call, request)

    @abstractmethod
    def _decode(self, body: bytes) -> Request:
        """Raises ApiError. May run on a worker thread."""

    @abstractmethod
    async def _answer(self, call: Call, request: Request) -> None:
        """Raises as `__call__`."""
