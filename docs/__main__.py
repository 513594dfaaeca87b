"""Write the pages and charts that programs write: python -m docs."""

from __future__ import annotations

from pathlib import Path

from docs import charts, command_line, guarantees, python_names, reference, troubleshooting

PAGES = (command_line, guarantees, python_names, reference, troubleshooting)


def written() -> dict[Path, str]:
    """The text of each file, as it is to be now."""
    texts = {page.PAGE: page.text() for page in PAGES}
    return texts | {charts.path(picture): charts.svg(picture) for picture in charts.PICTURES}


if __name__ == "__main__":
    for path, text in written().items():
        path.write_text(text, encoding="utf-8")
