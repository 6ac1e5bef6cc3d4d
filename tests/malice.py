"""Pickles that create a folder if they are unpickled, at every depth of an object column."""

from __future__ import annotations

import json
import os
import pickle
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa

from samplebatch.column.interface import Header
from samplebatch.column.objects import FORM_KEY, ObjectColumn

ROWS = 2
"""Rows of every column that is made here."""


class Mark:
    """Object whose pickle creates a folder when it is loaded."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def __reduce__(self) -> Any:
        return os.mkdir, (str(self.path),)


PICKLE = {"kind": "pickle"}


def _dict(child: Any, *, optional: bool = False) -> dict[str, Any]:
    return {"kind": "dict", "names": ["a"], "optional": [optional], "children": [child]}


def _places(data: bytes) -> pa.Array:
    return pa.array([{"0": 1, "1": data}] * ROWS, pa.struct({"0": pa.int64(), "1": pa.large_binary()}))


_BYTES, _LISTS = pa.large_binary(), pa.large_list(pa.large_binary())
_PLACES = [{"kind": "int"}, PICKLE]

NESTINGS = {
    "root": lambda data: (pa.array([data] * ROWS, _BYTES), PICKLE),
    "root in another layout": lambda data: (pa.array([data] * ROWS, pa.binary()), PICKLE),
    "root beside None": lambda data: (pa.array([data, None], _BYTES), PICKLE | {"nullable": True}),
    "nothing but None": lambda _: (pa.array([None] * ROWS, _BYTES), PICKLE | {"nullable": True}),
    "dict": lambda data: (pa.array([{"a": data}] * ROWS, pa.struct({"a": _BYTES})), _dict(PICKLE)),
    "key that may be absent": lambda data: (
        pa.array([{"a": data}, {"a": None}], pa.struct({"a": _BYTES})),
        _dict(PICKLE, optional=True),
    ),
    "dict beside None": lambda data: (
        pa.array([{"a": data}, None], pa.struct({"a": _BYTES})),
        _dict(PICKLE) | {"nullable": True},
    ),
    "list": lambda data: (pa.array([[data]] * ROWS, _LISTS), {"kind": "list", "children": [PICKLE]}),
    "list without elements": lambda _: (pa.array([[]] * ROWS, _LISTS), {"kind": "list", "children": [PICKLE]}),
    "tuple": lambda data: (pa.array([[data, data], []], _LISTS), {"kind": "tuple", "children": [PICKLE]}),
    "place of a list": lambda data: (_places(data), {"kind": "list_of", "children": _PLACES}),
    "place of a tuple": lambda data: (_places(data), {"kind": "tuple_of", "children": _PLACES}),
    "dict in a tuple in a dict": lambda data: (
        pa.array([{"a": [{"a": data}]}] * ROWS, pa.struct({"a": pa.large_list(pa.struct({"a": _BYTES}))})),
        _dict({"kind": "tuple", "children": [_dict(PICKLE)]}),
    ),
}
"""Forms of objects with pickles in them: each makes the Arrow array and its form of the bytes of one pickle."""


def column_of(nesting: str, mark: Path) -> tuple[pa.Array, str]:
    """Return a column whose pickles create the folder `mark`, and the form of the column."""
    array, form = NESTINGS[nesting](pickle.dumps(Mark(mark)))
    return array, json.dumps(form)


def field_of(nesting: str, mark: Path, name: str) -> tuple[pa.Field, pa.Array]:
    """Return a column whose pickles create a folder, with the field that describes its form."""
    array, form = column_of(nesting, mark)
    return pa.field(name, array.type, metadata={FORM_KEY: form.encode()}), array


def with_field(table: pa.Table, field: pa.Field, array: pa.Array) -> pa.Table:
    """Replace the column of the same name in a table; preserve the metadata of the table."""
    return table.set_column(table.schema.get_field_index(field.name), field, array)


class MaliciousColumn(ObjectColumn):
    """Column of objects that is sent as another column."""

    __slots__ = ("nesting_and_mark",)
    nesting_and_mark: tuple[str, Path]

    @classmethod
    def of(cls, nesting: str, mark: Path) -> MaliciousColumn:
        column = cls(np.full(ROWS, None, object))
        column.nesting_and_mark = nesting, mark
        return column

    def dump(self) -> tuple[Header, list[Any]]:
        array, form = column_of(*self.nesting_and_mark)
        return (self.kind, len(array), form, False), [stream_of({"values": array})]


def stream_of(columns: Mapping[str, pa.Array]) -> pa.Buffer:
    """Write columns as an Arrow stream."""
    batch = pa.record_batch(dict(columns))
    sink = pa.BufferOutputStream()
    with pa.ipc.new_stream(sink, batch.schema) as writer:
        writer.write_batch(batch)
    return sink.getvalue()
