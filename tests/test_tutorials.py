"""Tutorials run from an empty folder to their figure, with a short training, as a script or as the page's notebook."""

from __future__ import annotations

import ast
import json
import os
import re
import runpy
import subprocess
import sys
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest

DOCS = Path(__file__).parents[1] / "docs"
PAGES = sorted(page for page in (DOCS / "tutorials").glob("*.md") if page.stem != "index")
BUILD: dict[str, Any] = runpy.run_path(str(DOCS / "tutorials" / "build.py"))

each_page = pytest.mark.parametrize("page", PAGES, ids=lambda page: page.stem)
each_notebook = pytest.mark.parametrize("name", BUILD["NOTEBOOKS"])


def require(page: Path) -> None:
    for package in re.findall(r"^(?:import|from) (\w+)", BUILD["script"](page), re.MULTILINE):
        if find_spec(package) is None:
            pytest.skip(f"{package} is not installed")


SCRIPTS = [page for page in PAGES if page.stem not in BUILD["NOTEBOOKS"]]


@pytest.mark.long
@pytest.mark.parametrize("page", SCRIPTS, ids=lambda page: page.stem)
def test_the_code_of_a_page_runs_as_one_script(page: Path, tmp_path: Path) -> None:
    require(page)
    script = tmp_path / "tutorial.py"
    script.write_text(BUILD["script"](page, short=True))
    done = subprocess.run(
        [sys.executable, script.name],
        cwd=tmp_path,
        env=os.environ | {"MPLBACKEND": "agg"},
        capture_output=True,
        text=True,
        timeout=200,
    )
    assert done.returncode == 0, done.stderr
    figures = {Path(path).name for path in BUILD["FIGURE"].findall(page.read_text())}
    assert figures
    assert figures == {path.name for path in tmp_path.glob("*.svg")}


@each_page
def test_pages_have_figures_outputs_and_short_lines(page: Path) -> None:
    text = page.read_text()
    for path in BUILD["FIGURE"].findall(text):
        figure = page.parent / path
        assert figure.stat().st_size < 60_000
    assert "```text\n```" not in text, "an output is missing: run docs/tutorials/build.py"
    for block in BUILD["code_blocks"](page):
        ast.parse(block)
        assert max(len(line) for line in block.splitlines()) <= 79
    assert 600 <= len(text.split()) <= 1400
    assert BUILD["script"](page, short=True) != BUILD["script"](page)


@each_notebook
def test_notebooks_agree_with_their_pages(name: str) -> None:
    stored = json.loads((DOCS / "tutorials" / f"{name}.ipynb").read_text())
    assert stored == BUILD["notebook"](DOCS / "tutorials" / f"{name}.md"), "run docs/tutorials/build.py --notebooks"


@pytest.mark.long
@each_notebook
def test_notebooks_run_from_a_clean_kernel(name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    client = pytest.importorskip("nbclient")
    nbformat = pytest.importorskip("nbformat")
    page = DOCS / "tutorials" / f"{name}.md"
    require(page)
    # Other libraries set it, and it overrides the backend of the kernel.
    monkeypatch.delenv("MPLBACKEND", raising=False)
    short = nbformat.reads(json.dumps(BUILD["notebook"](page, short=True)), as_version=4)
    client.NotebookClient(short, timeout=200, resources={"metadata": {"path": str(tmp_path)}}).execute()
    assert (tmp_path / f"{name}.svg").exists()
    outputs = [output for cell in short.cells for output in cell.get("outputs", [])]
    assert any("image/png" in output.get("data", {}) for output in outputs), "the figure is shown"
