from __future__ import annotations

import copy
import datetime
import enum
from collections import OrderedDict, namedtuple

import duckdb
import numpy as np
import pandas as pd
import polars as pl
import pyarrow as pa
import pytest
from hypothesis import given
from hypothesis import strategies as st

from samplebatch.column import objects
from samplebatch.column.arrow import arrow_field_and_array, column_from_arrow
from samplebatch.column.objects import FORM_KEY, ObjectColumn
from samplebatch.column.tensor import TensorColumn
from samplebatch.errors import ColumnTypeError, FormatError, UntrustedPickleError
from tests.column.samples import ELEMENTS, rows, through_ipc
from tests.optional import torch

Point = namedtuple("Point", "x y")


class Colour(enum.IntEnum):
    RED = 1


def identical(a, b):
    """Compare two objects independently of the library: types, key order, dtypes and bits."""
    if type(a) is not type(b):
        return False
    if isinstance(a, dict):
        return list(map(repr, a)) == list(map(repr, b)) and all(map(identical, a.values(), b.values()))
    if isinstance(a, list | tuple):
        return len(a) == len(b) and all(map(identical, a, b))
    if isinstance(a, np.ndarray):
        if a.dtype != b.dtype or a.shape != b.shape:
            return False
        return all(map(identical, a.ravel(), b.ravel())) if a.dtype == object else a.tobytes() == b.tobytes()
    if isinstance(a, np.generic):
        return a.dtype == b.dtype and a.tobytes() == b.tobytes()
    if isinstance(a, float):
        return a.hex() == b.hex()
    return repr(a) == repr(b)


def round_trips(given_rows, pickled=None):
    """Send rows through Arrow, an Arrow stream, and dump and load; return whether they were pickled."""
    column = ObjectColumn.from_rows(given_rows)
    field, array = arrow_field_and_array(column, "infos")
    assert len(array) == len(given_rows)
    array.validate(full=True)
    header, buffers = column.dump()
    again = [
        column_from_arrow(array, field, allow_pickle=True),
        column_from_arrow(*reversed(through_ipc(field, array)), allow_pickle=True),
        ObjectColumn.load(header, [bytes(memoryview(buffer)) for buffer in buffers], allow_pickle=True),
    ]
    for back in again:
        assert back.kind == "object"
        assert identical(list(back.values), list(given_rows))
        assert back.equals(column)
    if len(given_rows) > 2:
        part = column_from_arrow(array.slice(1, len(array) - 2), field, allow_pickle=True)
        assert identical(list(part.values), list(given_rows)[1:-1])
    was_pickled = b'"pickle"' in field.metadata[FORM_KEY]
    if pickled is not None:
        assert was_pickled is pickled
    return array


