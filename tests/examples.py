"""Examples of pages: fenced blocks and their doctests.

`python tests/examples.py README.md` runs a page's Python examples with the installed package, in an empty folder.
"""

from __future__ import annotations

import doctest
import os
import re
import sys
import tempfile
from importlib.util import find_spec
from pathlib import Path

OPTIONS = doctest.NORMALIZE_WHITESPACE | doctest.ELLIPSIS


def blocks(page: Path, language: str) -> list[tuple[int, list[str]]]:
    """Return the fenced blocks of a language with their first lines, counted from 0.

    Blocks under `<!-- needs: minari -->` are omitted if that package is missing.
    """
    matches: list[tuple[int, list[str]]] = []
    fence: str | None = None
    above = ""
    for number, line in enumerate(page.read_text(encoding="utf-8").splitlines()):
        if fence is not None and line.strip() == "```":
            fence = None
        elif fence is None and line.startswith("```"):
            fence = line[3:].strip() if has_packages(above) else ""
            if fence == language:
                matches.append((number + 1, []))
        elif fence == language:
            matches[-1][1].append(line)
        above = line
    return matches


def has_packages(above: str) -> bool:
    """Return whether the packages that the line above a block requires are installed."""
    required = re.fullmatch(r"<!-- needs: (.+) -->", above)
    return required is None or all(find_spec(package) for package in required[1].split(", "))


def python_examples(page: Path) -> doctest.DocTest:
    """Return the Python blocks of a page as one doctest with the page's line numbers."""
    lines: list[str] = []
    for start, block in blocks(page, "python"):
        assert block[0].startswith(">>>"), f"{page.name}:{start + 1}: a python block starts with '>>>'"
        lines += [""] * (start - len(lines)) + block
    return doctest.DocTestParser().get_doctest("\n".join(lines) + "\n", {}, page.name, str(page), 0)


def failures(examples: doctest.DocTest) -> str:
    """Run examples; return the report of those that failed."""
    report: list[str] = []
    doctest.DocTestRunner(verbose=False, optionflags=OPTIONS).run(examples, out=report.append)
    return "".join(report)


def main(*pages: str) -> str | None:
    """Run the examples of pages with the installed package; return an error message."""
    import samplebatch

    paths = [Path(page).resolve() for page in pages]
    assert Path(samplebatch.__file__).is_relative_to(sys.prefix), f"not an installed package: {samplebatch.__file__}"
    for page in paths:
        examples = python_examples(page)
        assert examples.examples, f"{page.name} must have Python examples"
        with tempfile.TemporaryDirectory() as folder:
            os.chdir(folder)
            report = failures(examples)
        if report:
            return report
        print(f"{page.name}: {len(examples.examples)} examples passed with samplebatch {samplebatch.__version__}")
    return None


if __name__ == "__main__":
    sys.exit(main(*sys.argv[1:]))
