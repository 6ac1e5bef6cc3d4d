"""The script that measures how durations grow with the number of rows reports every operation at every size."""

from __future__ import annotations

import json
import math
from pathlib import Path

import pytest

from benchmarks.scripts import growth


def test_every_workload_is_timed_at_every_size(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    pytest.importorskip("matplotlib")
    plot, times = tmp_path / "growth.svg", tmp_path / "growth.json"
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(growth, "BUDGET_S", 0.0)
        assert growth.main(["--rows", "10000", "--json", str(times), "--plot", str(plot)]) == 0
    records = json.loads(times.read_text())
    assert len(records) >= 14
    for record in records.values():
        assert sorted(record["seconds"], key=int) == ["1000", "10000"]
        assert all(seconds > 0 for seconds in record["seconds"].values())
    table = capsys.readouterr().out
    assert all(name in table for name in records)
    assert plot.read_text().startswith("<?xml")


def test_exponents_are_computed_from_the_total_time() -> None:
    per_row = {"unit": "row", "seconds": {1000: 1e-9, 10_000: 1e-9}}
    assert growth.exponent(per_row) == 1.0
    per_call = {"unit": "call", "seconds": {1000: 1e-6, 10_000: 1e-6}}
    assert growth.exponent(per_call) == 0.0
    squared = {"unit": "row", "seconds": {1000: 1e-9, 10_000: 1e-8}}
    assert growth.exponent(squared) == pytest.approx(2.0)
    assert math.isnan(growth.exponent({"unit": "row", "seconds": {1000: 1e-9}}))