UNIFORM = {
    "no rows": [],
    "empty dicts": [{}] * 5,
    "nones": [None] * 5,
    "empty dicts and nones": [{}, None, {}, {}],
    "gymnasium episodes": [
        {},
        {},
        {"episode": {"r": 1.0, "l": 5, "t": 0.1}},
        {},
        {"episode": {"r": -0.0, "l": 1, "t": 2.5}},
    ],
    "episodes and nones": [None, {"episode": {"r": 1.0}}, {}],
    "numpy scalars": [
        {"r": np.float64(1.5), "n": np.int32(i), "f": np.float32(0.1), "b": np.bool_(True)} for i in range(4)
    ],
    "small arrays": [{"mask": np.array([True, False]), "pos": np.arange(6.0).reshape(2, 3) * i} for i in range(4)],
    "arrays of varying shape": [{"path": np.arange(i)} for i in range(4)],
    "matrices of varying shape": [{"m": np.ones((i, 3 - i), "f4")} for i in range(4)],
    "arrays without elements": [{"a": np.zeros((0, 3))}, {"a": np.zeros((0, 3))}],
    "arrays on some rows": [{"final": np.arange(3)}, {}, {"final": np.arange(3) + 1}, None],
    "0-d arrays": [np.array(3.0), np.array(4.0)],
    "bool, int, float": [{"b": True, "i": 1, "f": 1.0}, {"b": False, "i": -(2**63), "f": float("nan")}],
    "infinities": [float("inf"), float("-inf"), -0.0, None],
    "strings": ["", "a", "snow ☃", "\0", None],
    "bytes": [b"", b"\0a\0", None],
    "numpy strings": [np.str_("a"), np.str_("")],
    "numpy bytes": [np.bytes_(b"a"), np.bytes_(b"")],
    "lists": [[1, 2], [], [3], None],
    "tuples": [(1.0,), (), (2.0, 3.0)],
    "lists with none": [[1, None], [None], []],
    "lists of lists": [[[1], []], [], [[2, 3]]],
    "lists of dicts": [[{"a": 1}, {}], [], [{"a": 2}]],
    "dict of tuple of dict": [{"k": ({"v": [True]},)}, {"k": ({"v": []}, {})}],
    "records": [("a", 1, None), ("b", 2, None)],
    "record lists": [[1, "a"], [2, "b"]],
    "records of records": [{"at": ((1, "x"), 0.5)}, {"at": ((2, "y"), 1.5)}],
    "none under a key": [{"a": None}, {"a": None}],
    "none or number": [{"a": None, "b": 1}, {"a": 2, "b": 2}],
    "keys in one order": [{"a": 1, "b": 2, "c": 3}, {"a": 1, "c": 3}, {"b": 2, "c": 3}],
    "keys that interleave": [{"a": 1, "c": 1}, {"b": 1, "c": 1}, {"a": 1, "b": 1}],
    "empty key": [{"": 1}, {"": 2}],
    "keys with dots": [{"a.b": {"c.d": 1}}, {"a.b": {}}],
    "like a ragged column": [{"data": [1.0, 2.0], "shape": [1, 2]}],
    "dates": [np.datetime64("2024-01-01"), np.datetime64("NaT", "D"), None],
    "durations": [{"t": np.timedelta64(5, "ms")}, {"t": np.timedelta64("NaT", "ms")}],
    "complex": [np.complex64(1 + 2j), None, np.complex64(3)],
    "arrays of complex": [np.array([1j, 2], "c8"), np.array([3, 4j], "c8")],
    "arrays of dates": [np.array(["2024-01-01", "NaT"], "M8[D]")] * 2,
    "arrays of text": [np.array(["a", "bcd"])] * 2,
    "python none in nested": [{"a": {"b": None}}, {"a": None}],
    "empty structs within": [{"a": {}}, {"a": {}}, {}],
    "arrow": [{"a": [(), ()], "b": [{}, None]}, {"a": [], "b": []}],
}

PICKLED = {
    "mixed types": [{"a": 1}, {"a": "x"}],
    "int and bool": [{"a": 1}, {"a": True}],
    "int and float": [1, 2.0],
    "int and numpy int": [1, np.int64(1)],
    "float32 and float64": [np.float32(1), np.float64(1)],
    "missing and none": [{"a": None}, {}, {"a": 1}],
    "missing and always none": [{"a": None}, {}],
    "keys in contradicting orders": [{"a": 1, "b": 2}, {"b": 1, "a": 2}],
    "integers beyond 64 bits": [2**63, -(2**80)],
    "keys that are not strings": [{1: "a"}, {2: "b"}],
    "keys of several types": [{"a": 1, 2: 3}],
    "numpy string keys": [{"a": 1}, {np.str_("a"): 1}],
    "surrogates": ["\ud800"],
    "surrogates in keys": [{"\ud800": 1}],
    "nul in keys": [{"a\0b": 1}],
    "lists and tuples": [[1], (1,)],
    "lists of unequal mixtures": [[1, "a"], [1]],
    "arrays of several dtypes": [np.zeros(2, "f4"), np.zeros(2, "f8")],
    "arrays of several dimensions": [np.zeros(2), np.zeros((2, 2))],
    "arrays of objects": [np.array([{}, None], object)],
    "foreign byte order": [np.zeros(2, ">f4"), np.zeros(2, ">f4")],
    "structured arrays": [np.zeros(2, "f4,i4")],
    "long doubles": [np.longdouble(1.5)],
    "dates of several units": [np.datetime64("2024-01-01"), np.datetime64("2024-01-01T00", "h")],
    "datetimes": [datetime.datetime(2024, 1, 1), datetime.timedelta(1)],
    "complex numbers of python": [1 + 2j],
    "named tuples": [Point(1, 2), Point(3, 4)],
    "ordered dicts": [OrderedDict(a=1)],
    "enums": [Colour.RED, Colour.RED],
    "sets": [{1, 2}, set()],
    "ranges and types": [range(3), int, None],
    "dicts and lists": [{}, []],
    "many forms": [{str(i): 1} for i in range(300)],
    "nested beyond measure": [eval("[" * 40 + "]" * 40)],
    "subclasses of arrays": [np.zeros(2).view(np.recarray)],
}


