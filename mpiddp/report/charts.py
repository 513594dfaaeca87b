"""The records of runs as charts of bokeh. Only this module imports bokeh.

The charts get numbers alone: a run is a letter there, and the names of curves stand above them.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from typing import Any

from bokeh.embed import components
from bokeh.models import BasicTickFormatter, DataRange1d, NumeralTickFormatter
from bokeh.plotting import figure
from bokeh.resources import Resources

from mpiddp.report.html import COLOURS, letter, text
from mpiddp.report.read import Curve, Run

_PIXELS = 1000  # of a chart on a wide screen
_MAX_POINTS = 60_000  # over all charts, of 22 bytes each in the page
_MAX_DOTS = 60  # a curve of more values is a line alone
# The curves that people look at first; others follow by name.
_FIRST = ("train_loss", "loss", "test_loss", "test_accuracy", "accuracy", "lr", "images_per_s")


class Charts:
    """The charts of a page, and bokeh's script that draws them."""

    def __init__(self, runs: Sequence[Run]) -> None:
        named = _curves(runs)
        self.script, drawn = components([chart for _, chart in named]) if named else ("", ())
        figures = [
            f'<figure><figcaption>{text(name)}</figcaption><div class="chart">{div}</div></figure>'
            for (name, _), div in zip(named, drawn, strict=True)
        ]
        self.curves = f'<div class="charts">{"".join(figures)}</div>' if figures else ""
        # bokeh's script for charts, without its widgets, tables, WebGL and TeX.
        inline = Resources(mode="inline", components=["bokeh"])
        self.library: str = inline.render_js() if named else ""


def _curves(runs: Sequence[Run]) -> list[tuple[str, Any]]:
    """A chart for each name of a curve, with all runs in it, over the same range of steps."""
    drawn: dict[str, dict[int, Curve]] = defaultdict(dict)
    for index, run in enumerate(runs):
        for name, curve in run.curves.items():
            if curve.steps:
                drawn[name][index] = curve
    num_curves = sum(map(len, drawn.values()))
    pixels = min(_PIXELS, _MAX_POINTS // (2 * max(1, num_curves)))
    steps = DataRange1d()
    charts = []
    for name in sorted(drawn, key=_order):
        # bokeh would show a curve that is flat within 2 around it, as if it were 0.
        value = next(iter(drawn[name].values())).values[0]
        chart = _chart(steps, DataRange1d(default_span=abs(value) / 5 or 1.0))
        for index, curve in drawn[name].items():
            _draw_curve(chart, runs[index], curve.thinned(pixels), index)
        charts.append((name, chart))
    return charts


def _draw_curve(chart: Any, run: Run, points: tuple[Any, Any], index: int) -> None:
    look = {"color": COLOURS[index], "name": letter(index)}
    chart.line(*points, line_width=1.5, **look)
    if len(points[0]) <= _MAX_DOTS:
        chart.scatter(*points, size=4, **look)
    resumed = [start.step for start in run.starts[1:]]
    for steps, line in (([*run.saves], {"line_dash": "dotted"}), (resumed, {"line_width": 2})):
        if steps:
            chart.vspan(x=steps, line_color=COLOURS[index], line_alpha=0.6, **line)


def _order(name: str) -> tuple[int, str]:
    return (_FIRST.index(name) if name in _FIRST else len(_FIRST), name)


def _chart(x_range: DataRange1d, y_range: DataRange1d) -> Any:
    chart = figure(
        x_range=x_range,
        y_range=y_range,
        height=240,
        sizing_mode="stretch_width",
        tools="pan,box_zoom,xwheel_zoom,reset,save",
        active_drag=None,  # so that a finger scrolls the page
        active_scroll=None,
        tooltips=[("run", "$name"), ("step", "$x{0,0}"), ("value", "$y{0.0000}")],
        x_axis_label="step",
        outline_line_color=None,
    )
    chart.toolbar.logo = None
    chart.toolbar.autohide = True
    chart.xaxis.formatter = NumeralTickFormatter(format="0,0[.]0")
    chart.yaxis.formatter = BasicTickFormatter(power_limit_high=6)
    chart.axis.axis_line_color = chart.axis.major_tick_line_color = "#999999"
    chart.axis.minor_tick_line_color = None
    chart.grid.grid_line_color = "#e6e6e6"
    return chart
