"""Draw the charts of docs/evidence/performance.md from its tables.

python -m docs.charts     # writes docs/pictures/start.svg and restart.svg
"""

from __future__ import annotations

import re
from pathlib import Path

PAGE = Path(__file__).parent / "evidence" / "performance.md"
PICTURES = {"start": "From the command to the first all-reduce", "restart": "Restart"}
# Of Okabe and Ito's colours, which colour-blind readers can distinguish as well.
LAUNCHERS = {"mpiddp": "#0072B2", "torchrun": "#E69F00"}
WIDTH, LEFT, RIGHT, BAR, GAP = 640, 70, 150, 16, 14

# A number of ranks, and for each launcher: median (lowest to highest), in seconds.
_ROW = re.compile(r"^\| (\d+) \|" + r" ([\d.]+) \(([\d.]+) to ([\d.]+)\) \|" * 2, re.MULTILINE)


def path(name: str) -> Path:
    """The file of a picture."""
    return Path(__file__).parent / "pictures" / f"{name}.svg"


def svg(name: str) -> str:
    """Two bars for each number of ranks: the median seconds, and a line from the lowest to the highest."""
    page = PAGE.read_text(encoding="utf-8")
    section = page.partition(f"## {PICTURES[name]}\n")[2].partition("\n## ")[0]
    rows = _ROW.findall(section)
    scale = (WIDTH - LEFT - RIGHT) / max(float(row[high]) for row in rows for high in (3, 6))
    y, parts = 34, []
    for ranks, *figures in rows:
        parts.append(f'<text x="{LEFT - 8}" y="{y + 20}" class="end">{ranks} ranks</text>')
        for colour, figure in zip(LAUNCHERS.values(), (figures[:3], figures[3:]), strict=True):
            middle, low, high = (LEFT + scale * float(seconds) for seconds in figure)
            parts += [
                f'<rect x="{LEFT}" y="{y}" width="{middle - LEFT:.1f}" height="{BAR}" fill="{colour}"/>',
                f'<path d="M{low:.1f} {y + BAR / 2}H{high:.1f}"/>',
                f'<text x="{WIDTH - RIGHT + 8}" y="{y + 13}">{figure[0]} s ({figure[1]} to {figure[2]})</text>',
            ]
            y += BAR
        y += GAP
    for number, (launcher, colour) in enumerate(LAUNCHERS.items()):
        x = LEFT + 100 * number
        parts.append(f'<rect x="{x}" y="10" width="12" height="12" fill="{colour}"/>')
        parts.append(f'<text x="{x + 18}" y="21">{launcher}</text>')
    style = (
        "text{font:13px sans-serif;fill:#1c1e21}.end{text-anchor:end}path{stroke:#5f6670;stroke-width:2}"
        "@media(prefers-color-scheme:dark){text{fill:#e4e6ea}path{stroke:#c0c7d1}}"
    )
    body = "\n".join(parts)
    size = f'viewBox="0 0 {WIDTH} {y}" width="{WIDTH}" height="{y}"'
    return (
        f'<svg xmlns="http://www.w3.org/2000/svg" {size}>\n<style>{style}</style>\n{body}\n</svg>\n'
    )


if __name__ == "__main__":
    for picture in PICTURES:
        path(picture).write_text(svg(picture), encoding="utf-8")
