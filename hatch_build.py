"""Metadata of the package that depends on the address of the repository: REPOSITORY_URL at build time."""

from __future__ import annotations

import os
import re
from pathlib import Path
from typing import Any

from hatchling.metadata.plugin.interface import MetadataHookInterface

_LINK = re.compile(r"(!?)\[([^\]]*)\]\((?!https?:|#)([^)]+)\)")


class CustomMetadataHook(MetadataHookInterface):
    """Set the description, whose links work outside the repository, and the URLs."""

    def update(self, metadata: dict[str, Any]) -> None:
        """Add `readme` and, with an address, `urls`."""
        address = os.environ.get("REPOSITORY_URL", "").rstrip("/")
        text = (Path(self.root) / "README.md").read_text(encoding="utf-8")
        metadata["readme"] = {"content-type": "text/markdown", "text": absolute_links(text, address)}
        if address:
            metadata["urls"] = {
                "Repository": address,
                "Documentation": os.environ.get("SITE_URL") or f"{address}/blob/main/docs/index.md",
                "Changelog": f"{address}/blob/main/CHANGELOG.md",
                "Issues": f"{address}/issues",
            }


def absolute_links(text: str, address: str) -> str:
    """Return Markdown with links to the repository; without an address, with the words of links alone."""

    def replace(match: re.Match[str]) -> str:
        picture, words, path = match.groups()
        if not address:
            return "" if picture else words
        return f"{picture}[{words}]({address}/{'raw' if picture else 'blob'}/main/{path})"

    return _LINK.sub(replace, text)
