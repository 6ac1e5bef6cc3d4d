"""Named values that are neither batches nor dicts: named tuples, dataclasses, batches of other libraries."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import numpy as np
import pytest

from samplebatch import Batch, ReplayBuffer
from samplebatch.errors import ColumnTypeError


class Pose(NamedTuple):
    place: Any
    angle: Any


@dataclass
class Sight:
    camera: Any
    pose: Any = field(default_factory=lambda: Pose(0, 0.5))


class Shelf:
    """A batch of another library."""

    def __init__(self, **stored: Any) -> None:
        self.held = stored

    def keys(self) -> Iterator[str]:
        return iter(self.held)

    def items(self) -> Iterator[tuple[str, Any]]:
        return iter(self.held.items())


RECORDS = [Pose([1, 2], [0.5, 1.5]), Sight([1, 2], Pose([1, 2], [3, 4])), Shelf(a=[1, 2], b={"c": [3, 4]})]
NESTED = [
    {"place": [1, 2], "angle": [0.5, 1.5]},
    {"camera": [1, 2], "pose": {"place": [1, 2], "angle": [3, 4]}},
    {"a": [1, 2], "b": {"c": [3, 4]}},
]


@pytest.mark.parametrize(("record", "values"), list(zip(RECORDS, NESTED, strict=True)))
def test_records_are_accepted_in_place_of_dicts(record: Any, values: dict[str, Any]) -> None:
    expected = Batch(values)
    assert Batch(record) == expected
    assert Batch(n=record).n == expected
    assigned = Batch()
    assigned.n = assigned["m"] = record
    assigned.update(record)
    assert assigned.n == assigned.m == expected
    assert assigned.keys() >= expected.keys()
    assert Batch([record, record]) == Batch.stack([record, values]) == Batch.stack([values, values])
    assert Batch.cat([record, expected]) == Batch.cat([values, values])
    assert Batch.cat([{"n": record}, {"n": values}]).n == Batch.cat([values, values])
    rows = Batch.cat([expected, expected]).empty_()
    rows[1:3] = record
    assert rows[1:3] == expected
    assert len(Batch.cat([{"n": record}, {"x": [1, 2]}]).x) == 4


def test_records_among_other_values_are_objects() -> None:
    assert Batch(a=[Pose(1, 2), None]).a.tolist() == [Pose(1, 2), None]
    assert Batch(a=[Pose(1, 2), {"place": 3, "angle": 4}]).a == Batch(place=[1, 3], angle=[2, 4])
    assert Batch(kind=Pose).kind is Pose


def test_arrays_with_named_entries_are_stored_as_arrays() -> None:
    pandas = pytest.importorskip("pandas")
    assert Batch(a=pandas.Series([1, 2])).a.tolist() == [1, 2]


def test_names_of_a_record_must_be_strings() -> None:
    with pytest.raises(ColumnTypeError, match="names must be strings, got int"):
        Batch(type("Odd", (Shelf,), {"items": lambda self: [(1, 2)]})())


def test_tianshou_batches_are_accepted_as_steps() -> None:
    theirs = pytest.importorskip("tianshou.data").Batch
    obs = {"camera": np.zeros((2, 3)), "keys": np.arange(2)}
    rows = theirs(
        obs=obs, act=[0, 1], rew=[1.0, 2.0], terminated=[False, True], truncated=[False] * 2, info={"x": [7, 8]}
    )
    assert Batch(rows) == Batch(rows.to_dict())
    assert Batch(n=rows[0]).n.obs["keys"] == 0
    buffer = ReplayBuffer(4)
    for row in rows:
        buffer.add(row)
    assert buffer[:].info.x.tolist() == [7, 8]
    assert buffer[:].obs["keys"].tolist() == [0, 1]


def test_a_batch_has_tianshous_protocol() -> None:
    protocol = pytest.importorskip("tianshou.data.batch").BatchProtocol
    assert isinstance(Batch(a=1), protocol)
    assert not isinstance({"a": 1}, protocol)
    assert "__getattr__" not in dir(Batch)
