from __future__ import annotations

import copy
import pickle

import numpy as np
import pytest

from samplebatch.column.compressed import CompressedColumn
from samplebatch.column.objects import ObjectColumn
from samplebatch.column.ragged import RaggedColumn
from samplebatch.column.tensor import TensorColumn
from samplebatch.column.torch_tensor import TorchColumn
from tests.optional import torch

COLUMNS = {
    "tensor": TensorColumn(np.arange(3000.0).reshape(1000, 3)),
    "dates": TensorColumn(np.arange(1000).astype("M8[s]")),
    "torch": TorchColumn(torch.arange(3000).reshape(1000, 3).bfloat16()),
    "ragged": RaggedColumn.from_rows([np.arange(i % 7) for i in range(1000)], "x"),
    "ragged matrices": RaggedColumn.from_rows([np.ones((i % 3, i % 2)) for i in range(1000)], "x"),
    "objects": ObjectColumn.from_rows([{"a": i, "b": "text"} for i in range(1000)]),
    "pickles": ObjectColumn.from_rows([{i: "text"} for i in range(1000)]),
    "compressed": CompressedColumn.compress(TensorColumn(np.random.default_rng(0).random((1000, 3))), 10),
}


@pytest.mark.parametrize("name", COLUMNS)
@pytest.mark.parametrize("protocol", [2, 4, 5])
def test_columns_are_pickled_with_their_own_rows_only(name, protocol):
    column = COLUMNS[name]
    part = column.slice(500, 510)
    data = pickle.dumps(part, protocol)
    assert len(data) < len(pickle.dumps(column, protocol)) / 10
    back = pickle.loads(data)
    assert type(back) is type(column)
    assert back.equals(part)


@pytest.mark.parametrize("name", COLUMNS)
def test_protocol_5_carries_every_buffer_out_of_band(name):
    column = COLUMNS[name]
    buffers = []
    data = pickle.dumps(column, 5, buffer_callback=buffers.append)
    assert len(data) < 4096
    assert pickle.loads(data, buffers=buffers).equals(column)
    if name in ("tensor", "dates"):
        assert np.shares_memory(pickle.loads(data, buffers=buffers).values, column.values)


@pytest.mark.parametrize("name", COLUMNS)
def test_copies_by_the_copy_module_share_no_memory(name):
    column = COLUMNS[name]
    converted = copy.deepcopy(column)
    assert converted.equals(column)
    if name in ("tensor", "ragged"):
        array, source = (c.values if name == "tensor" else c.elements for c in (converted, column))
        assert not np.shares_memory(array, source)
        assert array.flags.writeable


def test_unpickled_blocks_are_checked_when_they_are_read():
    assert pickle.loads(pickle.dumps(COLUMNS["compressed"], 5)).trusted is False
