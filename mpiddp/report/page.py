"""The page: facts as tables, records as charts of bokeh. Only this module imports bokeh.

All that stands in a run's files is data. `_text` escapes it wherever it enters the page, and the charts
get numbers alone: a run is a letter there, and the names of curves stand above them.
"""

from __future__ import annotations

import time
from collections import defaultdict
from collections.abc import Iterable, Sequence
from html import escape
from statistics import mean, median
from typing import Any

import numpy as np
from bokeh.embed import components
from bokeh.models import DataRange1d
from bokeh.plotting import figure
from bokeh.resources import Resources

from mpiddp import __version__
from mpiddp.report.page_style import CHART_COLOURS, STYLE
from mpiddp.report.rank_files import RankFile
from mpiddp.report.read import Run, Start, number
from mpiddp.report.thinning import some_of, thinned
from mpiddp.text import counted, duration, listed

_PIXELS = 1000  # of a chart on a wide screen
_MAX_POINTS = 60_000  # over all charts, of 22 bytes each in the page
_MAX_MARKS = 200
_MAX_ROWS = 20
_MOST_CHARACTERS = 4000
_NONE = "–"
# The curves that people look at first; others follow by name.
_FIRST = ("train_loss", "loss", "test_loss", "test_accuracy", "accuracy", "lr", "images_per_s")


def page(runs: Sequence[Run]) -> str:
    """The page about these runs as HTML."""
    charts = {**_curves(runs), **_rank_charts(runs)}
    script, divs = components(charts) if charts else ("", {})
    body = "\n".join(
        [
            _head(runs),
            _section("What ran", _facts(runs)),
            _section("Failures", _failures(runs)),
            _section("Curves", _marks(runs) + _drawn(divs, "curve ")),
            _section("Time lost", _time_lost(runs)),
            _section("Ranks and hosts", _drawn(divs, "ranks ") + _hosts(runs)),
            _section("Settings that differ" if len(runs) > 1 else "Settings", _settings(runs)),
            _section("What could not be read", _items(note for run in runs for note in run.notes)),
        ]
    )
    # No favicon: a browser would ask the file's folder, or a server, for one.
    return f"""<!DOCTYPE html>
<html lang="en"><head><meta charset="utf-8">
<meta name="viewport" content="width=device-width, initial-scale=1">
<meta name="color-scheme" content="light dark">
<link rel="icon" href="data:,">
<title>{_text(listed([run.path.name or "run" for run in runs]))}</title>
<style>{STYLE}</style>
{_library() if charts else ""}
</head><body>
{body}
<footer>mpiddp {__version__}, {_date(time.time())}</footer>
{script}
</body></html>
"""


def _library() -> str:
    """bokeh's script for charts, without its widgets, tables, WebGL and TeX."""
    script: str = Resources(mode="inline", components=["bokeh"]).render_js()
    return script


def _head(runs: Sequence[Run]) -> str:
    if len(runs) == 1:
        return f"<h1>{_text(runs[0].path.name)}</h1>"
    names = "".join(
        f"<li>{_swatch(index)} <b>{_letter(index)}</b> {_text(run.path)}</li>"
        for index, run in enumerate(runs)
    )
    return f'<h1>{len(runs)} runs</h1><ul class="legend">{names}</ul>'


def _facts(runs: Sequence[Run]) -> str:
    rows = {
        "folder": [str(run.path.absolute()) for run in runs],
        "state": [run.state for run in runs],
        "started": [_date(run.starts[0].begins) if run.starts else _NONE for run in runs],
        "duration": [_NONE if run.seconds is None else duration(run.seconds) for run in runs],
        "starts": [str(len(run.starts) or _NONE) for run in runs],
        "hosts": [_hosts_of(run) for run in runs],
        "versions": [listed(_unique(rank.versions for rank in run.ranks)) or _NONE for run in runs],
        "data set": [
            str(run.summary.get("dataset", run.config.get("dataset", _NONE))) for run in runs
        ],
        "model": [str(run.summary.get("arch", run.config.get("arch", _NONE))) for run in runs],
        "step": [_NONE if run.step is None else f"{run.step:,}" for run in runs],
        "test accuracy": [_shown(run, "test_accuracy", ".2%") for run in runs],
        "train loss": [_shown(run, "train_loss", ".4f") for run in runs],
        "images/s": [_shown(run, "images_per_s", ",.0f") for run in runs],
        "step time p50": [_shown(run, "step_time_p50_s", ".4f", " s") for run in runs],
        "step time p95": [_shown(run, "step_time_p95_s", ".4f", " s") for run in runs],
        "saves kept": [
            _NONE if not run.saves else listed([f"{s:,}" for s in run.saves]) for run in runs
        ],
    }
    told = {name: cells for name, cells in rows.items() if any(cell != _NONE for cell in cells)}
    return _table(told, runs)


