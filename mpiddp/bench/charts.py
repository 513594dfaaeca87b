"""One way to draw every benchmark: panels of named series. Only this module imports matplotlib, in the
launching process.
"""

from __future__ import annotations

import sys
import textwrap
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

from mpiddp.bench.report import Spread
from mpiddp.errors import UserError

if TYPE_CHECKING:
    from matplotlib.axes import Axes

# Okabe and Ito's colours, which colour-blind readers can distinguish as well.
_COLOURS = ("#0072B2", "#E69F00", "#009E73", "#CC79A7", "#56B4E9", "#F0E442")
_GREY, _BLACK = "#8C8C8C", "#222222"
_MARKS: dict[str, Any] = {"capsize": 3, "markersize": 4}


@dataclass(frozen=True)
class Panel:
    """One pair of axes. Each series maps places on the x axis to measurements.

    "lines" have numbers on the x axis. "bars" start at zero and "points" need not, and both have names there.
    A series whose name begins with "ideal" is a dashed line without marks.
    """

    label: str  # of the measurements
    x_label: str
    series: Mapping[str, Mapping[Any, Spread]]
    kind: Literal["lines", "bars", "points"] = "lines"
    logarithmic: str = ""  # the axes that are: "x", "y" or "xy"
    tick: Callable[[Any], str] | None = None  # names the places on the x axis; each has a tick


@dataclass(frozen=True)
class Chart:
    title: str
    panels: Sequence[Panel]


def need_matplotlib() -> None:
    """Raise UserError if matplotlib is missing, before the measurement."""
    try:
        import matplotlib.figure  # noqa: F401
    except ImportError as error:
        raise UserError(
            f"mpiddp bench needs matplotlib for its charts ({error}). "
            f"Run: {sys.executable} -m pip install 'mpiddp[bench]'"
        ) from None


def save(chart: Chart, path: Path, size: tuple[float, float], footnotes: Sequence[str]) -> None:
    """Draw the chart, and write it as a PNG of this size in inches. Long footnotes are wrapped."""
    # Without pyplot, matplotlib draws into memory and needs no screen.
    from matplotlib.figure import Figure

    figure = Figure(figsize=size, layout="constrained")
    panels = figure.subplots(1, len(chart.panels), squeeze=False).flat
    for on, panel in zip(panels, chart.panels, strict=True):
        _draw(on, panel)
    figure.suptitle(chart.title, fontsize=10)
    width = int(size[0] * 20)  # characters of this size
    lines = [line for note in footnotes for line in textwrap.wrap(note, width)]
    figure.supxlabel("\n".join(lines), fontsize=7, color=_GREY, x=0.01, ha="left")
    figure.savefig(path, dpi=150)


def _draw(on: Axes, panel: Panel) -> None:
    places = list(dict.fromkeys(x for points in panel.series.values() for x in points))
    colours = iter(_COLOURS)
    for index, (name, points) in enumerate(panel.series.items()):
        medians = [each["median"] for each in points.values()]
        sides = _whiskers(list(points.values()))
        if panel.kind == "lines":
            if name.startswith("ideal"):
                on.plot(list(points), medians, "--", color=_BLACK, linewidth=1, label=name)
            else:
                style: dict[str, Any] = {"color": next(colours), "label": name, **_MARKS}
                on.errorbar(list(points), medians, sides, fmt="o-", **style)
            continue
        width = 0.8 / len(panel.series)
        offset = (index - (len(panel.series) - 1) / 2) * width
        at = [places.index(x) + offset for x in points]
        colour = next(colours)
        if panel.kind == "bars":
            on.bar(at, medians, width * 0.92, color=colour, label=name)
            on.errorbar(at, medians, sides, fmt="none", ecolor=_BLACK, elinewidth=1, capsize=3)
        else:
            on.errorbar(at, medians, sides, fmt="o", color=colour, label=name, **_MARKS)
    _label(on, panel, places)


def _label(on: Axes, panel: Panel, places: Sequence[Any]) -> None:
    on.spines[["top", "right"]].set_visible(False)
    on.grid(axis="y", color="#DDDDDD", linewidth=0.8)
    on.set_axisbelow(True)
    if "x" in panel.logarithmic:
        on.set_xscale("log", base=2)
    if "y" in panel.logarithmic:
        on.set_yscale("log")
    elif panel.kind != "points":
        on.set_ylim(bottom=0)
    names = [panel.tick(place) if panel.tick else str(place) for place in places]
    slant: dict[str, Any] = (
        {"rotation": 30, "ha": "right"} if max(map(len, names)) * len(names) > 60 else {}
    )
    if panel.kind != "lines":
        on.set_xticks(range(len(places)), names, **slant)
        on.set_xlim(-0.5, len(places) - 0.5)
    elif panel.tick is not None:
        on.set_xticks(places, names, **slant)
        on.minorticks_off()
    on.set_xlabel(panel.x_label)
    on.set_ylabel(panel.label + (" (logarithmic)" if "y" in panel.logarithmic else ""))
    # Above the axes, where it hides nothing.
    on.legend(loc="lower left", bbox_to_anchor=(0, 1), ncols=3, frameon=False, fontsize=9)


def _whiskers(values: Sequence[Spread]) -> list[list[float]]:
    """The distances of low and high from each median: [2][N]."""
    return [
        [each["median"] - each["low"] for each in values],
        [each["high"] - each["median"] for each in values],
    ]
