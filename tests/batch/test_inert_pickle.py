"""Pickles of plain values are read as data, and nothing is executed."""

from __future__ import annotations

import collections
import contextlib
import datetime
import os
import pickle
import random
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from samplebatch.batch.inert_pickle import Foreign, is_plain, read_pickle, resolve_stubs
from samplebatch.errors import FormatError, SampleBatchError

SCALARS = (
    st.none()
    | st.booleans()
    | st.integers()
    | st.floats(allow_nan=False)
    | st.text()
    | st.binary()
    | st.complex_numbers(allow_nan=False).map(str)
)
VALUES = st.recursive(
    SCALARS,
    lambda inner: (
        st.lists(inner)
        | st.lists(inner).map(tuple)
        | st.dictionaries(st.text() | st.integers(), inner)
        | st.sets(st.integers())
        | st.frozensets(st.text())
    ),
    max_leaves=20,
)


@given(VALUES, st.sampled_from([4, 5]))
@settings(max_examples=150, deadline=None)
def test_plain_values_round_trip(value: Any, protocol: int) -> None:
    actual = read_pickle(pickle.dumps(value, protocol))
    assert is_plain(actual)
    assert actual == value


ARRAYS = [
    np.arange(6).reshape(2, 3),
    np.asfortranarray(np.arange(6.0).reshape(2, 3)),
    np.array(3.5),
    np.zeros((0, 4), np.float16),
    np.array([True, False]),
    np.array([1 + 2j], np.complex64),
    np.array(["2020-01-01", "NaT"], "M8[D]"),
    np.array([3, 5], "m8[25s]"),
    np.array(["ab", "c"]),
    np.array([b"ab", b"c"]),
    np.arange(3, dtype=">i4"),
    np.array([None, "a", {"b": np.arange(2)}], object),
    np.array([[1, None]], object),
]


@pytest.mark.parametrize("protocol", [3, 4, 5])
@pytest.mark.parametrize("array", ARRAYS, ids=lambda array: str(array.dtype))
def test_arrays_round_trip(array: np.ndarray[Any, Any], protocol: int) -> None:
    actual = read_pickle(pickle.dumps(array, protocol))
    assert is_plain(actual)
    assert actual.dtype == array.dtype.newbyteorder("=")
    assert actual.shape == array.shape
    assert repr(actual) == repr(array.astype(actual.dtype))
    assert actual.flags.writeable


def test_numbers_and_dtypes_of_numpy_round_trip() -> None:
    values = [np.float32(1.5), np.int8(-3), np.bool_(True), np.datetime64("2020-01-01", "s"), np.dtype("f4")]
    actual = read_pickle(pickle.dumps(values))
    assert actual == values
    assert [type(value) for value in actual] == [type(value) for value in values]


def test_shared_references_are_preserved() -> None:
    inner = [1]
    loop: list[Any] = [inner, inner]
    loop.append(loop)
    array = np.arange(3)
    actual = read_pickle(pickle.dumps([loop, array, (array,)]))
    assert actual[0][0] is actual[0][1]
    assert actual[0][2] is actual[0]
    assert actual[1] is actual[2][0]


