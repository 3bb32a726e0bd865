"""The command line."""

import argparse
import json
from pathlib import Path

import msgspec

from loadtest import assertions, transports
from loadtest.measure.result import Level
from loadtest.workloads.spec import Slo

# Not OpenAI's own, but known to all self-hosted servers: answers then have the wanted length.
DEFAULT_EXTRA: dict[str, object] = {"ignore_eos": True}


def parse(arguments: list[str] | None = None) -> argparse.Namespace:
    """`command` is one of those declared here. Exits with 2 for bad input."""
    parser = argparse.ArgumentParser(
        prog="python -m loadtest",
        description="Load for any OpenAI-compatible server, agents first.",
    )
    commands = parser.add_subparsers(dest="command", required=True)
    run = commands.add_parser("run", help="load one server")
    run.add_argument(
        "--url",
        default="http://127.0.0.1:8000",
        help="the server's root, without /v1 (default: %(default)s)",
    )
    run.add_argument(
        "--name", default="server", help="what the report calls it (default: %(default)s)"
    )
    run.add_argument(
        "--pid",
        type=_positive,
        metavar="PID",
        help="the server's first process: watch the memory (PSS) of its whole tree; Linux only",
    )
    _load_options(run, repeats=1)
    compare = commands.add_parser("compare", help="load several servers in alternation")
    compare.add_argument(
        "--target",
        action="append",
        required=True,
        type=_target,
        metavar="NAME=URL",
        help="repeat; ratios are of the first over each other",
    )
    compare.set_defaults(pid=None)
    _load_options(compare, repeats=3)
    html = commands.add_parser("html", help="draw a report again from its JSON")
    html.add_argument("report", type=Path)
    html.add_argument("out", type=Path)
    picture = commands.add_parser(
        "picture",
        help="draw, as SVG for a README, the gaps of streams beside a long prompt, or tokens per "
        "second by number of streams",
    )
    picture.add_argument("reports", type=Path, nargs="+", metavar="REPORT")
    picture.add_argument("out", type=Path)
    picture.add_argument(
        "--limits",
        type=Path,
        metavar="FILE",
        help='the most that the machine allows, as JSON: {"1": TOKENS_PER_S, "2": ...}',
    )
    readme = commands.add_parser(
        "readme",
        help="print a report's table as Markdown; of several, where the first target of the "
        "first stands among all others",
    )
    readme.add_argument("reports", type=Path, nargs="+", metavar="REPORT")
    readme.add_argument("--picture", metavar="PATH", help="a picture to show below the table")
    readme.add_argument(
        "--write", type=Path, metavar="FILE", help="put it between the markers of this file"
    )
    commands.add_parser("workloads", help="list the workloads that come with the tool")
    return parser.parse_args(arguments)


def _load_options(parser: argparse.ArgumentParser, repeats: int) -> None:
    add = parser.add_argument
    add(
        "--workload",
        default="agents",
        help="a name (`workloads` lists them) or a .toml file (default: %(default)s)",
    )
    add("--trace", metavar="FILE", help="the recorded trace that a replay workload plays")
    add(
        "--transport",
        choices=transports.NAMES,
        default="chat-sse",
        help="how requests are sent: the API, and streamed (sse, ws) or not (default: %(default)s)",
    )
    levels = parser.add_mutually_exclusive_group()
    levels.add_argument(
        "--concurrency",
        type=_concurrency,
        nargs="+",
        dest="levels",
        metavar="N",
        help="so many at once, one run for each number, in place of what a workload says of its "
        "closed parts",
    )
    levels.add_argument(
        "--rate",
        type=_rate,
        nargs="+",
        dest="levels",
        metavar="PER_S",
        help="so many new sessions per second, one run for each number, in place of what a "
        "workload says of its poisson parts",
    )
    add(
        "--repeats",
        type=_positive,
        default=repeats,
        metavar="N",
        help="runs of each level, each with prefixes of its own (default: %(default)s)",
    )
    add("--seed", help="same seed, same requests; default: a new one, so that caches start cold")
    add("--warm", action="store_true", help="fill prefix caches before each measured run")
    add("--model", default="", help="default: the first that each server lists")
    add("--api-key", metavar="KEY", help="sent as a bearer token")
    add(
        "--extra",
        type=_extra,
        default=DEFAULT_EXTRA,
        metavar="JSON",
        help="merged into each request's body; a null takes a key away. Default asks for answers "
        "of full length: %(default)s",
    )
    add(
        "--chunk-timeout",
        type=float,
        default=120.0,
        metavar="SECONDS",
        help="a request without any text for so long counts as stalled (default: %(default)g)",
    )
    add("--slo", type=_slo, metavar="ttft_ms=500,tpot_ms=50", help="what goodput counts")
    add(
        "--assert",
        action="append",
        default=[],
        type=_assertion,
        dest="assertions",
        metavar="[TARGET:]FIGURE<LIMIT",
        help="exit with 1 unless this holds, like 'itl_p99_ms<60'; repeatable; loadtest/README.md "
        "lists the figures",
    )
    add("--note", default="", help="a sentence for the report, like the servers' threads")
    add("--json", type=Path, metavar="FILE", help="write the report here, to draw or compare later")
    add("--html", type=Path, metavar="FILE", help="write the report here as a page with its plots")


def _target(text: str) -> tuple[str, str]:
    name, equals, url = text.partition("=")
    if not (name and equals and url.startswith(("http://", "https://"))):
        raise argparse.ArgumentTypeError(f"{text!r} is not NAME=http://HOST:PORT")
    return name, url.rstrip("/")


def _concurrency(text: str) -> Level:
    return Level("concurrency", _positive(text))


def _rate(text: str) -> Level:
    if not 0 < (value := float(text)) < 1e6:
        raise argparse.ArgumentTypeError("above 0")
    return Level("rate_per_s", value)


def _positive(text: str) -> int:
    if (value := int(text)) < 1:
        raise argparse.ArgumentTypeError("at least 1")
    return value


def _extra(text: str) -> dict[str, object]:
    value = json.loads(text)
    if not isinstance(value, dict):
        raise argparse.ArgumentTypeError("a JSON object")
    return DEFAULT_EXTRA | value


def _slo(text: str) -> Slo:
    try:
        limits = {name: float(value) for name, value in (one.split("=") for one in text.split(","))}
        return msgspec.convert(limits, Slo)
    except (ValueError, msgspec.ValidationError) as error:
        raise argparse.ArgumentTypeError(f"{text!r}: {error}") from error


def _assertion(text: str) -> assertions.Assertion:
    try:
        return assertions.parse(text)
    except ValueError as error:
        raise argparse.ArgumentTypeError(str(error)) from error
