"""When two batches are equal."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from samplebatch import MultiAgentBatch, SampleBatch
from tests.batch.every_kind import every_kind, in_sequences, with_every_kind
from tests.optional import torch


def test_batches_of_equal_columns_are_equal() -> None:
    assert with_every_kind(4) == with_every_kind(4)
    assert with_every_kind(4)[1:3] == with_every_kind(4)[:3][1:]
    assert SampleBatch(every_kind(4))[1:3] == SampleBatch(every_kind(4)).take([1, 2])
    assert SampleBatch() == SampleBatch()


def test_the_order_of_columns_does_not_matter() -> None:
    assert SampleBatch(a=[1], b=[2]) == SampleBatch(b=[2], a=[1])


@pytest.mark.parametrize("dtype", [np.float16, np.float32, np.float64, np.complex64])
def test_nan_equals_nan(dtype: Any) -> None:
    values = np.array([1, np.nan, np.inf], dtype)
    assert SampleBatch(a=values) == SampleBatch(a=values.copy())
    assert SampleBatch(a=values) != SampleBatch(a=np.nan_to_num(values))
    assert SampleBatch(a=torch.from_numpy(values)) == SampleBatch(a=torch.from_numpy(values.copy()))
    dates = np.array(["NaT", "2020-01-01"], "M8[D]")
    assert SampleBatch(a=dates) == SampleBatch(a=dates.copy())


@pytest.mark.parametrize(
    ("mine", "theirs"),
    [
        ({"a": [1, 2]}, {"a": [1, 3]}),
        ({"a": [1, 2]}, {"a": [1, 2, 3]}),
        ({"a": [1, 2]}, {"b": [1, 2]}),
        ({"a": [1, 2]}, {"a": [1, 2], "b": [1, 2]}),
        ({"a": np.array([1, 2], np.int32)}, {"a": np.array([1, 2], np.int64)}),
        ({"a": np.array([1, 2])}, {"a": np.array([1.0, 2.0])}),
        ({"a": np.array([0, 1])}, {"a": np.array([False, True])}),
        ({"a": ["a"]}, {"a": [b"a"]}),
        ({"a": ["a", None]}, {"a": ["a", ""]}),
        ({"a": np.array([1], "M8[s]")}, {"a": np.array([1], "M8[ms]")}),
        ({"a": np.zeros(2)}, {"a": np.zeros((2, 1))}),
        ({"a": np.zeros((0, 2))}, {"a": np.zeros((0, 3))}),
        ({"a": np.zeros(2)}, {"a": torch.zeros(2, dtype=torch.float64)}),
        ({"a": torch.zeros(2)}, {"a": torch.zeros(2, dtype=torch.float64)}),
        ({"infos": [{}, {}]}, {"infos": [{}, None]}),
        ({"infos": [{"x": 1}]}, {"infos": [{"x": 2}]}),
        ({"r": [[1], [2, 3]]}, {"r": [[1, 2], [3]]}),
        ({"o": {"x": [1]}}, {"o": {"y": [1]}}),
        ({"a": [1, 1], "seq_lens": [2]}, {"a": [1, 1], "seq_lens": [1, 1]}),
        ({"a": [1, 1], "seq_lens": [2]}, {"a": [1, 1]}),
    ],
    ids=[
        "values",
        "length",
        "name",
        "more columns",
        "width",
        "int and float",
        "int and bool",
        "text and bytes",
        "missing text",
        "unit",
        "shape",
        "row shape",
        "torch",
        "torch dtype",
        "None",
        "infos",
        "ragged",
        "nested",
        "seq_lens",
        "no seq_lens",
    ],
)
def test_batches_that_differ_are_unequal(mine: dict[str, Any], theirs: dict[str, Any]) -> None:
    assert SampleBatch(mine) != SampleBatch(theirs)
    assert SampleBatch(theirs) != SampleBatch(mine)


def test_flags_of_the_row_layout_affect_equality() -> None:
    batch = in_sequences(padded=False)
    assert batch != in_sequences(padded=True)
    flat = SampleBatch(a=np.zeros((2, 2)), seq_lens=[1, 1])
    time_major = SampleBatch(a=np.zeros((2, 2)), seq_lens=[1, 1], _time_major=True)
    assert flat != time_major
    assert flat == SampleBatch(a=np.zeros((2, 2)), seq_lens=[1, 1], _time_major=False)


def test_training_flags_do_not_affect_equality() -> None:
    batch = SampleBatch(a=[1], _num_grad_updates=3, _is_training=True)
    assert batch == SampleBatch(a=[1])


def test_other_types_are_unequal() -> None:
    batch = SampleBatch(a=[1])
    assert batch != {"a": [1]}
    assert batch != 3
    assert batch != None  # noqa: E711
    assert batch != batch.as_multi_agent()


def test_batches_are_unhashable() -> None:
    with pytest.raises(TypeError, match="unhashable"):
        hash(SampleBatch(a=[1]))
    with pytest.raises(TypeError, match="unhashable"):
        hash(SampleBatch(a=[1]).as_multi_agent())


def test_equality_of_multi_agent_batches() -> None:
    def batch(value: int = 1, policy: str = "p", steps: int = 1) -> MultiAgentBatch:
        return MultiAgentBatch({policy: SampleBatch(a=[value])}, steps)

    assert batch() == batch()
    assert batch() != batch(value=2)
    assert batch() != batch(policy="q")
    assert batch() != batch(steps=2)
    assert batch() != batch()["p"]
