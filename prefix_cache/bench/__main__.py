"""`python -m prefix_cache.bench`: hit-rate, lookup, overhead, memory. Prints, asserts nothing."""

import argparse
from pathlib import Path

from prefix_cache.bench import hit_rate, lookup, memory, overhead
from prefix_cache.bench.traces import agents, read_trace

BUDGETS = (0.05, 0.1, 0.2, 0.5)


def main() -> int:
    """The exit code."""
    parser = argparse.ArgumentParser(prog="python -m prefix_cache.bench", description=__doc__)
    commands = parser.add_subparsers(dest="command", required=True)
    hits = commands.add_parser("hit-rate", help="tokens found at several cache sizes")
    hits.add_argument(
        "trace", type=Path, nargs="*", help="Mooncake traces; without one, made-up agents"
    )
    look = commands.add_parser("lookup", help="time to match and insert a long prompt")
    look.add_argument("--rounds", type=int, default=300)
    commands.add_parser("overhead", help="CPU time of a request that finds nothing")
    commands.add_parser("memory", help="pages of many branches, and bytes per token")
    given = parser.parse_args()
    if given.command == "hit-rate":
        for workload in [read_trace(path) for path in given.trace] or [agents()]:
            print(hit_rate.table(workload, hit_rate.compare(workload, BUDGETS)))
    elif given.command == "lookup":
        print(lookup.report(lookup.measure(given.rounds)))
    elif given.command == "overhead":
        rows = [overhead.measure(*sizes) for sizes in ((512, 64), (4000, 200))]
        print(overhead.report(rows))
    else:
        print(memory.report())
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
