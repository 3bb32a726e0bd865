"""Responses over WebSocket: lanes on shared connections, and only what is new in each turn."""

import asyncio
import time
from dataclasses import dataclass, field
from typing import Any, Literal

import aiohttp

from loadtest.measure.sample import Kind, RequestError, Sample, of_status
from loadtest.transports import responses
from loadtest.transports.base import Dialogue, StallWatch, Target, open_http, told

LANES_AT_ONCE = 8
LANE_NAMES_PER_CONNECTION = 32
# A server that does not say goodbye must not hold up the report.
CLOSE_S = 1.0


@dataclass(slots=True, eq=False)
class Lane:
    """One conversation's stream on a connection; it has at most one request at a time."""

    name: str
    connection: "Connection"
    sample: Sample | None = None
    watch: StallWatch | None = None
    ended: "asyncio.Future[None] | None" = None


@dataclass(slots=True, eq=False)
class Connection:
    """A socket and its lanes. A name is never used twice: servers count them for life."""

    socket: "aiohttp.ClientWebSocketResponse[Literal[False]]"
    lanes: dict[str, Lane] = field(default_factory=dict)
    num_names: int = 0
    reader: "asyncio.Task[None] | None" = None

    @property
    def has_room(self) -> bool:
        """Another lane may begin here."""
        return (
            not self.socket.closed
            and len(self.lanes) < LANES_AT_ONCE
            and self.num_names < LANE_NAMES_PER_CONNECTION
        )

    def open_lane(self) -> Lane:
        """A new lane."""
        self.num_names += 1
        lane = Lane(f"lane-{self.num_names}", self)
        self.lanes[lane.name] = lane
        return lane

    async def read(self) -> None:
        """Give each frame to its lane until the socket closes; what still waits has failed."""
        async for frame in self.socket:
            now_s = time.perf_counter()
            if frame.type in (aiohttp.WSMsgType.TEXT, aiohttp.WSMsgType.BINARY):
                self._take(frame.data, now_s)
        self._fail(
            list(self.lanes.values()),
            RequestError(Kind.CUT, f"the socket closed with {self.socket.close_code}"),
        )

    def _take(self, data: bytes, now_s: float) -> None:
        try:
            event = responses.decode(data)
        except RequestError as error:
            self._fail(list(self.lanes.values()), error)
            return
        lanes = list(self.lanes.values())
        if event.stream_id is not None:
            lanes = [lane for lane in lanes if lane.name == event.stream_id]
        elif event.type != "error":
            return
        for lane in lanes:
            if lane.sample is None or lane.watch is None or lane.ended is None:
                continue
            lane.sample.bytes_down += len(data)
            num_pieces = len(lane.sample.pieces)
            try:
                if responses.take(event, lane.sample, now_s) and not lane.ended.done():
                    lane.ended.set_result(None)
                if len(lane.sample.pieces) > num_pieces:
                    lane.watch.alive()
            except RequestError as error:
                self._fail([lane], error)

    def _fail(self, lanes: list[Lane], error: RequestError) -> None:
        for lane in lanes:
            if lane.ended is not None and not lane.ended.done():
                lane.ended.set_exception(error)


class ResponsesWebSocket:
    """Each dialogue has a lane; up to eight share a connection. A turn sends the new text and the
    id of the response before; a fork begins on a lane of its own with its parent's id."""

    def __init__(self, target: Target) -> None:
        self._target = target
        self._http = open_http(target)
        self._connections: list[Connection] = []
        self._opening = asyncio.Lock()

    async def send(self, dialogue: Dialogue, sample: Sample) -> None:
        try:
            lane = await self._lane(dialogue)
            said = responses.fields(self._target, dialogue, sample)
            said |= {"type": "response.create", "stream_id": lane.name}
            said |= self._input(dialogue)
            frame = self._target.body(said)
            lane.sample = sample
            lane.ended = asyncio.get_running_loop().create_future()
            sample.begin(len(frame))
            async with StallWatch(self._target.stall_s) as lane.watch:
                await lane.connection.socket.send_frame(frame, aiohttp.WSMsgType.TEXT)
                await lane.ended
        except (aiohttp.ClientError, OSError) as error:
            raise told(error) from error
        finally:
            if not sample.finished:
                await self.leave(dialogue)

    def _input(self, dialogue: Dialogue) -> dict[str, Any]:
        if dialogue.response_id is None:
            return {"input": dialogue.messages()}
        new = {"role": "user", "content": dialogue.texts[-1]}
        return {"input": [new], "previous_response_id": dialogue.response_id}

    async def _lane(self, dialogue: Dialogue) -> Lane:
        if isinstance(dialogue.lane, Lane) and not dialogue.lane.connection.socket.closed:
            return dialogue.lane
        async with self._opening:
            connection = next((one for one in self._connections if one.has_room), None)
            if connection is None:
                connection = await self._connect()
        dialogue.lane = lane = connection.open_lane()
        return lane

    async def _connect(self) -> Connection:
        url = self._target.url.replace("http", "ws", 1) + responses.PATH
        try:
            socket = await self._http.ws_connect(
                url,
                compress=0,
                max_msg_size=0,
                decode_text=False,
                timeout=aiohttp.ClientWSTimeout(ws_close=CLOSE_S),
            )
        except aiohttp.WSServerHandshakeError as error:
            raise of_status(error.status, error.message) from error
        connection = Connection(socket)
        connection.reader = asyncio.create_task(connection.read())
        self._connections.append(connection)
        return connection

    async def leave(self, dialogue: Dialogue) -> None:
        if not isinstance(dialogue.lane, Lane):
            return
        lane, dialogue.lane = dialogue.lane, None
        lane.sample = lane.watch = None
        connection = lane.connection
        connection.lanes.pop(lane.name, None)
        if not connection.lanes and not connection.has_room:
            self._connections.remove(connection)
            await _end(connection)

    async def close(self) -> None:
        for connection in self._connections:
            await _end(connection)
        await self._http.close()


async def _end(connection: Connection) -> None:
    await connection.socket.close()
    if connection.reader is not None:
        await asyncio.wait([connection.reader])
