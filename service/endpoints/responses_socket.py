"""Responses over WebSocket: each connection a task group, its lanes side by side.

A frame is written as soon as it is made; while the client takes nothing, who has one for it waits,
and reads no more of its generation. A turn's failure is an error event on its lane and never the
end of the socket. When the socket ends, however it does, its turns are cancelled, which aborts them
in the engine by the next step.
"""

import logging
import time
from contextlib import suppress
from dataclasses import dataclass, field

import anyio
from starlette.datastructures import Headers
from starlette.types import Receive, Scope, Send

from service.dialects import wire
from service.dialects.responses_decode import (
    CreateRequest,
    decode_create,
    decode_envelope,
    decode_steer,
    in_this_dialect,
)
from service.dialects.responses_encode import ws_error
from service.dialects.responses_entries import Entry
from service.errors import ApiError, draining, invalid
from service.events import Admitted, Event, new_trace_number
from service.responses.turns import OUR_FAULT, Origin
from service.services import Services
from service.telemetry.log_context import TRACE_ID
from service.telemetry.sinks import finish_refused
from service.transport.handshake import SERVICE_RESTART, accepted_protocol, deny
from service.transport.http import begin_record, decode_body
from service.transport.intake import Hold
from service.transport.lanes import LaneLimits, Lanes, check_stream_id
from service.transport.steering import RunningTurn, Steer, Steering, prepended, successor

GOING_AWAY = 1001

_EXPECTED = "expected response.create, response.steer or response.processed"

log = logging.getLogger(__name__)


class SocketClosed(Exception):
    """The socket is closed, by whichever side: nothing more can be said."""


@dataclass(frozen=True, slots=True)
class SocketLimits:
    """Bounds of one connection in time; `max_silence_s` is a running response's longest."""

    lanes: LaneLimits = field(default_factory=LaneLimits)
    max_age_s: float = 3600.0
    max_silence_s: float = 5.0


