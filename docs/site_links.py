"""A hook of mkdocs: a link of a page to a file outside of docs/ becomes the file's path in the repository.

The site has the pages alone. In the repository the same links lead to the files.
"""

from __future__ import annotations

import posixpath
import re
from typing import Any

_LINK = re.compile(r"(?<!!)\[([^\]]*)\]\(((?:\.\./)+[^)#]*)(#[^)]*)?\)")


def on_page_markdown(markdown: str, *, page: Any, **_: object) -> str:
    """Called by mkdocs with the text of each page."""
    return without_links_out(markdown, page.file.src_uri)


def without_links_out(markdown: str, page: str) -> str:
    """The text of the page at docs/PAGE, with "text (`path`)" for each link to a file outside of docs/."""

    def replaced(link: re.Match[str]) -> str:
        text, target = link[1], link[2]
        path = posixpath.normpath(posixpath.join("docs", posixpath.dirname(page), target))
        if path.startswith("docs/"):
            return link[0]
        is_path = text.strip("`") in (path, posixpath.basename(path))
        return f"`{path}`" if is_path else f"{text} (`{path}`)"

    return _LINK.sub(replaced, markdown)
