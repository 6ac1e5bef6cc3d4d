"""Arrow files whose columns are viewed by a plan, against the same files read as tables, on random batches."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest

from samplebatch import ActionUnit, SampleBatch, load, write_arrow
from samplebatch.storage.tables.arrow import ArrowTable
from tests.batch.every_kind import NUMBERS, every_kind


def random_batch(rng: np.random.Generator) -> SampleBatch:
    """Draw columns of every kind with flat and nested names; return a slice of their rows."""
    kinds = every_kind(int(rng.integers(0, 9)))
    if rng.random() < 0.7:
        # Columns of other kinds are never viewed.
        kinds = {name: values for name, values in kinds.items() if name.partition(" ")[2] in NUMBERS}
    names = rng.permutation(list(kinds))[: rng.integers(1, 7)].tolist()
    columns: dict[str, Any] = {name: kinds[name] for name in names}
    nested = [name for name in names if rng.random() < 0.3]
    if nested:
        columns["obs"] = {str(position): columns.pop(name) for position, name in enumerate(nested)}
    batch = SampleBatch(columns)
    if rng.random() < 0.5:
        batch.action_unit = ActionUnit("clip", -1.0, 1.0)
    start = int(rng.integers(0, 3))
    return batch[start:] if rng.random() < 0.5 else batch


@pytest.mark.parametrize("seed", range(100))
def test_views_of_an_arrow_file_equal_its_tables(seed: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    rng = np.random.default_rng(seed)
    batch = random_batch(rng)
    path = tmp_path / "batch.arrow"
    write_arrow(batch, path, compression=str(rng.choice(["none", "none", "lz4"])))
    names = batch.column_names
    columns = [*rng.permutation(list(names))[: rng.integers(1, len(names) + 1)]] if rng.random() < 0.5 else None
    viewed = load(path, columns=columns, allow_pickle=True)
    with monkeypatch.context() as patched:
        patched.setattr(ArrowTable, "view", lambda table, chosen: None)
        tables = load(path, columns=columns, allow_pickle=True)
    assert viewed == tables
    assert viewed.column_names == tables.column_names
    assert viewed.action_unit == tables.action_unit == batch.action_unit
    assert (viewed.count, viewed._nested) == (tables.count, tables._nested)
    for name in viewed.column_names:
        left, right = viewed._all()[name], tables._all()[name]
        assert (type(left), left.dtype, left.row_shape) == (type(right), right.dtype, right.row_shape), name
    if columns is None:
        assert viewed == batch