class Malice:
    """Object that deletes a file when it is unpickled."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def __reduce__(self) -> Any:
        return os.remove, (str(self.path),)


class Rebuilt:
    def __setstate__(self, state: Any) -> None:
        raise AssertionError("was unpickled")

    def __getstate__(self) -> Any:
        return {"a": np.arange(2), "b": 1}


def test_no_function_is_called(tmp_path: Path) -> None:
    victim = tmp_path / "victim"
    victim.touch()
    actual = read_pickle(pickle.dumps({"a": [Malice(victim)]}))
    assert victim.exists()
    assert actual["a"][0].name == "posix.remove"
    assert actual["a"][0].args == (str(victim),)
    assert not is_plain(actual)
    assert not is_plain(np.array([1, actual], object))


def test_objects_become_placeholders_with_their_states() -> None:
    actual = read_pickle(pickle.dumps(Rebuilt()))
    assert isinstance(actual, Foreign)
    assert actual.name.endswith("Rebuilt")
    assert resolve_stubs(actual.state["a"]).tolist() == [0, 1]
    assert repr(actual) == f"<{actual.name}, not made>"
    for value in (collections.OrderedDict(a=1), datetime.date(2020, 1, 1), random.Random(3), 1j, print, range(3)):
        assert not is_plain(read_pickle(pickle.dumps(value)))
    recordarray = np.zeros(2, [("a", "i4")])
    assert not is_plain(read_pickle(pickle.dumps(recordarray.dtype)))


def test_nothing_is_imported() -> None:
    data = b"cno_such_module\nno_such_name\n."
    assert read_pickle(data).name == "no_such_module.no_such_name"


@pytest.mark.parametrize(
    "data",
    [
        b"",
        b"\x80",
        b"not a pickle",
        pickle.dumps([1, 2, 3])[:-1],
        pickle.dumps([1, 2, 3])[:5],
        b"]a.",
        b"}a.",
        b"(.",
        b"e.",
        b"0.",
        b"h\x05.",
        b"]}b.",
        b"P1\n.",
        b"\x82\x01.",
        b"N\x93.",
        b"]" * 20_000 + b"a" * 19_999 + b".",
    ],
)
def test_damaged_pickles_are_rejected(data: bytes) -> None:
    with pytest.raises(FormatError):
        read_pickle(data)


@pytest.mark.parametrize("nest", [b"]" * 20_000 + b"a" * 19_999, b")" + b"\x85" * 300, b"}" + b"N}" * 300 + b"s" * 300])
def test_deep_values_are_rejected_at_any_recursion_limit(nest: bytes) -> None:
    before = sys.getrecursionlimit()
    sys.setrecursionlimit(1_000_000)
    try:
        with pytest.raises(FormatError, match=r"nested containers|got 102 values and 101 levels"):
            read_pickle(nest + b".")
    finally:
        sys.setrecursionlimit(before)


@given(st.binary(max_size=60))
@settings(max_examples=300, deadline=None)
def test_random_bytes_are_decoded_or_rejected(data: bytes) -> None:
    with contextlib.suppress(SampleBatchError):
        read_pickle(data)


@given(st.data())
@settings(max_examples=200, deadline=None)
def test_changed_bytes_are_decoded_or_rejected(data: st.DataObject) -> None:
    pickled = bytearray(pickle.dumps({"a": np.arange(4), "b": [None, np.array(["x", None], object)], "c": Rebuilt()}))
    for _ in range(data.draw(st.integers(1, 3))):
        pickled[data.draw(st.integers(0, len(pickled) - 1))] = data.draw(st.integers(0, 255))
    with contextlib.suppress(SampleBatchError):
        is_plain(read_pickle(pickled))


def test_arrays_with_a_false_size_are_rejected() -> None:
    pickled = pickle.dumps(np.arange(4))
    assert pickled.count(b"K\x04") == 1
    with pytest.raises(FormatError, match=r"an array in a pickle must have \d+ bytes, got \d+"):
        read_pickle(pickled.replace(b"K\x04", b"K\x7f"))


def shared_tuples(depth: int) -> bytes:
    """Return pickle operations of nested tuples; each tuple contains the next one twice, up to a depth."""
    return b")" + b"".join(b"\x94h" + bytes([i]) + b"\x86" for i in range(depth)) + b"\x94"


@pytest.mark.parametrize("use", [b"}h\x3cNs.", b"}(h\x3cNu.", b"(h\x3cNd.", b"\x8f(h\x3c\x90.", b"(h\x3c\x91."])
def test_shared_tuples_with_exponential_hash_time_are_rejected(use: bytes) -> None:
    data = b"\x80\x04" + shared_tuples(60) + use
    assert len(data) < 260
    with pytest.raises(FormatError, match="tuples of at most"):
        read_pickle(data)


def test_many_keys_of_shared_tuples_are_rejected() -> None:
    with pytest.raises(FormatError, match="tuples of at most"):
        read_pickle(b"\x80\x04" + shared_tuples(15) + b"}" + b"h\x0fNs" * 10_000 + b".")


def test_deep_tuples_are_rejected() -> None:
    with pytest.raises(FormatError, match="got 102 values and 101 levels"):
        read_pickle(b")" + b"\x85" * 200_000 + b".")


def test_long_integers_with_colliding_hashes_are_rejected() -> None:
    keys = [((2**61 - 1) * i).to_bytes(10, "little") for i in range(1, 30_000)]
    with pytest.raises(FormatError, match="tuples of at most"):
        read_pickle(b"\x80\x04}(" + b"".join(b"\x8a\x0a" + key + b"N" for key in keys) + b"u.")


def test_memo_indices_far_beyond_the_previous_are_rejected() -> None:
    with pytest.raises(FormatError, match="consecutively"):
        read_pickle(b"\x80\x04Nr\xff\xff\xff\x7f.")


class FromBuffer:
    """Object that is pickled as an array with given bytes."""

    def __init__(self, content: bytes) -> None:
        self.content = content

    def __reduce__(self) -> Any:
        function = np.arange(1).__reduce_ex__(5)[0]
        return function, (self.content, np.dtype("u1"), (len(self.content),), "C")


def test_arrays_that_share_their_bytes_are_rejected() -> None:
    content = bytes(1000)
    assert len(read_pickle(pickle.dumps([FromBuffer(bytes([i]) * 1000) for i in range(10)]))) == 10
    with pytest.raises(FormatError, match="separate content"):
        read_pickle(pickle.dumps([FromBuffer(content) for _ in range(10)]))


@pytest.mark.parametrize("data", [b"\x82\x01.", b"\x80\x04\x8c\x01aQ.", b"Pa\n.", b"\x80\x05\x97.", b"N2\x86."])
def test_extension_codes_persistent_ids_and_duplicates_are_rejected(data: bytes) -> None:
    with pytest.raises(FormatError, match="must have only supported opcodes, got"):
        read_pickle(data)


def test_too_many_global_names_are_rejected() -> None:
    with pytest.raises(FormatError, match="must name at most"):
        read_pickle(b"](" + b"".join(b"ca\n%d\n" % i for i in range(10_000)) + b"e.")


def framed(size: int, *operations: bytes) -> bytes:
    return b"\x80\x05\x95" + size.to_bytes(8, "little") + b"".join(operations) + b"."


@pytest.mark.parametrize(
    "pickled",
    [
        # The unpickler drops what is left of the frame, 4 of the 5 bytes, and reads the rest of the length elsewhere.
        framed(5, b"\x8e" + (16).to_bytes(8, "little") + b"\x8c\x01a" + bytes(13)),
        framed(3, b"]", b"\x8c\x02ab", b"a"),
        framed(12, b"\x95" + bytes(8), b"N"),
        framed(100, b"N"),
    ],
    ids=["within a length", "within a string", "in another", "after all"],
)
def test_frames_that_end_within_an_operation_are_rejected(pickled: bytes) -> None:
    with pytest.raises(FormatError, match="must end at the end of an opcode, got"):
        read_pickle(pickled)