@pytest.mark.parametrize("name", UNIFORM)
def test_uniform_objects_round_trip_exactly_without_pickle(name):
    round_trips(UNIFORM[name], pickled=False)


@pytest.mark.parametrize("name", PICKLED)
def test_objects_of_different_structure_round_trip_as_pickles(name):
    round_trips(PICKLED[name], pickled=True)


@pytest.mark.parametrize("dtype", ELEMENTS, ids=str)
def test_arrays_and_scalars_of_every_dtype(dtype):
    round_trips(list(rows(dtype, 4, (2, 3))), pickled=False)
    round_trips([{"x": row} if i % 2 else {} for i, row in enumerate(rows(dtype, 5, (3,)))], pickled=False)
    round_trips([rows(dtype, n) for n in (3, 0, 2)], pickled=False)
    round_trips(list(rows(dtype, 4)), pickled=False)
    round_trips([row if i % 2 else None for i, row in enumerate(rows(dtype, 4))], pickled=False)


def test_decoded_arrays_are_writable():
    column = ObjectColumn.from_rows([np.arange(3), np.arange(2)])
    for back in (column, ObjectColumn.from_rows([np.arange(3), np.arange(3)])):
        header, buffers = back.dump()
        for row in ObjectColumn.load(header, [bytes(buffer) for buffer in buffers], allow_pickle=False).values:
            row += 1


scalars = st.one_of(
    st.none(),
    st.booleans(),
    st.integers(-(2**65), 2**65),
    st.floats(),
    st.text(max_size=3),
    st.binary(max_size=3),
    st.floats(width=32).map(np.float32),
    st.integers(0, 255).map(np.uint8),
    st.lists(st.integers(-9, 9), max_size=3).map(np.array),
    st.just(np.datetime64("2024-01-01")),
)
anything = st.recursive(
    scalars,
    lambda inner: st.one_of(
        st.lists(inner, max_size=3),
        st.lists(inner, max_size=3).map(tuple),
        st.dictionaries(st.sampled_from(["a", "b", "c", ""]), inner, max_size=3),
    ),
    max_leaves=6,
)


def infos_like(inner):
    """Draw rows of one structure in which some keys are missing."""
    keyed = st.fixed_dictionaries({}, optional={"a": inner, "b": st.lists(st.floats(), max_size=2), "c": st.just({})})
    keyed = keyed.map(lambda info: {name: info[name] for name in sorted(info)})
    return st.lists(st.none() | keyed, max_size=6)


@given(st.lists(anything, max_size=5) | anything.flatmap(lambda value: st.just([value] * 3)))
def test_any_objects_round_trip_exactly(result):
    round_trips(result)


@given(
    st.one_of(
        [infos_like(kind) for kind in (st.integers(-9, 9), st.text(max_size=2), st.booleans(), st.tuples(st.floats()))]
    )
)
def test_infos_of_one_structure_are_never_pickled(result):
    round_trips(result, pickled=False)


@given(st.lists(anything, max_size=6), st.data())
def test_operations_agree_with_a_list(expected, data):
    column = ObjectColumn.from_rows(expected)
    for _ in range(3):
        n = len(expected)
        operation = data.draw(st.sampled_from(["slice", "take", "copy", "concat", "spread", "dump"]))
        if operation == "slice":
            start = data.draw(st.integers(0, n))
            stop = data.draw(st.integers(start, n))
            expected, column = expected[start:stop], column.slice(start, stop)
        elif operation == "take" and n:
            indices = data.draw(st.lists(st.integers(0, n - 1), max_size=6))
            expected, column = [expected[i] for i in indices], column.take(np.array(indices, np.intp))
        elif operation == "copy":
            column = column.copy()
        elif operation == "concat":
            expected, column = expected * 2, ObjectColumn.concat([column, column], "x")
        elif operation == "spread":
            spread = [None] * (2 * n + 1)
            spread[: 2 * n : 2] = expected
            expected, column = spread, column.spread(2 * n + 1, np.arange(n) * 2)
        else:
            header, buffers = column.dump()
            column = ObjectColumn.load(header, buffers, allow_pickle=True)
        assert identical(list(column.values), expected)
        assert column.values.dtype == object


@given(anything)
def test_equality_is_exact_and_never_raises(value):
    a, b = ObjectColumn.from_rows([value]), ObjectColumn.from_rows([copy.deepcopy(value)])
    assert a.equals(b)
    assert not a.equals(ObjectColumn.from_rows([[value]]))


