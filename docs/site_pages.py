"""A hook of MkDocs. It adds pages at the root of the repository to the site, replaces links to other files by their
text, and makes code blocks scrollable from the keyboard.

https://www.mkdocs.org/user-guide/configuration/#hooks
"""

from __future__ import annotations

import posixpath
import re
from functools import partial
from pathlib import Path
from typing import Any

from mkdocs.structure.files import File, Files

ROOT = Path(__file__).parents[1]
PAGES = ("CHANGELOG.md", "CONTRIBUTING.md", "SECURITY.md")

_LINK = re.compile(r"(?<!!)\[([^\]]*)\]\(([^)\s#]+)(#[^)\s]*)?\)")


def on_files(files: Files, config: Any) -> Files:
    """Add the pages at the root; their links into docs/ stay within the site."""
    for name in PAGES:
        text = (ROOT / name).read_text(encoding="utf-8").replace("](docs/", "](")
        files.append(File.generated(config, name, content=text))
    return files


def on_page_markdown(markdown: str, page: Any, files: Files, **_: Any) -> str:
    """Point links that leave docs/ at a page at the root, or replace them by their text."""
    return _LINK.sub(partial(_within_the_site, folder=posixpath.dirname(page.file.src_uri), files=files), markdown)


def on_page_content(html: str, **_: Any) -> str:
    """Make code blocks focusable, so that wide ones can be scrolled from the keyboard (WCAG 2.1.1)."""
    return html.replace("<pre>", '<pre tabindex="0">')


def _within_the_site(link: re.Match[str], folder: str, files: Files) -> str:
    text, target, heading = link[1], link[2], link[3] or ""
    if "://" in target:
        return link[0]
    path = posixpath.normpath(posixpath.join(folder, target))
    if path.startswith("../"):
        root = path.removeprefix("../")
        return f"[{text}]({posixpath.relpath(root, folder or '.')}{heading})" if root in PAGES else text
    return link[0] if path.endswith(".md") or files.get_file_from_path(path) else text
