"""`mpiddp report RUN…` writes one page that a real Chromium shows, on a phone and on a wide screen.

Tests mpiddp/report/.
python -m pytest tests/integration/report/test_page.py
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from mpiddp import cli
from tests.support import chromium
from tests.support.chromium import Browser
from tests.support.errors import error
from tests.support.ranks import ROOT
from tests.support.run_folders import write_run

pytest.importorskip("bokeh", reason="mpiddp report needs it: pip install bokeh")

ILLEGAL = "RuntimeError: an illegal memory access was encountered"
HOSTILE = "</script><script>window.attacked = 1</script><b id=attack>"
# Of each chart, the steps of the vertical lines in it.
MARKS = """
    const charts = Bokeh.documents.flatMap(each => each.roots());
    return charts.map(chart => chart.renderers
        .filter(each => each.glyph.type === "VSpan")
        .map(each => Array.from(each.data_source.data.x ?? [each.glyph.x.value])));
"""
IS_IDLE = "return Bokeh.documents.length > 0 && Bokeh.documents.every(each => each.is_idle)"
LOOKS = """
    const charts = [...document.querySelectorAll(".chart")].map(each => each.getBoundingClientRect());
    return {
        charts: charts.filter(each => each.width > 250 && each.height > 200).length,
        right: Math.max(...charts.map(each => each.right), document.documentElement.scrollWidth),
        page: getComputedStyle(document.body).backgroundColor,
        filter: getComputedStyle(document.querySelector(".chart")).filter,
        columns: new Set(charts.map(each => Math.round(each.left))).size,
    };
"""


@pytest.fixture(scope="module")
def browser() -> Iterator[Browser]:
    with chromium.up_or_skip() as standing:
        yield standing


@pytest.fixture(scope="module")
def compared(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The page about a run with two restarts and about one that failed, whose files are hostile."""
    folder = tmp_path_factory.mktemp("report")
    a = write_run(
        folder / "a",
        steps=1000,
        every=10,
        restarts_at=[300, 600],
        saves=[300, 600, 900],
        num_ranks=8,
        ranks_per_host=4,
        failures={3: ILLEGAL},
    )
    b = write_run(
        folder / "<i>b",
        saves=[50],
        num_ranks=8,
        config={"lr": 0.2, HOSTILE: HOSTILE},
        failures={5: HOSTILE},
        ends=False,
    )
    with (b / "metrics.jsonl").open("a") as file:
        file.write('{"step": 101, "' + HOSTILE + '": 1}\n{"step": 10')
    assert report(folder / "page.html", a, b) == 0
    return folder / "page.html"


def report(out: Path, *runs: Path) -> int:
    return cli.main(["report", *map(str, runs), "-o", str(out)])


def errors_of(browser: Browser) -> list[str]:
    return [line for line in browser.console() if not line.startswith("INFO")]


@pytest.mark.parametrize(("width", "columns"), [(390, 1), (1280, 2)])
@pytest.mark.parametrize(
    ("dark", "page", "inverted"),
    [(False, "rgb(255, 255, 255)", False), (True, "rgb(20, 22, 26)", True)],
)
def test_the_page_fits_phones_and_wide_screens_light_and_dark(
    browser: Browser,
    compared: Path,
    width: int,
    columns: int,
    dark: bool,
    page: str,
    inverted: bool,
) -> None:
    browser.open(compared, width=width, dark=dark)
    browser.run_until(IS_IDLE)
    looks = browser.run(LOOKS)
    # Six curves, the hostile one among them.
    assert (looks["charts"], looks["columns"], looks["page"]) == (6, columns, page)
    assert looks["right"] <= width
    assert ("invert" in looks["filter"]) == inverted
    assert errors_of(browser) == []


def test_saves_and_restarts_are_marked_in_every_curve(browser: Browser, compared: Path) -> None:
    browser.open(compared, width=1280)
    browser.run_until(IS_IDLE)
    marks: list[Any] = browser.run(MARKS)
    both = [[300, 600, 900], [300, 600], [50]]  # A's saves and restarts, B's save
    assert sorted(marks) == [[[50]], *[both] * 5]


