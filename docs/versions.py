"""Build the site of this version beside those of other versions.

    python docs/versions.py public     # writes public/0.1/, public/versions.json and public/index.html

The header of each page lists the versions of `versions.json`; `index.html` redirects to the newest version. Serve the
folder with any web server.
"""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).parents[1]
REDIRECT = """<!doctype html>
<meta charset="utf-8">
<meta http-equiv="refresh" content="0; url={0}/">
<a href="{0}/">{0}</a>
"""


def current_version() -> str:
    """Return the version of the package in this checkout."""
    source = (ROOT / "samplebatch" / "__init__.py").read_text()
    match = re.search(r'^__version__ = "([\d.]+)', source, re.MULTILINE)
    if match is None:
        raise ValueError("samplebatch/__init__.py must have a line such as '__version__ = \"0.1.0\"'")
    return match[1]


def listed(versions: list[dict[str, object]], version: str) -> list[dict[str, object]]:
    """Add a version to the list of versions, newest first; the newest has the alias `latest`.

    >>> [entry["version"] for entry in listed([{"version": "0.9", "title": "0.9.2", "aliases": []}], "0.10.0")]
    ['0.10', '0.9']
    """
    minor = version.rpartition(".")[0]
    titles = {str(entry["version"]): str(entry["title"]) for entry in versions} | {minor: version}
    order = sorted(titles, key=lambda name: [int(part) for part in name.split(".")], reverse=True)
    aliases = {order[0]: ["latest"]}
    return [{"version": name, "title": titles[name], "aliases": aliases.get(name, [])} for name in order]


def main(folder: str) -> None:
    """Build this version into its folder and update the list of versions."""
    public, version = Path(folder), current_version()
    minor = version.rpartition(".")[0]
    command = [sys.executable, "-m", "mkdocs", "build", "--strict", "--quiet", "-d", str(public.resolve() / minor)]
    settings = {"SITE_VERSIONS": "mike", "NO_MKDOCS_2_WARNING": "1"}
    subprocess.run(command, check=True, cwd=ROOT, env=os.environ | settings)
    file = public / "versions.json"
    versions = listed(json.loads(file.read_text()) if file.exists() else [], version)
    file.write_text(json.dumps(versions, indent=2) + "\n")
    (public / "index.html").write_text(REDIRECT.format(versions[0]["version"]))


if __name__ == "__main__":
    main(*sys.argv[1:])
