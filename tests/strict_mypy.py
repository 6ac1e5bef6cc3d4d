"""Results of mypy's strict mode for a user's script."""

from __future__ import annotations

import re
import sys
from pathlib import Path
from typing import NamedTuple

import pytest

ROOT = Path(__file__).parents[1]


class TypeReport(NamedTuple):
    """Types that `reveal_type` reported in a script, without module names, and the lines with errors."""

    revealed: list[str]
    errors: list[str]


def check_types(script: str, folder: Path) -> TypeReport:
    """Write a script into a folder and run mypy on it in strict mode, with the cache of the library."""
    api = pytest.importorskip("mypy.api")
    source = folder / "script.py"
    source.write_text(script)
    limit = sys.getrecursionlimit()
    try:
        with pytest.MonkeyPatch.context() as patch:
            patch.chdir(ROOT)
            patch.setenv("MYPYPATH", str(ROOT))
            report, failure, _ = api.run([str(source), "--config-file=pyproject.toml"])
    finally:
        # mypy raises it, and leaves it there.
        sys.setrecursionlimit(limit)
    assert not failure
    return TypeReport(
        revealed=[re.sub(r"\w+\.(?=\w)", "", actual) for actual in re.findall(r'Revealed type is "(.*)"', report)],
        errors=[line for line in report.splitlines() if "error:" in line],
    )