def _shown(run: Run, name: str, form: str, unit: str = "") -> str:
    value = number(run.summary, name)
    if value is None:
        value = run.last(name)
    return _NONE if value is None else format(value, form) + unit


def _hosts_of(run: Run) -> str:
    counts: dict[str, int] = defaultdict(int)
    for rank in run.ranks:
        if rank.host:
            counts[rank.host] += 1
    hosts = counts or run.summary.get("hosts")
    if not isinstance(hosts, dict) or not hosts:
        return _NONE
    sizes = [rank.world_size for rank in run.ranks if rank.world_size]
    num_ranks = sizes[0] if sizes else len(run.ranks)
    names = listed([f"{name} {count}" for name, count in hosts.items()])
    return f"{counted(num_ranks, 'rank')} on {counted(len(hosts), 'host')} ({names})"


def _failures(runs: Sequence[Run]) -> str:
    """Each sentence once, with the ranks that ended with it. That of the first rank to fail comes first."""
    items = []
    for index, run in enumerate(runs):
        of_sentence: dict[str, list[RankFile]] = defaultdict(list)
        for rank in sorted(run.ranks, key=_failed_at):
            if rank.failure:
                of_sentence[rank.failure].append(rank)
        for sentence, ranks in list(of_sentence.items())[:_MAX_ROWS]:
            who = f"rank {ranks[0].rank}{f' on {ranks[0].host}' if ranks[0].host else ''}"
            others = f" and {counted(len(ranks) - 1, 'other')}" if len(ranks) > 1 else ""
            items.append(f"{_name(index, runs)}{who}{others}: {sentence}")
        if len(of_sentence) > _MAX_ROWS:
            items.append(f"{_name(index, runs)}{len(of_sentence) - _MAX_ROWS} more sentences")
    return _items(items)


def _failed_at(rank: RankFile) -> float:
    ends = [attempt.ends for attempt in rank.attempts[-1:] if attempt.ends is not None]
    return ends[0] if ends else float("inf")


