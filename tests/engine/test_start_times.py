"""What the log says of a start."""

import re

from engine.start_times import StartTimes


def test_parts_are_told_in_order_and_sum_to_the_whole() -> None:
    times = StartTimes()
    times.mark("file")
    times.rest()
    times.mark("backend")
    said = re.fullmatch(
        r"(\d+\.\d\d) s: process and imports (\d+\.\d\d), file \d+\.\d\d, backend \d+\.\d\d",
        str(times),
    )
    assert said is not None
    assert 0 < float(said[2]) <= float(said[1])
