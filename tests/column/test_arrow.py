from __future__ import annotations

import numpy as np
import pyarrow as pa
import pytest

from samplebatch.column.arrow import arrow_field_and_array, column_from_arrow
from samplebatch.column.compressed import CompressedColumn
from samplebatch.column.objects import ObjectColumn
from samplebatch.column.ragged import RaggedColumn
from samplebatch.column.tensor import TensorColumn
from samplebatch.column.text import TextColumn
from samplebatch.column.torch_tensor import TorchColumn
from samplebatch.column.types import DTYPE_KEY, TORCH_KEY
from samplebatch.errors import ColumnTypeError, SampleBatchError
from tests.column.samples import through_ipc
from tests.optional import torch

COLUMNS = {
    "tensor": TensorColumn(np.arange(12.0).reshape(4, 3)),
    "bool": TensorColumn(np.array([True, False])),
    "torch": TorchColumn(torch.zeros(3, 2, dtype=torch.bfloat16)),
    "ragged": RaggedColumn.from_rows([[1], [2, 3], []], "x"),
    "ragged matrices": RaggedColumn.from_rows([np.zeros((1, 2)), np.zeros((2, 2))], "x"),
    "object": ObjectColumn.from_rows([{"a": 1}, None, {}]),
    "strings": TextColumn.from_rows(["a", None]),
    "pickles": ObjectColumn.from_rows([{1: 2}, 3]),
}


@pytest.mark.parametrize("name", COLUMNS)
def test_arrays_are_read_by_the_class_that_wrote_them(name):
    column = COLUMNS[name]
    field, array = arrow_field_and_array(column, "obs.x")
    assert field.name == "obs.x"
    assert field.type == array.type
    assert field.nullable == (array.null_count > 0 or column.kind == "text")
    for one_field, one_array in ((field, array), through_ipc(field, array)):
        back = column_from_arrow(one_array, one_field, allow_pickle=True)
        assert type(back) is type(column)
        assert back.equals(column)


def test_a_compressed_column_is_read_as_a_tensor_column():
    tensor = COLUMNS["tensor"]
    field, array = arrow_field_and_array(CompressedColumn.compress(tensor), "x")
    assert column_from_arrow(array, field, allow_pickle=False).equals(tensor)


@pytest.mark.parametrize(
    ("array", "kind"),
    [
        (pa.array([1, 2], pa.int16()), "tensor"),
        (pa.array([True, False]), "tensor"),
        (pa.array([[1, 2]], pa.list_(pa.int8(), 2)), "tensor"),
        (pa.array([b"ab"], pa.binary(2)), "text"),
        (pa.array([0], pa.date32()), "tensor"),
        (pa.array([[1, 2], []]), "ragged"),
        (pa.array([[[1, 2]], []], pa.list_(pa.list_(pa.int8(), 2))), "ragged"),
        (pa.array(["a"]), "text"),
        (pa.array([b"a"]), "text"),
        (pa.array([{"a": 1}]), "object"),
        (pa.array([["a"]]), "object"),
        (pa.nulls(2), "object"),
        (pa.array([{"data": [1.0], "shape": [1]}]), "object"),
    ],
    ids=lambda part: str(part.type) if isinstance(part, pa.Array) else part,
)
def test_foreign_arrow_arrays_become_the_matching_column_class(array, kind):
    column = column_from_arrow(array, pa.field("x", array.type), allow_pickle=False)
    assert column.kind == kind
    assert len(column) == len(array)


@pytest.mark.parametrize(
    "array",
    [
        pa.array([1, None]),
        pa.array([0], pa.timestamp("s", "Europe/Paris")),
        pa.array([0], pa.time32("s")),
        pa.array([1], pa.decimal128(5, 2)),
        pa.ExtensionArray.from_storage(pa.opaque(pa.string(), "json", "tests"), pa.array(["{}"])),
    ],
    ids=lambda array: str(array.type),
)
def test_unsupported_arrow_arrays_are_rejected_with_the_column_name(array):
    with pytest.raises(ColumnTypeError, match=r"'obs\.x'"):
        column_from_arrow(array, pa.field("obs.x", array.type), allow_pickle=False)


@pytest.mark.parametrize("key", [DTYPE_KEY, TORCH_KEY])
@pytest.mark.parametrize("value", [b"", b"nonsense", b"O", b"|V8", b"\xff\xfe", b"float16", b"<U9"])
@pytest.mark.parametrize("array", [pa.array([1.5]), pa.array([[1.5]])], ids=["tensor", "ragged"])
def test_foreign_metadata_is_validated(key, value, array):
    if key == TORCH_KEY and array.type != pa.float64():
        return
    with pytest.raises(SampleBatchError, match="column 'x'" if key == DTYPE_KEY else None):
        column_from_arrow(array, pa.field("x", array.type, metadata={key: value}), allow_pickle=False)
