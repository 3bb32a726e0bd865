"""`--assert "itl_p99_ms<60"`: what must hold for the exit code to be 0."""

import operator
import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from loadtest.measure.pooled import Pooled
from loadtest.measure.result import Verdict

COMPARISONS = {
    "<=": operator.le,
    ">=": operator.ge,
    "==": operator.eq,
    "<": operator.lt,
    ">": operator.gt,
}
FORM = re.compile(
    r"\s*(?:(?P<target>[^\s:<>=]+)\s*:)?\s*(?P<figure>[a-z][a-z0-9_]*)\s*"
    r"(?P<sign><=|>=|==|<|>)\s*(?P<limit>[0-9.]+(?:[eE][-+]?\d+)?)\s*"
)


@dataclass(frozen=True, slots=True)
class Assertion:
    """`figure` compared with `limit`, for every target or for one, at every level."""

    expression: str
    target: str | None
    figure: str
    sign: str
    limit: float


def parse(expression: str) -> Assertion:
    """`[target:]figure<limit`, with one of < <= > >= ==. Raises ValueError."""
    form = FORM.fullmatch(expression)
    if form is None:
        raise ValueError(f"not an assertion: {expression!r}; one is like itl_p99_ms<60")
    return Assertion(expression, form["target"], form["figure"], form["sign"], float(form["limit"]))


def judge(assertions: Sequence[Assertion], measured: Iterable[Pooled]) -> list[Verdict]:
    """A verdict for each assertion, target and level. A figure without data does not hold."""
    verdicts = []
    for pooled in measured:
        for one in assertions:
            if one.target in (None, pooled.target):
                value = pooled.figures.get(one.figure)
                holds = value is not None and bool(COMPARISONS[one.sign](value, one.limit))
                verdicts.append(Verdict(one.expression, pooled.target, pooled.level, value, holds))
    return verdicts