def _curves(runs: Sequence[Run]) -> dict[str, Any]:
    """A chart for each name of a curve, with all runs in it, over the same range of steps."""
    names = sorted({name for run in runs for name in run.curves}, key=_order)
    num_curves = sum(len(run.curves) for run in runs)
    pixels = min(_PIXELS, _MAX_POINTS // (2 * num_curves)) if num_curves else _PIXELS
    steps = DataRange1d()
    charts = {}
    for name in names:
        chart = _chart("step", x_range=steps, y_range=_y_range(runs, name))
        for index, run in enumerate(runs):
            if name not in run.curves:
                continue
            thin_steps, values = thinned(run.curves[name], pixels)
            data = {"x": np.array(thin_steps), "y": np.array(values)}
            colour = CHART_COLOURS[index]
            chart.line("x", "y", source=data, color=colour, line_width=1.5, name=_letter(index))
            if len(values) <= 60:
                chart.scatter("x", "y", source=data, color=colour, size=4)
            if saves := some_of(run.saves, _MAX_MARKS):
                chart.vspan(x=saves, line_color=colour, line_alpha=0.35, line_dash="dotted")
            if resumes := _resumed_steps(run):
                chart.vspan(x=resumes, line_color=colour, line_dash="dashed", line_width=2)
        charts[f"curve {name}"] = chart
    return charts


def _y_range(runs: Sequence[Run], name: str) -> DataRange1d:
    """The range of the values. bokeh would show a curve that is flat within 2 around it, as if it were 0."""
    value = next(run.curves[name].values[0] for run in runs if name in run.curves)
    return DataRange1d(default_span=abs(value) / 5 or 1.0)


def _resumed_steps(run: Run) -> list[float]:
    return some_of([start.step for start in run.starts[1:] if start.step is not None], _MAX_MARKS)


def _order(name: str) -> tuple[int, str]:
    return (_FIRST.index(name) if name in _FIRST else len(_FIRST), name)


def _rank_charts(runs: Sequence[Run]) -> dict[str, Any]:
    """The mean step time of each rank, and over the epochs the slowest rank's share above the median."""
    times = {index: _step_times(run) for index, run in enumerate(runs)}
    if not any(times.values()):
        return {}
    by_rank, skew = _chart("rank"), _chart("epoch")
    for index, of_rank in times.items():
        if not of_rank:
            continue
        look = {"color": CHART_COLOURS[index], "name": _letter(index)}
        by_rank.scatter(
            np.array(list(of_rank), dtype=float),
            np.array([mean(each) for each in of_rank.values()]),
            size=4,
            **look,
        )
        epochs = list(zip(*of_rank.values(), strict=False))  # those that all ranks finished
        excess = [100 * (max(each) / (median(each) or 1) - 1) for each in epochs]
        epoch_numbers = np.arange(1, len(excess) + 1, dtype=float)
        kept = [int(each) for each in some_of(range(len(excess)), 2 * _PIXELS)]
        skew.line(epoch_numbers[kept], np.array(excess)[kept], line_width=1.5, **look)
    return {
        "ranks mean step time of each rank, s": by_rank,
        "ranks slowest rank above the median, %": skew,
    }


def _step_times(run: Run) -> dict[int, list[float]]:
    return {rank.rank: rank.step_times_s for rank in run.ranks if rank.step_times_s}


def _hosts(runs: Sequence[Run]) -> str:
    """The slowest hosts first: their ranks' mean step time, and how far it lies above the median rank's."""
    rows = []
    for index, run in enumerate(runs):
        of_host: dict[str, list[float]] = defaultdict(list)
        for rank in run.ranks:
            if rank.step_times_s:
                of_host[rank.host or "?"].append(mean(rank.step_times_s))
        if not of_host:
            continue
        middle = median(each for means in of_host.values() for each in means) or 1.0
        slowest = sorted(of_host.items(), key=lambda item: max(item[1]), reverse=True)
        for host, means in slowest[:_MAX_ROWS]:
            rows.append(
                (
                    f"{_name(index, runs)}{host}",
                    str(len(means)),
                    f"{mean(means):.4f} s",
                    f"{100 * (max(means) / middle - 1):+.1f} %",
                )
            )
    if not rows:
        return (
            "<p>No rank recorded its step times: <code>mpiddp train --per-rank-log</code> does.</p>"
        )
    head = ("host", "ranks", "mean step time", "slowest rank beside the median")
    return _grid(head, rows)


def _time_lost(runs: Sequence[Run]) -> str:
    rows = []
    for index, run in enumerate(runs):
        for before, start in zip(run.starts, run.starts[1:], strict=False):
            down = None if before.ends is None else max(0.0, start.begins - before.ends)
            rows.append(
                (
                    f"{_name(index, runs)}{_date(start.begins)}",
                    _NONE if start.step is None else f"{start.step:,}",
                    _seconds(start.repeated_s),
                    _seconds(down),
                )
            )
        if len(run.starts) > 1:
            rows.append(
                (f"{_name(index, runs)}in all", "", _seconds(_repeated(run)), _seconds(_down(run)))
            )
    if not rows:
        return ""
    return _grid(("restart", "from step", "work repeated", "nothing ran"), rows[-200:])


def _repeated(run: Run) -> float | None:
    known = [start.repeated_s for start in run.starts if start.repeated_s is not None]
    return sum(known) if known else None


def _down(run: Run) -> float | None:
    pairs: Iterable[tuple[Start, Start]] = zip(run.starts, run.starts[1:], strict=False)
    known = [start.begins - before.ends for before, start in pairs if before.ends is not None]
    return sum(known) if known else None


def _seconds(value: float | None) -> str:
    return "not known" if value is None else duration(value)


def _settings(runs: Sequence[Run]) -> str:
    """The settings of one run, or of several those that differ."""
    names = dict.fromkeys(name for run in runs for name in run.config)
    rows = {name: [_setting(run, name) for run in runs] for name in names}
    if len(runs) > 1:
        rows = {name: cells for name, cells in rows.items() if len(set(cells)) > 1}
        return _table(rows, runs) if rows else "<p>None.</p>" if names else ""
    return (
        f"<details><summary>{counted(len(rows), 'setting')}</summary>{_table(rows, runs)}</details>"
        * bool(rows)
    )


def _setting(run: Run, name: str) -> str:
    return str(run.config[name]) if name in run.config else _NONE


def _marks(runs: Sequence[Run]) -> str:
    if not any(run.curves for run in runs):
        return ""
    return '<p class="quiet">Dotted: a save. Dashed: a restart went on from here.</p>'


def _chart(x_label: str, **options: Any) -> Any:
    chart = figure(
        height=240,
        sizing_mode="stretch_width",
        tools="pan,box_zoom,xwheel_zoom,reset,save",
        active_drag=None,  # so that a finger scrolls the page
        active_scroll=None,
        tooltips=[("run", "$name"), (x_label, "$x{0,0}"), ("value", "$y{0.0000}")],
        x_axis_label=x_label,
        background_fill_alpha=0,
        border_fill_alpha=0,
        outline_line_color=None,
        output_backend="canvas",
        **options,
    )
    chart.toolbar.logo = None
    chart.toolbar.autohide = True
    chart.xaxis.formatter.use_scientific = False
    chart.axis.axis_line_color = chart.axis.major_tick_line_color = "#999999"
    chart.axis.minor_tick_line_color = None
    chart.grid.grid_line_color = "#e6e6e6"
    return chart


def _drawn(divs: dict[str, str], prefix: str) -> str:
    charts = [
        (name.removeprefix(prefix), div) for name, div in divs.items() if name.startswith(prefix)
    ]
    drawn = "".join(
        f'<figure><figcaption>{_text(name)}</figcaption><div class="chart">{div}</div></figure>'
        for name, div in charts
    )
    return f'<div class="charts">{drawn}</div>' if drawn else ""


def _section(title: str, content: str) -> str:
    return f"<section><h2>{title}</h2>{content}</section>" if content else ""


def _table(rows: dict[str, list[str]], runs: Sequence[Run]) -> str:
    """A row for each name, with a column for each run."""
    head = ("", *(_letter(index) for index in range(len(runs)))) if len(runs) > 1 else ()
    return _grid(head, [(name, *cells) for name, cells in rows.items()])


def _grid(head: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    top = "".join(f'<th scope="col">{_text(cell)}</th>' for cell in head)
    lines = "".join(
        f'<tr><th scope="row">{_text(name)}</th>{"".join(f"<td>{_text(cell)}</td>" for cell in cells)}</tr>'
        for name, *cells in rows
    )
    thead = f"<thead><tr>{top}</tr></thead>" if head else ""
    return f'<div class="scroll"><table>{thead}<tbody>{lines}</tbody></table></div>'


def _items(sentences: Iterable[str]) -> str:
    items = "".join(f"<li>{_text(sentence)}</li>" for sentence in sentences)
    return f"<ul>{items}</ul>" if items else ""


def _text(value: object) -> str:
    """A text of a run's files as HTML: none of it is markup."""
    text = str(value)
    cut = f"{text[:_MOST_CHARACTERS]}…" if len(text) > _MOST_CHARACTERS else text
    return escape(cut)


def _letter(index: int) -> str:
    return "ABCDEFGH"[index]


def _name(index: int, runs: Sequence[Run]) -> str:
    """The letter of a run in front of a text, where there are several."""
    return f"{_letter(index)}: " if len(runs) > 1 else ""


def _swatch(index: int) -> str:
    return f'<i class="swatch" style="background:{CHART_COLOURS[index]}"></i>'


def _unique(texts: Iterable[str]) -> list[str]:
    return sorted({text for text in texts if text})


def _date(seconds: float) -> str:
    return time.strftime("%Y-%m-%d %H:%M:%S", time.localtime(seconds))