class ResponsesSockets:
    """The endpoint, as an ASGI application, and the connections it has open."""

    def __init__(self, services: Services, limits: SocketLimits | None = None) -> None:
        self._services = services
        self._limits = limits or SocketLimits()
        self._connections: set[_Connection] = set()
        self._draining = False
        self._closed = anyio.Event()

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Serve one connection to its end."""
        await receive()  # that the client wants to connect
        if self._draining:
            await deny(send, draining("connect again"))
            return
        connection = _Connection(scope, receive, send, self._services, self._limits)
        self._connections.add(connection)
        try:
            subprotocol = accepted_protocol(scope["subprotocols"])
            await send({"type": "websocket.accept", "subprotocol": subprotocol})
            await connection.run()
        finally:
            self._connections.remove(connection)
            self._closed.set()
            self._closed = anyio.Event()

    async def drain(self) -> None:
        """Refuse new sockets and new turns, let running turns finish, then close with 1012.

        Returns when every connection is closed; the caller bounds the time.
        """
        self._draining = True
        for connection in self._connections:
            connection.draining.set()
        while self._connections:
            await self._closed.wait()


@dataclass(frozen=True, slots=True)
class _Arrival:
    """A `response.create` as it waits in its lane: decoded, or what is wrong with it; and the
    bytes it holds until its turn has ended."""

    request: CreateRequest | ApiError
    time_ns: int
    received_ns: int
    hold: Hold


class _Connection:
    """One socket from its handshake to its end."""

    def __init__(
        self, scope: Scope, receive: Receive, send: Send, services: Services, limits: SocketLimits
    ) -> None:
        self.draining = anyio.Event()
        self._scope = scope
        self._receive = receive
        self._send = send
        self._services = services
        self._limits = limits
        self._steering = Steering(self._put)
        self._holds: set[Hold] = set()
        self._trace_id = TRACE_ID.get()
        self._closing = False
        self._closed = False

    async def run(self) -> None:
        """Return when the socket is closed, by whichever side, and nothing of it runs."""
        try:
            await self._run()
        finally:
            self._steering.discard()
            for hold in self._holds:
                hold.release()

    async def _run(self) -> None:
        async with anyio.create_task_group() as tasks:
            lanes = Lanes(tasks, self._serve, self._limits.lanes)
            tasks.start_soon(self._close_in_time, lanes)
            tasks.start_soon(self._keep_talking)
            await self._read(lanes)
            for running in self._steering.running:
                running.turn.record.disconnected_ns = time.monotonic_ns()
            tasks.cancel_scope.cancel()

    async def _read(self, lanes: Lanes[_Arrival]) -> None:
        """Read until the socket has ended."""
        while True:
            message = await self._receive()
            if message["type"] == "websocket.disconnect":
                return
            with suppress(SocketClosed):
                await self._take(message.get("text"), lanes)

    async def _put(self, frame: bytes) -> None:
        """Say something; waits until the client has taken enough of what was said before. Raises
        SocketClosed."""
        if self._closed:
            raise SocketClosed
        try:
            await self._send({"type": "websocket.send", "text": frame.decode()})
        except OSError:
            raise SocketClosed from None

    async def _take(self, text: str | None, lanes: Lanes[_Arrival]) -> None:
        stream_id: str | None = None
        hold = Hold(self._services.intake)
        waits = False
        try:
            if text is None:
                raise ApiError(400, "Messages are text frames of JSON.", code="invalid_type")
            data = text.encode()
            hold.set(len(data))
            edge = self._services.settings.limits
            envelope = await decode_body(data, decode_envelope, edge)
            stream_id = check_stream_id(envelope.stream_id)
            if envelope.type == "response.create":
                arrival = await self._arrival(data, hold)
                lanes.submit(stream_id, arrival, len(data))
                self._holds.add(hold)
                waits = True
            elif envelope.type == "response.steer":
                steer = decode_steer(data)
                tenant = self._scope["state"]["tenant"]
                ended = self._services.responses.has_ended(tenant, steer.previous_response_id)
                waits = await self._steering.receive(steer, hold, ended)
            elif envelope.type != "response.processed":
                raise invalid("type", f"Unknown message type {envelope.type!r}: {_EXPECTED}.")
        except ApiError as error:
            await self._put(ws_error(error, stream_id))
        finally:
            if not waits:
                hold.release()

    async def _arrival(self, data: bytes, hold: Hold) -> _Arrival:
        """What is wrong with a request is said on its lane, when its turn comes."""
        time_ns = time.monotonic_ns()
        services = self._services

        def decode(body: bytes) -> CreateRequest:
            return decode_create(body, services.card)

        try:
            request = await decode_body(data, decode, services.settings.limits)
            if request.body.background:
                raise wire.unsupported_value("background")
            return _Arrival(request, time_ns, time.monotonic_ns(), hold)
        except ApiError as error:
            return _Arrival(error, time_ns, time.monotonic_ns(), hold)

    async def _serve(self, stream_id: str | None, arrival: _Arrival) -> None:
        """One turn of a lane, and the end of what it held."""
        await self._take_turn(stream_id, arrival)
        self._holds.remove(arrival.hold)
        arrival.hold.release()

    async def _take_turn(self, stream_id: str | None, arrival: _Arrival) -> None:
        """A response to its terminal frame, or one error frame."""
        TRACE_ID.set(self._trace_id)  # a lane's turns share a task
        try:
            if self._closing:
                raise self._refusal()
            if isinstance(arrival.request, ApiError):
                self._record_refused(arrival, arrival.request)
                refusal = arrival.request  # of this dialect: it names the field as it was sent
            else:
                await self._respond(stream_id, arrival.request, arrival)
                return
        except SocketClosed:
            return
        except ApiError as error:
            refusal = in_this_dialect(error)
        except Exception:
            log.exception("a turn failed")
            refusal = ApiError(500, OUR_FAULT, type="server_error")
        with suppress(SocketClosed):
            await self._put(ws_error(refusal, stream_id))

    async def _respond(
        self, stream_id: str | None, request: CreateRequest, arrival: _Arrival
    ) -> None:
        """Raises ApiError for what is refused before `response.created` was sent."""
        former = request.body.previous_response_id
        steers = self._steering.waiting(former)
        request = prepended(steers, request)
        times = (arrival.time_ns, arrival.received_ns)
        ended = await self._run_turn(stream_id, request, times, steers)
        while await self._steering.settle(ended):
            request = successor(ended, request)
            try:
                if self._closing:
                    raise self._refusal()
                now = time.monotonic_ns()
                following = await self._run_turn(stream_id, request, (now, now), ended.steers)
            except ApiError:
                await self._steering.give_back(ended, "successor_creation_failed")
                return
            ended = following

    async def _run_turn(
        self,
        stream_id: str | None,
        request: CreateRequest,
        times: tuple[int, int],
        steers: list[Steer],
    ) -> RunningTurn:
        """One response that reads the input of `steers`, to its terminal frame. It arrived and was
        received at `times`. Raises as `_respond` does."""
        state = self._scope["state"]
        origin = Origin(
            request_id=state["request_id"],
            tenant=state["tenant"],
            headers=Headers(scope=self._scope),
            arrived_ns=times[0],
            received_ns=times[1],
            streamed=True,
            trace_number=new_trace_number(),
        )
        responses = self._services.responses
        async with responses.run(request, origin, on_socket=True, stream_id=stream_id) as turn:
            running = RunningTurn(turn, stream_id)
            self._steering.running.add(running)

            async def tell(event: Event) -> None:
                if isinstance(event, Admitted):
                    self._steering.commit(steers, request.body.previous_response_id)
                await self._tell(running, event)

            try:
                await running.read(tell)
                if running.steered:
                    await self._tell(running, await running.stop())
            finally:
                self._steering.running.remove(running)
        return running

    async def _tell(self, running: RunningTurn, entry: Entry) -> None:
        async with running.lock:
            running.quiet = False
            for frame in running.turn.take(entry):
                await self._put(frame)

    def _record_refused(self, arrival: _Arrival, error: ApiError) -> None:
        record = begin_record(
            self._scope,
            operation="chat",
            model="",
            start_ns=arrival.time_ns,
            stream=True,
        )
        record.trace_number = new_trace_number()
        TRACE_ID.set(record.trace_id)
        finish_refused(self._services.records, record, error)

    def _refusal(self) -> ApiError:
        return draining("connect and ask again") if self.draining.is_set() else _too_old()

    async def _close_in_time(self, lanes: Lanes[_Arrival]) -> None:
        """Close when the connection is too old or the server drains, after the running turns."""
        with anyio.move_on_after(self._limits.max_age_s):
            await self.draining.wait()
        self._closing = True
        await lanes.wait_idle()
        code = SERVICE_RESTART
        with suppress(SocketClosed, OSError):
            if not self.draining.is_set():
                code = GOING_AWAY
                await self._put(ws_error(_too_old()))
            self._closed = True
            await self._send({"type": "websocket.close", "code": code})

    async def _keep_talking(self) -> None:
        """A sign of life for every response that was silent for a while."""
        while True:
            await anyio.sleep(self._limits.max_silence_s / 2)
            for running in list(self._steering.running):
                turn = running.turn
                if running.quiet and turn.encoder.started and not running.lock.locked():
                    with suppress(SocketClosed):
                        async with running.lock:
                            for frame in turn.progress():
                                await self._put(frame)
                running.quiet = True


def _too_old() -> ApiError:
    return ApiError(
        400,
        "The connection has reached its age limit; open a new one.",
        code="websocket_connection_limit_reached",
    )
