"""The outbox: bounds, order, and what happens at its end."""

import anyio
import pytest

from service.transport.outbox import Outbox, OutboxClosed

pytestmark = pytest.mark.anyio


@pytest.fixture
def anyio_backend() -> str:
    return "asyncio"


async def test_frames_come_out_together_and_in_order() -> None:
    outbox: Outbox[bytes] = Outbox(8, 100)
    for frame in (b"a", b"b", b"c"):
        await outbox.put(frame)
    assert await outbox.take() == [b"a", b"b", b"c"]


@pytest.mark.parametrize(("max_frames", "max_bytes"), [(2, 100), (100, 2)])
async def test_a_full_outbox_makes_writers_wait_until_its_frames_are_written(
    max_frames: int, max_bytes: int
) -> None:
    outbox: Outbox[bytes] = Outbox(max_frames, max_bytes)
    taken: list[list[bytes]] = []

    async def write() -> None:
        for number in range(6):
            await outbox.put(b"%d" % number)
        outbox.close()

    async with anyio.create_task_group() as tasks:
        tasks.start_soon(write)
        while frames := await outbox.take():
            taken.append(frames)
            await anyio.wait_all_tasks_blocked()  # what was taken still counts: no room yet
    assert [frame for frames in taken for frame in frames] == [b"%d" % n for n in range(6)]
    assert max(map(len, taken)) == 2


async def test_a_frame_over_the_byte_bound_goes_in_alone() -> None:
    outbox: Outbox[str] = Outbox(8, 3)
    await outbox.put("enormous")
    with anyio.move_on_after(0) as waiting:
        await outbox.put("x")
    assert waiting.cancelled_caught
    assert await outbox.take() == ["enormous"]


async def test_closing_wakes_writers_and_readers_and_keeps_what_is_inside() -> None:
    outbox: Outbox[bytes] = Outbox(1, 100)
    await outbox.put(b"last")

    async def refused() -> None:
        with pytest.raises(OutboxClosed):
            await outbox.put(b"late")

    async with anyio.create_task_group() as tasks:
        tasks.start_soon(refused)
        await anyio.wait_all_tasks_blocked()
        outbox.close()
    assert await outbox.take() == [b"last"]
    assert await outbox.take() == []


async def test_a_cancelled_take_takes_nothing() -> None:
    outbox: Outbox[bytes] = Outbox(8, 100)
    with anyio.move_on_after(0):
        await outbox.take()
    await outbox.put(b"kept")
    assert await outbox.take() == [b"kept"]
