"""Stop strings in a stream of bytes."""

from collections import deque

Transitions = dict[int, int]


class StopMatcher:
    """Finds the first stop in a stream, however it is cut into pieces, and never leaks any of it.

    The match that ends first wins; of those that end at the same byte, the longest. Bytes are held
    back only while they are a proper prefix of some stop, so never more than the longest such
    suffix. An automaton over all stops (Aho and Corasick, 1975) takes one step per byte.
    """

    __slots__ = ("_depth", "_fail", "_found", "_goto", "_held", "_matched", "_state")

    def __init__(self, stops: tuple[bytes, ...]) -> None:
        """Raises ValueError for an empty stop."""
        if not all(stops):
            raise ValueError("a stop string is empty")
        self._goto: list[Transitions] = [{}]
        self._depth = [0]
        self._found: list[bytes | None] = [None]
        for stop in stops:
            self._insert(stop)
        self._fail = [0] * len(self._goto)
        self._link()
        self._state = 0
        self._held = b""
        self._matched: bytes | None = None

    @property
    def matched(self) -> bytes | None:
        """The stop that was found, if any."""
        return self._matched

    def feed(self, data: bytes) -> tuple[bytes, bytes | None]:
        """Take the next piece: the bytes that may be released now, and the stop if one is found.

        Of the piece with the match only what stands before the stop is released; the rest is
        dropped, as is everything fed later.
        """
        if self._matched is not None:
            return b"", self._matched
        goto, fail, found = self._goto, self._fail, self._found
        state = self._state
        buffer = self._held + data
        for position, byte in enumerate(data, start=len(self._held) + 1):
            while state and byte not in goto[state]:
                state = fail[state]
            state = goto[state].get(byte, 0)
            stop = found[state]
            if stop is not None:
                self._matched = stop
                self._held = b""
                return buffer[: position - len(stop)], stop
        self._state = state
        end = len(buffer) - self._depth[state]
        self._held = buffer[end:]
        return buffer[:end], None

    def flush(self) -> bytes:
        """The stream has ended: what was held back, which is no stop any more."""
        held, self._held, self._state = self._held, b"", 0
        return held

    def _insert(self, stop: bytes) -> None:
        state = 0
        for byte in stop:
            following = self._goto[state].get(byte)
            if following is None:
                following = len(self._goto)
                self._goto[state][byte] = following
                self._goto.append({})
                self._depth.append(self._depth[state] + 1)
                self._found.append(None)
            state = following
        self._found[state] = stop

    def _link(self) -> None:
        """Failure links breadth first; a state without a stop of its own takes its link's."""
        waiting = deque(self._goto[0].values())
        while waiting:
            state = waiting.popleft()
            for byte, child in self._goto[state].items():
                fallback = self._fail[state]
                while fallback and byte not in self._goto[fallback]:
                    fallback = self._fail[fallback]
                target = self._goto[fallback].get(byte, 0)
                self._fail[child] = target
                if self._found[child] is None:
                    self._found[child] = self._found[target]
                waiting.append(child)
