"""`import.*`: import times of the library, and of its two dependencies (`bare`), in a new interpreter."""

from __future__ import annotations

import subprocess
import sys
from typing import Any

from benchmarks.harness import Row, Way, row

_PROGRAM = """
from time import perf_counter
start = perf_counter()
{statement}
print(perf_counter() - start)
"""


def _importing(statement: str) -> Way:
    command = [sys.executable, "-c", _PROGRAM.format(statement=statement)]

    def seconds(_: Any) -> float:
        return float(subprocess.run(command, check=True, capture_output=True, text=True).stdout)

    return Way(lambda *_: None, seconds, clocked=True)


def _import(name: str, statement: str) -> Row:
    return row(
        f"import.{name}",
        lambda: None,
        view=None,
        bar=1.5,
        ours=_importing(statement),
        bare=_importing("import numpy, pyarrow"),
    )


ROWS = [
    _import("package", "import samplebatch"),
    _import("sample_batch", "from samplebatch import SampleBatch"),
    _import("multi_agent_batch", "from samplebatch import MultiAgentBatch, concat_samples"),
]
