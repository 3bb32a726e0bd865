"""Lanes of a connection: what is refused takes none of them."""

import anyio
import pytest

from service.errors import ApiError
from service.transport.lanes import LaneLimits, Lanes

pytestmark = pytest.mark.anyio


async def test_a_turn_that_is_refused_takes_no_lane() -> None:
    """Two wait already: ten more lanes are refused, and all lanes are there afterwards."""
    release = anyio.Event()
    done: list[str | None] = []

    async def run(stream_id: str | None, turn: str) -> None:
        await release.wait()
        done.append(stream_id)

    async with anyio.create_task_group() as tasks:
        lanes: Lanes[str] = Lanes(
            tasks, run, LaneLimits(max_lanes=4, max_running=1, max_waiting=2, max_waiting_bytes=99)
        )
        lanes.submit("first", "runs", 1)
        await anyio.wait_all_tasks_blocked()
        lanes.submit("first", "waits", 1)
        lanes.submit("second", "waits too", 1)
        for number in range(10):
            with pytest.raises(ApiError) as refused:
                lanes.submit(f"refused-{number}", "too much", 1)
            assert refused.value.status == 429
        release.set()
        await lanes.wait_idle()
        lanes.submit("third", "goes on", 1)
        lanes.submit("fourth", "goes on", 1)
        with pytest.raises(ApiError) as limit:
            lanes.submit("fifth", "one too many", 1)
        assert limit.value.code == "websocket_stream_limit_reached"
    assert sorted(map(str, done)) == ["first", "first", "fourth", "second", "third"]
