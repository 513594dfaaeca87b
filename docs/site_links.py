"""A hook of mkdocs: README opens the site, and a link to a file outside of docs/ becomes the file's path.

The site has the pages of docs/ and of the hostfiles. In the repository the same links lead to the files.
"""

from __future__ import annotations

import posixpath
import re
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parent.parent
README = ROOT / "README.md"
# Pages outside of docs/.
ELSEWHERE = {"README.md": "index.md", "hostfiles/README.md": "hostfiles.md"}
_LINK = re.compile(r"(?<!!)\[([^\]]*)\]\(((?:\.\./)+[^)#]*)(#[^)]*)?\)")


def on_files(files: Any, *, config: Any) -> None:
    """Called by mkdocs with the files of docs/."""
    from mkdocs.structure.files import File

    source = ROOT / "hostfiles/README.md"
    files.append(File.generated(config, "hostfiles.md", abs_src_path=str(source)))


def on_page_markdown(markdown: str, *, page: Any, **_: object) -> str:
    """Called by mkdocs with the text of each page."""
    if page.file.src_uri == "index.md":
        markdown = f"{readme()}\n#{markdown}"
    elif page.file.src_uri in ELSEWHERE.values():
        markdown = markdown.replace("](../docs/", "](")
    return without_links_out(markdown, page.file.src_uri)


def readme() -> str:
    """README's text, with its links as those of a page in docs/."""
    text = re.sub(r"\]\((?!https?:|#)", "](../", README.read_text(encoding="utf-8"))
    return text.replace("](../docs/", "](")


def without_links_out(markdown: str, page: str) -> str:
    """The text of the page at docs/PAGE, with "text (`path`)" for each link to a file outside of docs/."""

    def replaced(link: re.Match[str]) -> str:
        text, target = link[1], link[2]
        path = posixpath.normpath(posixpath.join("docs", posixpath.dirname(page), target))
        if path.startswith("docs/"):
            return link[0]
        if path in ELSEWHERE:
            own = posixpath.relpath(ELSEWHERE[path], posixpath.dirname(page) or ".")
            return f"[{text}]({own}{link[3] or ''})"
        is_path = text.strip("`") in (path, posixpath.basename(path))
        return f"`{path}`" if is_path else f"{text} (`{path}`)"

    return _LINK.sub(replaced, markdown)
