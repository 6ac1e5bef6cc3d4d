"""Check every link of the built site: pages, anchors, pictures, styles and scripts.

    python docs/links.py site      # exits with 1 and lists the broken links

Links to other hosts are counted, not followed.
"""

from __future__ import annotations

import sys
from html.parser import HTMLParser
from pathlib import Path
from urllib.parse import unquote, urlsplit


class Page(HTMLParser):
    """Anchors and links of an HTML page."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.anchors: set[str] = set()
        self.links: list[str] = []
        self.feed(text)

    def handle_starttag(self, tag: str, attributes: list[tuple[str, str | None]]) -> None:
        """Collect the ids and the links of a tag."""
        for name, value in attributes:
            if value is None:
                continue
            if name == "id" or (name == "name" and tag == "a"):
                self.anchors.add(value)
            elif name in {"href", "src"} or (name == "content" and value.endswith(".png")):
                self.links.append(value)


def check(site: Path) -> tuple[list[str], dict[str, int]]:
    """Return the broken links of a built site, and the number of links by kind."""
    pages = {path.resolve(): Page(path.read_text(encoding="utf-8")) for path in sorted(site.rglob("*.html"))}
    root = site.resolve()
    broken: list[str] = []
    counts = {"pages": len(pages), "internal": 0, "with an anchor": 0, "to other hosts": 0}
    for path, page in pages.items():
        for link in page.links:
            parts = urlsplit(link)
            if parts.scheme or parts.netloc:
                counts["to other hosts"] += parts.scheme != "data"
                continue
            counts["internal"] += 1
            where = path
            if parts.path:
                # The page of an unknown address uses absolute paths, as it is shown at any depth.
                folder = root if parts.path.startswith("/") else path.parent
                where = (folder / unquote(parts.path).lstrip("/")).resolve()
                if where.is_dir():
                    where /= "index.html"
            name = f"{path.relative_to(root)}: {link}"
            if not where.is_file():
                broken.append(f"{name}: no such file")
            elif parts.fragment and where in pages:  # a picture's fragment names its theme
                counts["with an anchor"] += 1
                # The theme's own scripts use anchors that start with two underscores.
                if unquote(parts.fragment) not in pages[where].anchors and not parts.fragment.startswith("__"):
                    broken.append(f"{name}: no such anchor")
    return broken, counts


def main(folder: str) -> str | None:
    """Check a site; return an error message."""
    broken, counts = check(Path(folder))
    if not counts["pages"]:
        return f"{folder} must contain a built site, got no pages"
    print(", ".join(f"{number} {kind}" for kind, number in counts.items()) + f", {len(broken)} broken")
    return "\n".join(broken) or None


if __name__ == "__main__":
    sys.exit(main(*sys.argv[1:]))
