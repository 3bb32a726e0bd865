"""The page, the files and the README's table."""

import re
from pathlib import Path
from xml.etree import ElementTree

import msgspec
import pytest

from loadtest.assertions import judge, parse
from loadtest.compare import ratios
from loadtest.measure.histogram import Histogram
from loadtest.measure.pooled import pool
from loadtest.measure.result import Level, Ratio, Report
from loadtest.measure.sample import Kind
from loadtest.report.files import ReportError, read_json, write_json
from loadtest.report.html import page
from loadtest.report.picture import picture
from loadtest.report.readme import BEGIN, END, readme_section, rewrite
from loadtest.report.standing import figure_text
from loadtest.report.svg import linear_axis, log_axis, milliseconds
from loadtest.report.table import goodput_counts, ratio_text
from loadtest.workloads import read_workload
from loadtest.workloads.spec import Slo
from tests.loadtest.samples import report_of, run_of, sample


def full_report() -> Report:
    runs = []
    for concurrency in (1, 4):
        for repeat in range(2):
            for name, first_s in (("ours <b>", 10.1), ("peer", 10.2)):
                samples = [
                    sample(turn, times_s=(first_s + turn, first_s + turn + 0.02 + repeat / 1e3))
                    for turn in range(3)
                ]
                runs.append(run_of(samples, name, repeat, level=Level("concurrency", concurrency)))
    report = report_of(runs)
    return Report(
        **{name: getattr(report, name) for name in report.__struct_fields__}
        | {"ratios": ratios(runs), "verdicts": judge([parse("itl_p50_ms<1")], pool(runs))}
    )


@pytest.mark.parametrize(
    ("slo", "words"),
    [
        (Slo(), "every answered request: no limit is given"),
        (Slo(ttft_ms=500, tpot_ms=50), "requests that kept ttft_ms 500, tpot_ms 50"),
    ],
)
def test_a_report_says_what_goodput_counts(slo: Slo, words: str) -> None:
    assert goodput_counts(slo) == words
    report = full_report()
    fields = {name: getattr(report, name) for name in report.__struct_fields__}
    assert f"<dd>{words}.</dd>" in page(Report(**fields | {"slo": slo}))


def test_the_page_stands_alone() -> None:
    text = page(full_report())
    assert "<script" not in text
    assert not re.search(r"""(src|href)=|url\(|@import""", text)
    assert "prefers-color-scheme: dark" in text


def test_the_page_shows_each_plot_and_escapes_names() -> None:
    text = page(full_report())
    for title in (
        "First token against load",
        "Output tokens per second against load",
        "Between tokens",
        "First token by turn",
        "Prompt tokens from cache",
        "every token of",
    ):
        assert title in text
    assert "<b>:" not in text and "ours <b>" not in text
    assert "A &lt;fast&gt; CPU" in text
    assert "Does not hold: itl_p50_ms&lt;1" in text


@pytest.mark.parametrize(
    "report",
    [
        report_of([], interrupted=True),
        report_of([run_of([])]),
        report_of([run_of([sample(times_s=(), error=Kind.CONNECT)])]),
        report_of([run_of([sample(times_s=(10.5,))])], interrupted=True),
    ],
    ids=["no runs", "no samples", "only errors", "one piece"],
)
def test_a_partial_report_is_a_page_and_a_table(report: Report, tmp_path: Path) -> None:
    write_json(report, tmp_path / "r.json")
    assert read_json(tmp_path / "r.json") == report
    assert page(report).endswith("</html>\n")
    assert "| load" in readme_section([report])


def test_a_report_survives_its_file(tmp_path: Path) -> None:
    report = full_report()
    write_json(report, tmp_path / "deep" / "r.json")
    assert page(read_json(tmp_path / "deep" / "r.json")) == page(report)
    assert [path.name for path in (tmp_path / "deep").iterdir()] == ["r.json"]


@pytest.mark.parametrize(
    ("low", "high", "text"),
    [
        (None, None, "0.52"),
        (0.49, 0.55, "0.52 (0.49-0.55)"),
        (1e-6, 1e20, "0.52 (unsure)"),
    ],
)
def test_a_ratio_says_how_sure_it_is(low: float | None, high: float | None, text: str) -> None:
    ratio = Ratio(Level("concurrency", 1), "itl_p50_ms", "theirs", "ours", 3, 0.52, low, high)
    assert ratio_text(ratio) == text


@pytest.mark.parametrize("text", ["", "{}", "[1]", '{"format":'])
def test_what_is_no_report_is_refused(text: str, tmp_path: Path) -> None:
    (tmp_path / "r.json").write_text(text)
    with pytest.raises(ReportError, match="is not a report"):
        read_json(tmp_path / "r.json")


def test_the_readme_is_rewritten_between_its_markers(tmp_path: Path) -> None:
    path = tmp_path / "README.md"
    path.write_text(f"# Title\n{BEGIN}\nold\n{END}\nrest\n")
    section = readme_section([full_report()])
    for _ in range(2):
        rewrite(path, section)
        assert path.read_text() == f"# Title\n{BEGIN}\n{section}\n{END}\nrest\n"
    assert "2 cores, 24 GiB" in section
    assert "| 4 at once | peer" in section
    assert "ours <b> / peer" in section


