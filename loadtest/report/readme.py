"""The performance table of a README, made from a report."""

from collections.abc import Sequence
from pathlib import Path

from loadtest.measure.pooled import pool
from loadtest.measure.result import Machine, Report
from loadtest.report.standing import standing_table
from loadtest.report.table import cell, markdown, ratios_table

BEGIN = "<!-- loadtest:begin -->"
END = "<!-- loadtest:end -->"
COLUMNS = (
    ("first token, turn 1", "ttft_first_p50_ms", "{:.0f} ms"),
    ("first token, later turns", "ttft_later_p50_ms", "{:.0f} ms"),
    ("between tokens p50", "itl_p50_ms", "{:.1f} ms"),
    ("p99", "itl_p99_ms", "{:.0f} ms"),
    ("output tok/s", "output_tok_per_s", "{:.0f}"),
    ("prompt from cache", "cached_share", "{:.0%}"),
)
RATIOS = ("ttft_first_p50_ms", "itl_p99_ms", "output_tok_per_s")


def readme_section(reports: Sequence[Report]) -> str:
    """Workload and machine in a sentence, the table, and the ratios to each peer; of several
    reports the machine and one table of them all (`standing_table`)."""
    if len(reports) > 1:
        notes = dict.fromkeys(report.note for report in reports if report.note)
        machine = machine_text(reports[0].machine)
        return "\n".join([" ".join([f"{machine}.", *notes]), "", standing_table(reports)])
    (report,) = reports
    measured = pool(report.runs)
    rows = [
        [str(one.level), one.target, *(cell(one, name, form) for _, name, form in COLUMNS)]
        for one in measured
    ]
    repeats = max((len(one.runs) for one in measured), default=0)
    lines = [
        f"{report.workload.description}. {machine_text(report.machine)}; "
        f"medians of {repeats} repeats in alternation."
        + (f" {report.note}" if report.note else ""),
        "",
        markdown(["load", "server", *(title for title, _, _ in COLUMNS)], rows, num_left=2),
    ]
    if ratios := ratios_table([ratio for ratio in report.ratios if ratio.figure in RATIOS]):
        lines += ["", "Ratios of paired repeats, with 95 % intervals:", "", ratios]
    return "\n".join(lines)


def machine_text(machine: Machine) -> str:
    """`AMD EPYC (...), 2 cores, 24 GiB`."""
    return f"{machine.cpu}, {machine.cores} cores, {machine.memory_gib:.0f} GiB"


def rewrite(path: Path, section: str) -> None:
    """Put `section` between the two markers of the file at `path`. Raises ValueError where they
    are not, each once and in order."""
    text = path.read_text(encoding="utf-8")
    if text.count(BEGIN) != 1 or text.count(END) != 1 or text.index(BEGIN) > text.index(END):
        raise ValueError(f"{path} needs one {BEGIN} and after it one {END}")
    before, rest = text.split(BEGIN)
    _, after = rest.split(END)
    path.write_text(f"{before}{BEGIN}\n{section}\n{END}{after}", encoding="utf-8")
