"""The pages as a site: every page is in its navigation, and no link leads out of it to a missing page.

Tests docs/site_links.py and mkdocs.yml. `.ci/run` builds the site.
python -m pytest tests/docs/test_site.py
"""

from __future__ import annotations

import re

import pytest

from docs.site_links import without_links_out
from tests.support.ranks import ROOT


@pytest.mark.parametrize(
    ("page", "before", "after"),
    [
        ("launch.md", "[format](../hostfiles/README.md)", "format (`hostfiles/README.md`)"),
        ("index.md", "[CONTRIBUTING.md](../CONTRIBUTING.md)", "`CONTRIBUTING.md`"),
        ("evidence/gpu.md", "[`a`](../../examples/gpt/a.py#L3)", "`a` (`examples/gpt/a.py`)"),
        ("evidence/gpu.md", "[train](../train.md#equal)", "[train](../train.md#equal)"),
        ("launch.md", "![a picture](pictures/launch.svg)", "![a picture](pictures/launch.svg)"),
        ("launch.md", "[torch](https://pytorch.org/../x)", "[torch](https://pytorch.org/../x)"),
    ],
)
def test_links_that_leave_the_site(page: str, before: str, after: str) -> None:
    assert without_links_out(before, page) == after


def test_every_page_is_in_the_navigation() -> None:
    named = re.findall(r"^ +- (?:[^:\n]+: )?(\S+\.md)$", (ROOT / "mkdocs.yml").read_text(), re.M)
    pages = [str(path.relative_to(ROOT / "docs")) for path in (ROOT / "docs").rglob("*.md")]
    assert sorted(named) == sorted(pages)