@pytest.mark.parametrize("text", ["", BEGIN, f"{END}\n{BEGIN}", f"{BEGIN}{BEGIN}{END}"])
def test_a_readme_without_its_markers_is_left_alone(text: str, tmp_path: Path) -> None:
    path = tmp_path / "README.md"
    path.write_text(text)
    with pytest.raises(ValueError, match="needs one"):
        rewrite(path, "new")
    assert path.read_text() == text


@pytest.mark.parametrize(
    "values", [[5.0], [0.02, 900.0], [19.0, 21.0], [1e-3, 1e7], [100.0, 100.0]]
)
def test_log_axes_hold_their_values_between_ticks(values: list[float]) -> None:
    axis = log_axis(values, milliseconds)
    assert axis.low <= min(values) <= max(values) <= axis.high
    assert len(axis.ticks) >= 2
    places = [axis.place(value) for value, _ in axis.ticks]
    assert places == sorted(set(places))


@pytest.mark.parametrize("high", [1e-6, 0.3, 1.0, 7.2, 333.0, 1e6])
def test_linear_axes_have_few_round_ticks(high: float) -> None:
    axis = linear_axis(0, high, "{:g}".format)
    assert axis.high >= high * 0.999
    assert 2 <= len(axis.ticks) <= 7


def test_the_picture_is_a_file_of_its_own_for_light_and_dark() -> None:
    run = run_of([sample(0)], "ours <b>")
    gaps = Histogram()
    for ms in (10, 20, 40):
        gaps.record(ms / 1e3)
    figures = run.figures | {f"itl_beside_{p}_ms": 20.0 for p in ("p50", "p95", "max")}
    own = msgspec.structs.replace(
        run,
        figures=figures | {"prefill_share": 0.5},
        histograms=run.histograms | {"itl_beside": gaps.encode()},
    )
    text = picture([report_of([own])])
    root = ElementTree.fromstring(text)
    assert root.tag.endswith("svg")
    assert "prefers-color-scheme:dark" in text
    assert "prefill at 50 % of its lone speed" in text.replace("50%", "50 %")
    assert "ours &lt;b&gt;" in text
    with pytest.raises(ValueError, match="beside"):
        picture([report_of([run_of([])])])


def decode_report(speeds: dict[str, tuple[float, float]]) -> Report:
    """Of targets that decode so many tokens per second at one stream and at four."""
    runs = [
        msgspec.structs.replace(
            run_of([sample()], name, level=Level("concurrency", level)),
            figures={"decode_tok_per_s": speed},
        )
        for name, pair in speeds.items()
        for level, speed in zip((1, 4), pair, strict=True)
    ]
    workload = msgspec.structs.replace(read_workload("decode"), shows=("decode_tok_per_s",))
    return msgspec.structs.replace(
        report_of(runs), workload_name="decode", workload=workload, ratios=ratios(runs)
    )


def test_several_reports_are_one_table_with_the_best_peer_bold() -> None:
    slow = decode_report({"ours": (200, 400), "slow": (50, 90)})
    fast = decode_report({"ours": (220, 400), "fast": (100, 80)})
    memory = msgspec.structs.replace(
        report_of(
            [msgspec.structs.replace(run_of([]), target="slow", figures={"pss_peak_mib": 1234.0})]
        ),
        workload_name="agents-deep",
        workload=read_workload("agents-deep"),
    )
    rows = {
        tuple(cells[:2]): cells[2:]
        for line in readme_section([slow, fast, memory]).splitlines()
        if len(cells := [cell.strip() for cell in line.strip("|").split("|")]) == 6
    }
    assert rows["load", "figure"] == ["ours", "slow", "fast", "ours / best peer"]
    assert rows["decode, 1 at once", "decode tok/s"] == ["210", "50", "**100**", "2.20"]
    assert rows["decode, 4 at once", "decode tok/s"] == ["400", "**90**", "80", "4.44"]
    assert rows["agents-deep, 4 at once", "memory"] == ["-", "**1,234 MiB**", "-", "-"]


@pytest.mark.parametrize(
    ("figure", "value", "text"),
    [
        ("decode_tok_per_s", 1234.4, "1,234"),
        ("itl_p99_ms", 12.4, "12 ms"),
        ("wall_s", 3.44, "3.4 s"),
        ("pss_peak_mib", 700.2, "700 MiB"),
        ("errors", 2.0, "2"),
    ],
)
def test_a_figure_has_the_unit_of_its_name(figure: str, value: float, text: str) -> None:
    assert figure_text(figure, value) == text


def test_the_picture_of_throughput_tells_shares_of_the_limit() -> None:
    reports = [
        decode_report({"ours": (200, 400), "slow <b>": (50, 90)}),
        decode_report({"ours": (200, 400), "fast": (100, 80)}),
    ]
    text = picture(reports, {1: 250, 4: 1000})
    assert ElementTree.fromstring(text).tag.endswith("svg")
    assert "ours: 200 tok/s (80% of the limit) at 1, 400 (40%) at 4" in text
    assert "slow &lt;b&gt;: 50 tok/s (20%" in text
    assert "fast: 100 tok/s" in text
    assert "at 1, 400 at 4" in picture(reports)
