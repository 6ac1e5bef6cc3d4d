"""Operations that add a column to a batch."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

from samplebatch import SampleBatch

Assign = Callable[[str, Any], SampleBatch]


def construct(name: str, values: Any) -> SampleBatch:
    return SampleBatch({"first": [1, 2, 3], name: values})


def assign(name: str, values: Any) -> SampleBatch:
    batch = SampleBatch(first=[1, 2, 3])
    batch[name] = values
    return batch


def replace(name: str, values: Any) -> SampleBatch:
    batch = SampleBatch({"first": [1, 2, 3], name: [4, 5, 6]})
    batch[name] = values
    return batch


def assign_to_view(name: str, values: Any) -> SampleBatch:
    view = SampleBatch(first=[0, 1, 2, 3])[1:]
    view[name] = values
    return view


every_door = pytest.mark.parametrize("door", [construct, assign, replace, assign_to_view])
