"""Run tutorials; write their outputs, figures and notebooks.

    python docs/tutorials/build.py ppo-loop      # minutes: run the page's code, update its outputs and figures
    python docs/tutorials/build.py --notebooks   # seconds: write the notebooks from the pages

The ```python blocks of a page form one script, a ```text block is the output of the preceding block, and
`<!-- short: STEPS, SEEDS = 4_000, [0] -->` is the line with which tests replace the settings of the page.
"""

from __future__ import annotations

import argparse
import json
import os
import re
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

HERE = Path(__file__).parent
FIGURES = HERE.parent / "images" / "tutorials"
NOTEBOOKS = ("ppo-loop", "offline", "grpo")
BLOCK = re.compile(r"^```(python|text)\n(.*?)^```\n", re.MULTILINE | re.DOTALL)
FIGURE = re.compile(r"\]\((\.\./images/tutorials/\S+\.svg)\)")
MARK = "#### output of block"


def code_blocks(page: Path) -> list[str]:
    """Return the Python blocks of a page."""
    return [body for language, body in BLOCK.findall(page.read_text()) if language == "python"]


def shorten(page: Path, code: str) -> str:
    """Replace the line that sets the length of the training by the line that tests use."""
    short = re.search(r"^<!-- short: ((.+) = .+) -->$", page.read_text(), re.MULTILINE)
    if short is None:
        raise ValueError(f"{page.name} must have a line such as '<!-- short: STEPS = 4_000 -->'")
    return re.sub(rf"^{re.escape(short[2])} = .+$", short[1], code, count=1, flags=re.MULTILINE)


def script(page: Path, *, short: bool = False) -> str:
    """Join the blocks of a page."""
    code = "\n\n".join(code_blocks(page))
    return shorten(page, code) if short else code


def notebook(page: Path, *, short: bool = False) -> dict[str, Any]:
    """Convert a page to a notebook: prose without relative links, code with the outputs and figures of the page."""
    cells: list[dict[str, Any]] = []

    def show(figures: str) -> None:
        for path in FIGURE.findall(figures):
            drawing = (page.parent / path).read_text().splitlines(keepends=True)
            data = {"data": {"image/svg+xml": drawing}, "metadata": {}, "output_type": "display_data"}
            cells[-1]["outputs"].append(data)

    def add(kind: str, text: str, **fields: Any) -> None:
        if text.strip():
            name = f"cell-{len(cells):02d}"
            source = text.strip().splitlines(keepends=True)
            cells.append({"cell_type": kind, "id": name, "metadata": {}, **fields, "source": source})

    text = page.read_text()
    end = 0
    for block in BLOCK.finditer(text):
        prose = text[end : block.start()]
        show(prose)
        add("markdown", _without_links(prose))
        end = block.end()
        language, body = block.groups()
        if language == "python":
            add("code", shorten(page, body) if short else body, execution_count=None, outputs=[])
        else:
            lines = body.splitlines(keepends=True)
            cells[-1]["outputs"] = [{"name": "stdout", "output_type": "stream", "text": lines}]
    show(text[end:])
    add("markdown", _without_links(text[end:]))
    kernel = {"display_name": "Python 3", "language": "python", "name": "python3"}
    return {"cells": cells, "metadata": {"kernelspec": kernel}, "nbformat": 4, "nbformat_minor": 5}


def _without_links(text: str) -> str:
    text = re.sub(r"^(<!--.*?-->|!\[[^\]]*\]\([^)]*\)(\{[^}]*\})?)\n", "", text, flags=re.MULTILINE)
    return re.sub(r"\[([^\]]+)\]\((?!https?:)[^)]+\)", r"\1", text)


def write_notebooks() -> None:
    """Write the notebooks from their pages."""
    for name in NOTEBOOKS:
        text = json.dumps(notebook(HERE / f"{name}.md"), indent=1, ensure_ascii=False)
        (HERE / f"{name}.ipynb").write_text(text + "\n")


def run(page: Path) -> None:
    """Run the script of a page in an empty folder; write its outputs into the page and copy its figures."""
    parts = [
        f'if __name__ == "__main__":\n    print("{MARK} {number}", flush=True)\n\n{block}'
        for number, block in enumerate(code_blocks(page))
    ]
    style = {"MPLBACKEND": "agg", "MATPLOTLIBRC": str(HERE / "matplotlibrc")}
    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder, f"{page.stem.replace('-', '_')}.py")
        file.write_text("\n\n".join(parts))
        start = time.monotonic()
        command, env = [sys.executable, file.name], os.environ | style
        done = subprocess.run(command, cwd=folder, env=env, stdout=subprocess.PIPE, text=True, check=True)
        print(f"{page.stem}: {time.monotonic() - start:.0f} s")
        for figure in sorted(Path(folder).glob("*.svg")):
            drawing = re.sub(r" *<metadata>.*?</metadata>\n", "", figure.read_text(), flags=re.DOTALL)  # has the date
            (FIGURES / figure.name).write_text(drawing)
    outputs = re.split(rf"^{MARK} \d+\n", done.stdout, flags=re.MULTILINE)[1:]
    number = -1

    def renew(block: re.Match[str]) -> str:
        nonlocal number
        if block[1] == "python":
            number += 1
            return block[0]
        return f"```text\n{outputs[number]}```\n"

    page.write_text(BLOCK.sub(renew, page.read_text()))
    print(done.stdout)


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("pages", nargs="*", help="names of pages to run, without .md")
    parser.add_argument("--notebooks", action="store_true", help="write the notebooks from their pages")
    options = parser.parse_args()
    for name in options.pages:
        run(HERE / f"{name}.md")
    if options.notebooks:
        write_notebooks()
