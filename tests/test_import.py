"""`import samplebatch` imports few modules, and public names are resolved on first access."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from types import ModuleType

import pytest

import samplebatch
import samplebatch.batch
import samplebatch.column
import samplebatch.learn
import samplebatch.rollout
import samplebatch.transport

REPORT = "; import json, sys; print(json.dumps(sorted(sys.modules)))"
TIMED = """
import time
times = [time.perf_counter()]
import numpy, pyarrow
times.append(time.perf_counter())
{}
times.append(time.perf_counter())
print((times[2] - times[0]) / (times[1] - times[0]))
"""


def run_python(code: str) -> str:
    return subprocess.run([sys.executable, "-c", code], check=True, capture_output=True, text=True).stdout


def test_import_loads_nothing_beyond_numpy_and_pyarrow() -> None:
    base = set(json.loads(run_python("import numpy, pyarrow" + REPORT)))
    ours = set(json.loads(run_python("from samplebatch import MultiAgentBatch, SampleBatch" + REPORT)))
    light = {"samplebatch", "numpy", *sys.stdlib_module_names}
    added = {name for name in ours - base if name.split(".")[0] not in light}
    assert not added
    assert not {"torch", "numba", "pandas", "polars", "pyarrow.compute", "pyarrow.parquet", "pyarrow.dataset"} & ours


def test_using_a_batch_loads_no_optional_library() -> None:
    code = "from samplebatch import SampleBatch; b = SampleBatch(obs=[[1.0], [2.0]]); b[:1].copy().to_arrow()"
    loaded = set(json.loads(run_python(code + REPORT)))
    assert not {"torch", "numba", "pandas", "polars", "pyarrow.parquet", "pyarrow.dataset", "pyarrow.flight"} & loaded


@pytest.mark.parametrize(
    ("statement", "bound"),
    [("import samplebatch", 1.4), ("from samplebatch import MultiAgentBatch, SampleBatch, concat_samples", 1.8)],
)
def test_import_time_is_close_to_that_of_the_dependencies(
    statement: str, bound: float, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    # Compiled modules of both, whatever the settings of this process: the first of the runs compiles them.
    monkeypatch.delenv("PYTHONDONTWRITEBYTECODE", raising=False)
    monkeypatch.setenv("PYTHONPYCACHEPREFIX", str(tmp_path))
    # Both in one process, one right after the other: a busy machine slows both alike.
    ratios = [float(run_python(TIMED.format(statement))) for _ in range(7)]
    assert min(ratios) < bound


DOORS = (samplebatch, samplebatch.batch, samplebatch.column, samplebatch.rollout, samplebatch.transport)


@pytest.mark.parametrize(
    ("door", "name"),
    [pytest.param(d, name, id=f"{d.__name__}.{name}") for d in DOORS for name in d.__all__],
)
def test_public_names_resolve(door: ModuleType, name: str) -> None:
    assert getattr(door, name) is getattr(door, name)
    assert name in dir(door)


def test_a_misspelt_name_lists_similar_names() -> None:
    with pytest.raises(AttributeError, match="SampleBatch"):
        _ = samplebatch.SampelBatch
    with pytest.raises(ImportError, match="SampelBatch"):
        from samplebatch import SampelBatch  # noqa: F401


def test_the_learning_side_does_not_load_torch_before_a_public_name_is_used() -> None:
    code = "import samplebatch.learn, samplebatch.loggers.training_log; hasattr(samplebatch.learn, '__wrapped__')"
    assert "torch" not in json.loads(run_python(code + REPORT))
    with pytest.raises(AttributeError, match="has no attribute 'DQM'; did you mean 'DQN'"):
        _ = samplebatch.learn.DQM


def test_version_is_a_release() -> None:
    assert all(part.isdigit() for part in samplebatch.__version__.split(".")[:2])
