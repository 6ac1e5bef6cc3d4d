"""`import samplebatch` is light, and its names resolve when they are first asked for."""

from __future__ import annotations

import json
import subprocess
import sys

import pytest

import samplebatch

REPORT = "; import json, sys; print(json.dumps(sorted(sys.modules)))"
TIMED = "import time; began = time.perf_counter(); {}; print(time.perf_counter() - began)"


def run_python(code: str) -> str:
    return subprocess.run([sys.executable, "-c", code], check=True, capture_output=True, text=True).stdout


def test_import_loads_nothing_beyond_numpy_and_pyarrow() -> None:
    base = set(json.loads(run_python("import numpy, pyarrow" + REPORT)))
    ours = set(json.loads(run_python("import samplebatch" + REPORT)))
    added = {name for name in ours - base if name.split(".")[0] not in {"samplebatch", *sys.stdlib_module_names}}
    assert not added
    assert not {"torch", "numba", "pandas", "polars", "pyarrow.compute", "pyarrow.parquet", "pyarrow.dataset"} & ours


def test_using_a_batch_loads_no_optional_library() -> None:
    code = "from samplebatch import SampleBatch; b = SampleBatch(obs=[[1.0], [2.0]]); b[:1].copy().to_arrow()"
    loaded = set(json.loads(run_python(code + REPORT)))
    assert not {"torch", "numba", "pandas", "polars", "pyarrow.parquet", "pyarrow.dataset", "pyarrow.flight"} & loaded


def test_import_takes_under_one_and_a_half_times_its_dependencies() -> None:
    base, ours = [], []
    for _ in range(7):
        base.append(float(run_python(TIMED.format("import numpy, pyarrow"))))
        ours.append(float(run_python(TIMED.format("import samplebatch"))))
    assert min(ours) < 1.5 * min(base)


@pytest.mark.parametrize("name", samplebatch.__all__)
def test_public_names_resolve(name: str) -> None:
    assert getattr(samplebatch, name) is getattr(samplebatch, name)
    assert name in dir(samplebatch)


def test_a_misspelt_name_lists_the_near_ones() -> None:
    with pytest.raises(AttributeError, match="SampleBatch"):
        _ = samplebatch.SampelBatch
    with pytest.raises(ImportError, match="SampelBatch"):
        from samplebatch import SampelBatch  # noqa: F401


def test_version_is_a_release() -> None:
    assert all(part.isdigit() for part in samplebatch.__version__.split(".")[:2])
