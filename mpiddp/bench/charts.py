"""A common style for all charts. Only this module imports matplotlib, in the launching process."""

from __future__ import annotations

import sys
import textwrap
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from mpiddp.bench.report import Spread
from mpiddp.errors import UserError

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

# Okabe and Ito's colours, which colour-blind readers can distinguish as well.
BLUE, ORANGE, GREEN, PURPLE, SKY, YELLOW = (
    "#0072B2",
    "#E69F00",
    "#009E73",
    "#CC79A7",
    "#56B4E9",
    "#F0E442",
)
GREY, LOST = "#8C8C8C", "#E8E8E8"


def need_matplotlib() -> None:
    """Raise UserError if matplotlib is missing, before the measurement."""
    try:
        import matplotlib.figure  # noqa: F401
    except ImportError as error:
        raise UserError(
            f"mpiddp bench needs matplotlib for its charts ({error}). "
            f"Run: {sys.executable} -m pip install 'mpiddp[bench]'"
        ) from None


def new_figure(size: tuple[float, float]) -> Figure:
    # Without pyplot, matplotlib draws into memory and needs no screen.
    from matplotlib.figure import Figure

    return Figure(figsize=size, layout="constrained")


def save(figure: Figure, path: Path, footnotes: Sequence[str]) -> None:
    """Write the PNG. Each footnote starts on a new line, and long footnotes are wrapped."""
    width = int(figure.get_figwidth() * 20)  # characters of this size
    lines = [line for note in footnotes for line in textwrap.wrap(note, width)]
    figure.supxlabel("\n".join(lines), fontsize=7, color=GREY, x=0.01, ha="left")
    figure.savefig(path, dpi=150)


def axes(figure: Figure, rows: int = 1, columns: int = 1) -> list[Axes]:
    """Plain axes from left to right and top to bottom, with a light grid."""
    made: list[Axes] = list(figure.subplots(rows, columns, squeeze=False).flat)
    for each in made:
        each.spines[["top", "right"]].set_visible(False)
        each.grid(axis="y", color="#DDDDDD", linewidth=0.8)
        each.set_axisbelow(True)
    return made


def bars(
    on: Axes, groups: Sequence[str], series: Mapping[str, Sequence[Spread | None]], label: str
) -> None:
    """Draw bars from zero, one of each series in every group, each with a line from low to high.

    A missing measurement leaves a gap.
    """
    width = 0.8 / len(series)
    for index, (name, values) in enumerate(series.items()):
        offset = (index - (len(series) - 1) / 2) * width
        measured = [
            (position + offset, each) for position, each in enumerate(values) if each is not None
        ]
        positions = [position for position, _ in measured]
        heights = [each["median"] for _, each in measured]
        colour = (BLUE, ORANGE, GREEN, PURPLE)[index]
        on.bar(positions, heights, width * 0.92, color=colour, label=name)
        if any(each["low"] < each["high"] for _, each in measured):
            on.errorbar(positions, heights, whiskers([each for _, each in measured]), **WHISKER)
    on.set_xticks(range(len(groups)), groups)
    on.set_ylabel(label)
    on.set_ylim(bottom=0)


def legend_above(on: Axes) -> None:
    """Put the legend above the axes, where it hides nothing."""
    on.legend(loc="lower left", bbox_to_anchor=(0, 1), ncols=4, frameon=False, fontsize=9)


WHISKER: dict[str, Any] = {"fmt": "none", "ecolor": "#222222", "elinewidth": 1, "capsize": 3}


def whiskers(values: Sequence[Spread]) -> list[list[float]]:
    """The distances of low and high from each median: [2][N]."""
    return [
        [each["median"] - each["low"] for each in values],
        [each["high"] - each["median"] for each in values],
    ]
