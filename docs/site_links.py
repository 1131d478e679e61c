"""A hook of mkdocs: links and pictures outside of docs become links to the repository.

SITE_REPOSITORY is its address on the web, such as GitHub's. Without one such a link is plain
text: a site that is built from a checkout does not know where that is published.
"""

from __future__ import annotations

import os
import re
from pathlib import Path
from typing import Any

from mkdocs.exceptions import PluginError

DOCS = Path(__file__).parent
ROOT = DOCS.parent
LINK = re.compile(r"!?\[((?:[^\[\]]|\[[^\]]*\])*)\]\(([^)#\s:]+)(#[^)\s]*)?\)")


def on_page_markdown(markdown: str, *, page: Any, **_: Any) -> str:
    """Raise PluginError where a link leads to no file of the checkout."""
    folder = Path(page.file.abs_src_path).parent

    def outward(link: re.Match[str]) -> str:
        text, target, heading = link[1], link[2], link[3] or ""
        path = (folder / target).resolve()
        if path.is_relative_to(DOCS):
            return link[0]  # mkdocs checks these
        if not path.exists():
            raise PluginError(f"{page.file.src_uri} links to {target}, which does not exist")
        repository = os.environ.get("SITE_REPOSITORY", "").rstrip("/")
        where = f"{repository}/blob/main/{path.relative_to(ROOT).as_posix()}{heading}"
        return f"[{text}]({where})" if repository else text

    return LINK.sub(outward, markdown)