@pytest.mark.parametrize(
    ("a", "b"),
    [
        (1, 1.0),
        (1, True),
        ({"a": 1}, {"a": 2}),
        ({"a": 1}, {"b": 1}),
        ({"a": np.arange(3)}, {"a": np.arange(4)}),
        ({"a": np.arange(3)}, {"a": np.arange(3.0)}),
        ({"a": np.array([1, 2])}, {"a": np.array([1, 3])}),
        ([1], (1,)),
        ([1, 2], [1]),
        (np.array([{}, 1], object), np.array([{}, 2], object)),
        (torch.zeros(2), torch.ones(2)),
        (torch.zeros(2), torch.zeros(3)),
        (pd.Series([1]), pd.Series([2])),
    ],
    ids=str,
)
def test_objects_that_differ(a, b):
    assert not ObjectColumn.from_rows([a]).equals(ObjectColumn.from_rows([b]))


def test_equality_of_columns():
    column = ObjectColumn.from_rows([{"a": np.array([np.nan]), "b": float("nan")}, torch.zeros(2), {"x": 1, "y": 2}])
    assert column.equals(column.copy())
    assert column.equals(ObjectColumn.from_rows([*column.values[:2], {"y": 2, "x": 1}]))
    assert not column.equals(column.slice(0, 2))
    assert not column.equals(TensorColumn(np.zeros(3)))


def test_copy_is_deep_and_other_operations_are_shallow():
    inner = {"episode": {"r": [1.0]}, "mask": np.zeros(2)}
    column = ObjectColumn.from_rows([inner, {}, None])
    copied = column.copy()
    copied.values[0]["episode"]["r"].append(2.0)
    copied.values[0]["mask"] += 1
    copied.values[1]["new"] = 1
    assert identical(inner, {"episode": {"r": [1.0]}, "mask": np.zeros(2)})
    assert column.values[1] == {}
    assert column.slice(0, 1).values[0] is inner
    assert column.take(np.array([0])).values[0] is inner
    assert ObjectColumn.concat([column, column], "x").values[3] is inner
    for plain in ([{}, None, {}], ["a", 1, None]):
        source = ObjectColumn.from_rows(plain)
        converted = source.copy()
        assert not np.shares_memory(converted.values, source.values)
        assert converted.equals(source)
        assert all(a is not b for a, b in zip(converted.values, plain, strict=True) if isinstance(a, dict))


def test_slices_are_views():
    column = ObjectColumn.from_rows([{}, {"a": 1}, None])
    assert np.shares_memory(column.slice(1, 3).values, column.values)
    assert column.to_numpy() is column.values
    assert column.row_shape == ()
    assert column.nbytes == sum(row.__sizeof__() for row in [{}, {"a": 1}]) + 16 * 2 + (None).__sizeof__()


def test_the_structure_is_inferred_once_and_updated_after_changes(monkeypatch):
    calls = []
    encode = objects.encode
    monkeypatch.setattr(objects, "encode", lambda values: calls.append(1) or encode(values))
    column = ObjectColumn.from_rows([{"a": 1}, {}])
    arrow_field_and_array(column, "infos")
    assert len(calls) == 1
    column.values[1]["a"] = 2
    _field, array = arrow_field_and_array(column, "infos")
    assert array.to_pylist() == [{"a": 1}, {"a": 2}]
    column.values[1]["a"] = "x"
    assert b"pickle" in column.encode()[1][FORM_KEY]


def test_a_dump_contains_only_the_rows_of_a_slice():
    column = ObjectColumn.from_rows([{"x": np.zeros(1000)} for _ in range(10)])
    full, part = (
        sum(memoryview(buffer).nbytes for buffer in piece.dump()[1]) for piece in (column, column.slice(2, 3))
    )
    assert part < full / 8
    assert ObjectColumn.from_rows([{}] * 1000).dump()[1] == []
    assert ObjectColumn.from_rows([None] * 1000).dump()[1] == []


def test_pickles_are_rejected_unless_allowed():
    column = ObjectColumn.from_rows([{1: 2}])
    field, array = arrow_field_and_array(column, "infos.extra")
    with pytest.raises(UntrustedPickleError, match=r"column 'infos\.extra'.*allow_pickle=True"):
        column_from_arrow(array, field, allow_pickle=False)
    header, buffers = column.dump()
    with pytest.raises(UntrustedPickleError):
        ObjectColumn.load(header, buffers, allow_pickle=False)