def test_no_text_of_a_run_is_markup(browser: Browser, compared: Path) -> None:
    browser.open(compared, width=1280)
    browser.run_until(IS_IDLE)
    assert browser.run(
        "return [window.attacked ?? 0, document.querySelectorAll('i b').length]"
    ) == [0, 0]
    assert browser.run("return document.getElementById('attack')") is None
    assert "<i>b" in browser.run("return document.title")
    assert HOSTILE in browser.run("return document.body.textContent")


def test_the_page_tells_failures_lost_time_and_what_differs(
    browser: Browser, compared: Path
) -> None:
    browser.open(compared, width=1280)
    browser.run_until(IS_IDLE)
    sections = browser.run(
        "return Object.fromEntries([...document.querySelectorAll('section')]"
        ".map(each => [each.querySelector('h2').innerText, each.innerText.replace(/\\s+/g, ' ')]))"
    )
    assert "A: rank 3 on gpu000, 2023-11-1" in sections["Failures"]
    assert ILLEGAL in sections["Failures"]
    assert "300 10 s 55 min RuntimeError: an illegal" in sections["Time lost"]
    assert "8 on 2 hosts (gpu000 4, gpu001 4)" in sections["What ran"]
    assert "2 settings that differ" in sections["Settings"]
    assert "1 line without a record." in sections["What could not be read"]


def test_runs_of_an_earlier_version_have_a_page(browser: Browser, tmp_path: Path) -> None:
    data = ROOT / "tests/data/before_one_form"
    runs = [data / name for name in ("fsdp_run", "script", "sharded_script")]
    assert report(tmp_path / "page.html", *runs) == 0
    browser.open(tmp_path / "page.html", width=390)
    browser.run_until(IS_IDLE)
    assert errors_of(browser) == []


def test_a_run_without_a_record_has_a_page_without_charts(browser: Browser, tmp_path: Path) -> None:
    (tmp_path / "a/checkpoints").mkdir(parents=True)
    assert report(tmp_path / "page.html", tmp_path / "a") == 0
    assert (tmp_path / "page.html").stat().st_size < 10_000
    browser.open(tmp_path / "page.html", width=390)
    assert errors_of(browser) == []


@pytest.mark.slow
def test_a_million_steps_and_a_thousand_ranks_take_less_than_5_mb(
    browser: Browser, tmp_path: Path
) -> None:
    run = write_run(
        tmp_path / "a",
        steps=1_000_000,
        restarts_at=[200_000, 500_000],
        saves=range(100_000, 1_000_001, 100_000),
        num_ranks=1024,
        ranks_per_host=8,
        failures=dict.fromkeys(range(1024), ILLEGAL),
    )
    assert report(tmp_path / "page.html", run) == 0
    assert (tmp_path / "page.html").stat().st_size < 5_000_000
    browser.open(tmp_path / "page.html", width=390)
    browser.run_until(IS_IDLE)
    assert "rank 0 on gpu000 and 1023 others" in browser.run("return document.body.innerText")
    assert errors_of(browser) == []


def test_bad_input_is_one_sentence(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    run = write_run(tmp_path / "a")
    out = tmp_path / "page.html"

    def check(sentence: str) -> None:
        printed, said = capsys.readouterr()
        assert printed == ""
        assert re.fullmatch(f"{sentence}\n", said), said

    for runs, sentence in {
        ("nothing",): error("exist. Expected", "nothing "),
        (".",): error("has neither", ". ", "metrics.jsonl", "checkpoints/"),
        tuple("abcdefghi"): error("mpiddp report", "8 runs ", "9"),
    }.items():
        assert report(out, *map(Path, runs)) == 2
        check(sentence)
        assert not out.exists()
    for given, named in (("a", "a"), ("", "."), ("a/", "a")):
        assert cli.main(["report", str(run), "--out", given]) == 2
        check(error("file: --out", f"--out {named} ", ": --out report.html"))
    assert report(tmp_path / "no/page.html", run) == 2
    check(error(":", "--out ", "no/", "No such file or directory"))
    (run / "metrics.jsonl").write_text('{"step": 1, "lr": 1}\n{"st')
    assert report(out, run, run) == 0
    said = capsys.readouterr()
    assert said.err == f"{run}/metrics.jsonl: 1 line without a record.\n"
    assert said.out.startswith(f"{out}: 1 run, 1.")
