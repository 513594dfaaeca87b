"""Draw the chart of README.md from the JSON of `python -m benchmarks.start`.

python -m benchmarks.start --ranks 2,4,8,16 --out start
python -m docs.start_chart start/start.json > docs/pictures/start.svg
"""

from __future__ import annotations

import json
import sys
from pathlib import Path
from statistics import median
from typing import Any

# Of Okabe and Ito's colours, which colour-blind readers can distinguish as well.
LAUNCHERS = {"mpiddp": "#0072B2", "torchrun": "#E69F00"}
WIDTH, LEFT, RIGHT, BAR, GAP = 640, 70, 150, 16, 14


def svg(results: dict[str, Any]) -> str:
    """Two bars for each number of ranks: the median seconds, and a line from the lowest to the highest."""
    starts = results["starts"]
    longest = max(max(start["wall_s"]) for start in starts)
    scale, y, parts = (WIDTH - LEFT - RIGHT) / longest, 34, []
    for ranks in sorted({start["ranks"] for start in starts}):
        parts.append(f'<text x="{LEFT - 8}" y="{y + 20}" class="end">{ranks} ranks</text>')
        for name, colour in LAUNCHERS.items():
            own = [start["launcher"] == name and start["ranks"] == ranks for start in starts]
            wall_s = starts[own.index(True)]["wall_s"]
            low, middle, high = (LEFT + scale * each(wall_s) for each in (min, median, max))
            parts += [
                f'<rect x="{LEFT}" y="{y}" width="{middle - LEFT:.1f}" height="{BAR}" fill="{colour}"/>',
                f'<path d="M{low:.1f} {y + BAR / 2}H{high:.1f}"/>',
                f'<text x="{WIDTH - RIGHT + 8}" y="{y + 13}">{median(wall_s):.2f} s'
                f" ({min(wall_s):.2f} to {max(wall_s):.2f})</text>",
            ]
            y += BAR
        y += GAP
    for number, (name, colour) in enumerate(LAUNCHERS.items()):
        x = LEFT + 100 * number
        parts.append(f'<rect x="{x}" y="10" width="12" height="12" fill="{colour}"/>')
        parts.append(f'<text x="{x + 18}" y="21">{name}</text>')
    style = (
        "text{font:13px sans-serif;fill:#1c1e21}.end{text-anchor:end}path{stroke:#5f6670;stroke-width:2}"
        "@media(prefers-color-scheme:dark){text{fill:#e4e6ea}path{stroke:#c0c7d1}}"
    )
    body = "\n".join(parts)
    size = f'viewBox="0 0 {WIDTH} {y}" width="{WIDTH}" height="{y}"'
    return (
        f'<svg xmlns="http://www.w3.org/2000/svg" {size}>\n<style>{style}</style>\n{body}\n</svg>'
    )


if __name__ == "__main__":
    print(svg(json.loads(Path(sys.argv[1]).read_text(encoding="utf-8"))["results"]))
