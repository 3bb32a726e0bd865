"""The open connections of one server, and the one rule for clients that do not read."""

import array
import asyncio
import fcntl
import termios
from collections.abc import Iterator
from typing import Any

from service.config import Limits

CHECKS_PER_STALL = 4


class WatchedTransport(asyncio.Transport):
    """A transport that is aborted once its client has taken no byte for `write_stall_s` while
    bytes wait for it here, whatever protocol writes them and also after `close`.

    What the client's machine has acknowledged counts as taken: the kernel asks for more only when
    a third of its buffer is free, which takes a slow reader longer than that.
    """

    def __init__(
        self, transport: asyncio.Transport, loop: asyncio.AbstractEventLoop, limits: Limits
    ) -> None:
        super().__init__()
        transport.set_write_buffer_limits(high=limits.write_buffer_bytes)
        self._transport = transport
        self._loop = loop
        self._pause_s = limits.write_stall_s / CHECKS_PER_STALL
        self._num_written = 0
        self._num_taken = 0
        self._num_checks = 0
        self._check: asyncio.TimerHandle | None = None

    def write(self, data: bytes | bytearray | memoryview) -> None:
        """Write, and watch until all is taken."""
        self._num_written += len(data)
        self._transport.write(data)
        if self._check is None:
            self._num_checks = 0
            self._check = self._loop.call_later(self._pause_s, self._look)

    def _look(self) -> None:
        waiting = self._transport.get_write_buffer_size()
        if not waiting:
            self._check = None
            return
        taken = self._num_written - waiting - self._num_unacknowledged()
        self._num_checks = 0 if taken > self._num_taken else self._num_checks + 1
        self._num_taken = taken
        if self._num_checks >= CHECKS_PER_STALL:
            self._check = None
            self._transport.abort()
        else:
            self._check = self._loop.call_later(self._pause_s, self._look)

    def _num_unacknowledged(self) -> int:
        """Bytes that the kernel holds; over TLS a little more than was written for them."""
        sock = self._transport.get_extra_info("socket")
        if sock is None or sock.fileno() < 0:
            return 0
        queued = array.array("i", [0])
        fcntl.ioctl(sock.fileno(), termios.TIOCOUTQ, queued)
        return queued[0]

    def get_write_buffer_size(self) -> int:
        """Bytes that neither the client nor the kernel has taken."""
        return self._transport.get_write_buffer_size()

    def close(self) -> None:
        """Close when all is taken, or the client stalls."""
        self._transport.close()

    def abort(self) -> None:
        """Close now; what is unsent is lost."""
        self._transport.abort()

    def is_closing(self) -> bool:
        return self._transport.is_closing()

    def pause_reading(self) -> None:
        self._transport.pause_reading()

    def resume_reading(self) -> None:
        self._transport.resume_reading()

    def set_protocol(self, protocol: asyncio.BaseProtocol) -> None:
        self._transport.set_protocol(protocol)

    def get_extra_info(self, name: str, default: Any = None) -> Any:
        return self._transport.get_extra_info(name, default)


class Connections:
    """Every open connection, whatever it speaks; no more than `limits.connections`."""

    def __init__(self, limits: Limits) -> None:
        self._limits = limits
        self._open: set[WatchedTransport] = set()

    def __len__(self) -> int:
        return len(self._open)

    def __iter__(self) -> Iterator[WatchedTransport]:
        return iter(self._open)

    @property
    def full(self) -> bool:
        return len(self._open) >= self._limits.connections

    @property
    def num_unsent_bytes(self) -> int:
        """What waits until clients, or the kernel for them, take it."""
        return sum(transport.get_write_buffer_size() for transport in self._open)

    def add(
        self, transport: asyncio.Transport, loop: asyncio.AbstractEventLoop
    ) -> WatchedTransport:
        """A new connection; who adds it removes it when it is lost."""
        watched = WatchedTransport(transport, loop, self._limits)
        self._open.add(watched)
        return watched

    def remove(self, transport: WatchedTransport) -> None:
        self._open.discard(transport)

    def end(self) -> None:
        """Close every connection, those with unsent bytes without waiting for them."""
        for transport in self._open:
            if transport.get_write_buffer_size():
                transport.abort()
            else:
                transport.close()