def test_objects_that_cannot_be_pickled_are_rejected():
    with pytest.raises(ColumnTypeError, match="got a function in row 1"):
        ObjectColumn.from_rows([1, lambda: None]).to_arrow()


def test_polars_duckdb_and_pandas_read_the_fields():
    infos = [{}, {"episode": {"r": 1.0, "l": 5}, "tag": "a"}, None, {"episode": {"r": 2.0, "l": 7}, "pos": [1, 2]}]
    table = pa.table({"infos": ObjectColumn.from_rows(infos).to_arrow()})
    frame = pl.from_arrow(table)
    assert frame["infos"].struct.field("episode").struct.field("r").to_list() == [None, 1.0, None, 2.0]
    assert duckdb.from_arrow(table).project("sum(infos.episode.l)").fetchall() == [(12,)]
    assert table.to_pandas()["infos"][1]["tag"] == "a"


@pytest.mark.parametrize(
    "name", ["empty dicts", "nones", "empty dicts and nones", "strings", "empty structs within", "lists"]
)
def test_polars_and_duckdb_read_columns_of_simple_objects(name):
    given_rows = [row for row in UNIFORM[name] if row != "\0"]
    table = pa.table({"infos": ObjectColumn.from_rows(given_rows).to_arrow()})
    expected = table["infos"].to_pylist()
    assert pl.from_arrow(table)["infos"].to_list() == expected
    assert [row[0] for row in duckdb.from_arrow(table).fetchall()] == expected


@pytest.mark.parametrize(
    "name", ["gymnasium episodes", "strings", "lists", "numpy scalars", "keys in one order", "tuples"]
)
def test_objects_written_by_polars_are_read(name):
    field, array = arrow_field_and_array(ObjectColumn.from_rows(UNIFORM[name]), "infos")
    written = pl.from_arrow(pa.table({"infos": array})).to_arrow()["infos"].combine_chunks()
    assert identical(list(column_from_arrow(written, field, allow_pickle=False).values), UNIFORM[name])


@pytest.mark.parametrize(
    "array",
    [
        pa.array([{"a": 1}, None]),
        pa.array([["a"], None]),
        pa.array([[("k", 1)]], pa.map_(pa.string(), pa.int64())),
        pa.nulls(2),
        pa.array([["a", "b"]], pa.list_(pa.string(), 2)),
    ],
    ids=lambda array: str(array.type),
)
def test_foreign_arrow_is_read(array):
    column = column_from_arrow(array, pa.field("x", array.type), allow_pickle=False)
    assert column.kind == "object"
    assert identical(list(column.values), array.to_pylist())


ONE_INT = '{"kind":"dict","names":["a"],"optional":[false],"children":[{"kind":"int"}]}'


@pytest.mark.parametrize(
    ("array", "form"),
    [
        (pa.array([{"a": 1}]), "not json"),
        (pa.array([{"a": 1}]), "[]"),
        (pa.array([{"a": 1}]), "{}"),
        (pa.array([{"a": 1}]), '{"kind":"dict","names":["a"]}'),
        (pa.array([{"a": 1}]), '{"kind":"mystery"}'),
        (pa.array([{"a": 1}]), "[" * 100_000),
        (pa.array([{"a": 1}]), '{"kind":"list","children":[' * 500 + '{"kind":"int"}' + "]}" * 500),
        (pa.array([{"b": 1}]), ONE_INT),
        (pa.array([{"a": 1, "b": 1}]), ONE_INT),
        (pa.array([{"a": "x"}]), ONE_INT),
        (pa.array([{"a": 1.5}]), ONE_INT),
        (pa.array([{"a": None}]), ONE_INT),
        (pa.array([None, {"a": 1}]), ONE_INT),
        (pa.array([1]), ONE_INT),
        (pa.array([1]), '{"kind":"none"}'),
        (pa.array([1]), '{"kind":"list","children":[{"kind":"int"}]}'),
        (pa.array([[1]]), '{"kind":"list"}'),
        (pa.array([[1]]), '{"kind":"array","dtype":"<i8","shape":[2]}'),
        (pa.array([[1, 2]], pa.list_(pa.int64(), 2)), '{"kind":"array","dtype":"<i8","shape":[3]}'),
        (pa.array([[1, 2]], pa.list_(pa.int64(), 2)), '{"kind":"array","dtype":"<f8","shape":[2]}'),
        (pa.array([[1, 2]], pa.list_(pa.int64(), 2)), '{"kind":"array","dtype":"O","shape":[2]}'),
        (pa.array([[1, 2]], pa.list_(pa.int64(), 2)), '{"kind":"array","dtype":"<i8","shape":["x"]}'),
        (pa.array([1]), '{"kind":"scalar","dtype":"<i4"}'),
        (pa.array([True]), '{"kind":"scalar","dtype":"<i8"}'),
        (pa.array([1]), '{"kind":"ragged","dtype":"<i8","shape":[0]}'),
        (pa.array([{"0": 1}]), '{"kind":"tuple_of","children":[{"kind":"int"},{"kind":"int"}]}'),
        (pa.array([b"\x80\x05garbage"]), '{"kind":"pickle"}'),
        (pa.array([1]), '{"kind":"pickle"}'),
        (pa.array([1]), '{"kind":"string"}'),
        (pa.array(["a"]), '{"kind":"string","nullable":true,"dtype":"x"}'),
    ],
)
def test_a_structure_that_does_not_match_is_rejected_with_the_name(array, form):
    field = pa.field("infos", array.type, metadata={FORM_KEY: form.encode()})
    with pytest.raises(FormatError, match="column 'infos' must"):
        column_from_arrow(array, field, allow_pickle=True)


