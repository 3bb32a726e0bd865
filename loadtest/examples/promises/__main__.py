"""`python -m loadtest.examples.promises [beside] [short] [overload] [--quick] [--write DIR]`.

Starts servers of the embedded model with the options that each part needs, on a machine that does
nothing else (two cores suffice; the client runs on them too), and prints every figure beside what
is promised. All parts take about nine minutes; `--quick` takes less of each and proves little.
Exit code 1 if a promise was missed. Linux only, for the memory.
"""

import argparse
import asyncio
import time
from pathlib import Path

from loadtest.examples.promises import beside, overload, short
from loadtest.examples.promises.figures import Sheet
from loadtest.slices import take_short_slices

PARTS = ("beside", "short", "overload")


def main() -> int:
    """The exit code."""
    parser = argparse.ArgumentParser(prog="promises", description="Measures promises under load.")
    parser.add_argument("parts", nargs="*", metavar="PART", help=f"of {', '.join(PARTS)}; all")
    parser.add_argument("--quick", action="store_true", help="less of each")
    parser.add_argument("--write", type=Path, help="a folder for beside.json and beside.svg")
    given = parser.parse_args()
    if unknown := set(given.parts) - set(PARTS):
        parser.error(f"there is no part {unknown.pop()!r}")
    sheet = Sheet()
    for part in given.parts or PARTS:
        begin_s = time.monotonic()
        sheet.say(f"== {part}")
        asyncio.run(_measure(part, sheet, given.quick, given.write))
        sheet.say(f"   ({time.monotonic() - begin_s:.0f} s)\n")
    if sheet.missed:
        sheet.say("missed: " + "; ".join(sheet.missed))
    return 1 if sheet.missed else 0


async def _measure(part: str, sheet: Sheet, quick: bool, folder: Path | None) -> None:
    if part == "beside":
        few = beside.Plan(3000, times=1, targets=())
        await beside.measure(few if quick else beside.Plan(), sheet, folder)
    elif part == "short":
        await short.measure(short.Plan(10, 8.0) if quick else short.Plan(), sheet)
    else:
        few_s = overload.Plan(full_s=2.0, flood_s=6.0, returns=2)
        await overload.measure(few_s if quick else overload.Plan(), sheet)


if __name__ == "__main__":
    take_short_slices()
    raise SystemExit(main())