def test_damaged_arrow_is_rejected():
    text = pa.Array.from_buffers(
        pa.large_string(), 1, [None, pa.py_buffer(np.array([0, 2])), pa.py_buffer(b"\xff\xfe")]
    )
    with pytest.raises(FormatError):
        column_from_arrow(text, pa.field("x", text.type, metadata={FORM_KEY: b'{"kind":"str"}'}), allow_pickle=False)
    buffer = pa.py_buffer(np.array([0, 2**40, 2]))
    lists = pa.Array.from_buffers(pa.large_list(pa.int64()), 2, [None, buffer], children=[pa.array([1, 2])])
    form = b'{"kind":"list","children":[{"kind":"int"}]}'
    with pytest.raises(FormatError):
        column_from_arrow(lists, pa.field("x", lists.type, metadata={FORM_KEY: form}), allow_pickle=False)


@pytest.mark.parametrize("cut", [0, 1, 40, 200])
def test_a_damaged_dump_is_rejected(cut):
    header, buffers = ObjectColumn.from_rows([{"a": i} for i in range(100)]).dump()
    data = bytes(memoryview(buffers[0]))
    for damaged in (data[:cut], b"\xff" * cut + data[cut + 1 :] if cut else b""):
        with pytest.raises(FormatError):
            ObjectColumn.load(header, [damaged], allow_pickle=True)


@pytest.mark.parametrize(
    ("header", "buffers"),
    [
        (("object",), []),
        (("object", -1, '{"kind":"dict"}', False), []),
        (("object", "5", '{"kind":"dict"}', False), []),
        (("object", 5, '{"kind":"int"}', False), []),
        (("object", 5, '{"kind":"int"}', True), []),
        (("object", 5, None, False), []),
        (("object", 5, '{"kind":"dict"}', False), [b"", b""]),
    ],
)
def test_a_damaged_header_is_rejected(header, buffers):
    with pytest.raises(FormatError):
        ObjectColumn.load(header, buffers, allow_pickle=True)


def test_a_dump_of_another_length_is_rejected():
    header, buffers = ObjectColumn.from_rows([{"a": 1}] * 3).dump()
    with pytest.raises(FormatError, match="2 rows of its header, got 3"):
        ObjectColumn.load(("object", 2, *header[2:]), buffers, allow_pickle=True)


def test_from_array_does_not_copy_and_rejects_with_the_name():
    array = np.array([{}, None], object)
    assert ObjectColumn.from_array(array, "x").values is array
    with pytest.raises(ColumnTypeError, match=r"column 'infos' must have one object per row.*\(2, 1\)"):
        ObjectColumn.from_array(array.reshape(2, 1), "infos")
    with pytest.raises(ColumnTypeError, match="column 'infos' must have objects"):
        ObjectColumn.from_array(np.zeros(3), "infos")


def test_conversion_of_objects_to_torch_is_rejected():
    with pytest.raises(ColumnTypeError):
        ObjectColumn.from_rows([{}]).to_torch()


def test_rows_that_are_sequences_are_one_object_each():
    for given_rows in ([[1, 2], [3, 4]], [np.zeros(2), np.zeros(2)], [(1,), (2,)], [[], []]):
        column = ObjectColumn.from_rows(given_rows)
        assert column.values.shape == (2,)
        assert identical(list(column.values), given_rows)
