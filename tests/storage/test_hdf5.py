"""Nested values in HDF5 files: ours and Tianshou's, each read by both."""

from __future__ import annotations

import collections
import os
import pickle
import threading
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from samplebatch import Batch
from samplebatch.column.ragged import RaggedColumn
from samplebatch.errors import ColumnTypeError, FormatError, UnstorableError, UntrustedPickleError
from samplebatch.storage.hdf5 import from_hdf5, to_hdf5
from tests.optional import torch

h5py = pytest.importorskip("h5py")


def through(path: Path, values: Any, compression: str | None = None, **options: Any) -> Any:
    with h5py.File(path, "w") as file:
        to_hdf5(values, file, compression)
    with h5py.File(path, "r") as file:
        return from_hdf5(file, **options)


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / "values.hdf5"


ARRAYS = {
    "numbers": np.arange(6, dtype=np.int16).reshape(2, 3),
    "halves": np.ones(3, np.float16),
    "complex": np.array([1 + 2j]),
    "flags": np.array([True, False]),
    "single": np.array(2.5),
    "empty": np.zeros((0, 3), np.float32),
    "fortran": np.asfortranarray(np.arange(6.0).reshape(2, 3)),
    "bytes": np.array([b"ab", b"c"]),
    "dates": np.array(["2020-01-01", "NaT"], "M8[s]"),
    "wide": np.array(["ab", "c"]),
    "strings": np.array(["a", "über", ""], object),
    "nul": np.array(["a\0b", "c"], object),
    "surrogate": np.array(["\ud800"], object),
    "raw": np.array([b"\xff", b"a\0"], object),
    "ascii": np.array([b"ab", b"c"], object),
    "objects": np.array([None, "a", {"b": np.arange(2)}, [1, (2.5,)]], object),
    "none": np.array([], object),
}


@pytest.mark.parametrize("compression", [None, "gzip"])
@pytest.mark.parametrize("name", ARRAYS)
def test_arrays_are_restored(path: Path, name: str, compression: str | None) -> None:
    actual = through(path, {"a": ARRAYS[name]}, compression)["a"]
    assert actual.dtype == ARRAYS[name].dtype
    assert actual.dtype.metadata is None
    assert repr(actual) == repr(ARRAYS[name])


def test_numbers_strings_and_structures_are_restored(path: Path) -> None:
    values = {
        "int": 3,
        "large": 2**70,
        "float": 1.5,
        "flag": True,
        "text": "hello",
        "none": None,
        "list": [1, "a", (2, None)],
        "dict": {"empty": {}, "batch": Batch(x=[1, 2], y=Batch(z=[3]))},
    }
    actual = through(path, values)
    assert actual.keys() == values.keys()
    for name in values.keys() - {"dict"}:
        assert actual[name] == values[name]
        assert type(actual[name]) is type(values[name])
    assert actual["dict"]["empty"] == {}
    assert actual["dict"]["batch"] == Batch(x=[1, 2], y=Batch(z=[3]))
    assert isinstance(actual["dict"]["batch"], Batch)


def test_numpy_scalars_become_numbers(path: Path) -> None:
    actual = through(path, {"a": np.float32(0.5), "b": np.int8(3), "c": np.bool_(True)})
    assert actual == {"a": 0.5, "b": 3, "c": True}


@pytest.mark.parametrize("dtype", [torch.float32, torch.bool, torch.uint8, torch.bfloat16, torch.complex64])
def test_tensors_are_restored(path: Path, dtype: torch.dtype) -> None:
    tensor = torch.tensor([[0, 1], [1, 0]]).to(dtype).requires_grad_(dtype.is_floating_point)
    actual = through(path, {"a": tensor, "b": torch.tensor(1).to(dtype)})
    assert actual["a"].dtype == dtype
    assert torch.equal(actual["a"], tensor.detach())
    assert actual["b"].shape == ()
    assert through(path, {"a": tensor}, device="meta")["a"].device.type == "meta"


def test_compression_reduces_the_file_size(path: Path) -> None:
    zeros = {"a": np.zeros(1_000_000), "b": [0] * 100_000}
    through(path, zeros)
    plain = path.stat().st_size
    assert len(through(path, zeros, "gzip")["b"]) == 100_000
    assert path.stat().st_size < plain / 50


def test_columns_become_arrays(path: Path) -> None:
    actual = through(path, {"a": RaggedColumn.from_rows([[1, 2], [3]], "a")})["a"]
    assert [row.tolist() for row in actual] == [[1, 2], [3]]


def test_values_that_can_be_neither_stored_nor_pickled_are_rejected(path: Path) -> None:
    with pytest.raises(NotImplementedError, match=r"column 'obs\.lock' must have values that HDF5 can store"):
        through(path, {"obs": {"lock": threading.Lock()}})
    with pytest.raises(UnstorableError, match=r"column 'f' must have values .* got function"):
        through(path, {"f": lambda: None})
    with pytest.raises(UnstorableError, match=r"column 'a' .* got ndarray"):
        through(path, {"a": np.array([threading.Lock(), None], object)})


@pytest.mark.parametrize("name", ["a/b", "", ".", "__data_type__"])
def test_names_that_hdf5_cannot_store_are_rejected(path: Path, name: str) -> None:
    with pytest.raises(UnstorableError, match="must be valid in HDF5"):
        through(path, {"x": {name: np.zeros(2)}})


def test_objects_are_unpickled_only_if_allowed(path: Path) -> None:
    counts = {"obs": {"counts": collections.deque("aab")}}
    with pytest.raises(UntrustedPickleError, match="'/obs/counts' holds pickled objects"):
        through(path, counts)
    assert through(path, counts, allow_pickle=True) == counts
    mixed = {"a": np.array([collections.deque("a"), None], object)}
    with pytest.raises(UntrustedPickleError, match="'/a' holds pickled objects"):
        through(path, mixed)
    assert through(path, mixed, allow_pickle=True)["a"].tolist() == mixed["a"].tolist()


class Malice:
    def __init__(self, path: Path) -> None:
        self.path = path

    def __reduce__(self) -> Any:
        return os.remove, (str(self.path),)


def test_no_code_is_executed_unless_allowed(path: Path, tmp_path: Path) -> None:
    victim = tmp_path / "victim"
    victim.touch()
    with h5py.File(path, "w") as file:
        for name in ("a", "b", "c"):
            file.create_dataset(name, data=np.frombuffer(pickle.dumps(Malice(victim)), np.int8))
            file[name].attrs["__data_type__"] = {"a": "list", "b": "pickled_ndarray", "c": "NoneType"}[name]
    with h5py.File(path) as file:
        for name in ("a", "b", "c"):
            with pytest.raises(UntrustedPickleError):
                from_hdf5(file[name])
    assert victim.exists()


def test_files_with_external_links_are_rejected(path: Path, tmp_path: Path) -> None:
    secret = tmp_path / "secret"
    secret.write_bytes(b"12345678")

    def external(file: Any) -> None:
        file.create_dataset("a", (8,), "i1", external=[(str(secret), 0, 8)])

    def linked(file: Any) -> None:
        file["a"] = h5py.ExternalLink(str(secret), "/")

    def soft(file: Any) -> None:
        file["a"] = h5py.SoftLink("/b")

    def virtual(file: Any) -> None:
        layout = h5py.VirtualLayout((8,), "i1")
        layout[:] = h5py.VirtualSource(str(secret), "x", (8,))
        file.create_virtual_dataset("a", layout)

    def named_type(file: Any) -> None:
        file["a"] = np.dtype("f4")

    for make in (external, linked, soft, virtual, named_type):
        with h5py.File(path, "w") as file:
            make(file)
        with h5py.File(path) as file, pytest.raises(FormatError, match="/a must be in the file itself"):
            from_hdf5(file)


def test_damaged_files_are_rejected(path: Path) -> None:
    with h5py.File(path, "w") as file:
        loop = file.create_group("loop")
        loop["up"] = loop
        file["text"] = np.zeros(3)
        file["text"].attrs["__data_type__"] = "str"
        file["cut"] = np.frombuffer(pickle.dumps("abcdef")[:-3], np.int8)
        file["cut"].attrs["__data_type__"] = "str"
        file["fields"] = np.zeros(2, [("a", "i4")])
        file["tensor"] = np.zeros(2)
        file["tensor"].attrs["__data_type__"] = "Tensor"
        file["tensor"].attrs["__torch_dtype__"] = "load"
    with h5py.File(path) as file:
        with pytest.raises(FormatError, match="must be a tree of groups"):
            from_hdf5(file["loop"])
        with pytest.raises(FormatError, match="'/text' must contain the bytes of a pickle, got float64"):
            from_hdf5(file["text"])
        with pytest.raises(FormatError, match="a pickle must contain only values"):
            from_hdf5(file["cut"])
        with pytest.raises(ColumnTypeError, match="'/fields' must have a dtype"):
            from_hdf5(file["fields"])
        with pytest.raises(FormatError, match=r"'/tensor' must name a dtype of torch: .* got 'load'"):
            from_hdf5(file["tensor"])


def test_tianshou_reads_written_files(path: Path) -> None:
    tianshou = pytest.importorskip("tianshou.data")
    values = {
        "a": np.arange(3),
        "t": torch.ones(2),
        "n": 1.5,
        "text": "hello",
        "none": None,
        "dates": ARRAYS["dates"],
        "objects": np.array([None, "a"], object),
        "batch": Batch(x=[1, 2], y=Batch(z=[3])),
        "dict": {"b": np.ones(2)},
    }
    with h5py.File(path, "w") as file:
        to_hdf5(values, file)
    with h5py.File(path) as file:
        actual = tianshou.utils.converter.from_hdf5(file)
    assert actual["a"].tolist() == [0, 1, 2]
    assert torch.equal(actual["t"], torch.ones(2))
    assert (actual["n"], actual["text"], actual["none"]) == (1.5, "hello", None)
    assert repr(actual["dates"]) == repr(ARRAYS["dates"])
    assert actual["objects"].tolist() == [None, "a"]
    assert isinstance(actual["batch"], tianshou.Batch)
    assert actual["batch"].y.z.tolist() == [3]
    assert actual["dict"]["b"].tolist() == [1, 1]


def test_files_written_by_tianshou_are_read(path: Path) -> None:
    tianshou = pytest.importorskip("tianshou.data")
    values = {
        "a": np.arange(3),
        "t": torch.ones(2),
        "n": 1.5,
        "text": "hello",
        "none": None,
        "list": [1, (2, "x")],
        "objects": np.array([None, "a", {"k": np.arange(2)}], object),
        "strings": np.array(["ab", "c"], object),
        "wide": np.array(["ab", "c"]),
        "scalar": np.float32(0.5),
        "batch": tianshou.Batch(x=[1, 2], y=tianshou.Batch(z=[3]), names=["a", "b"]),
        "dict": {"b": np.ones(2)},
    }
    with h5py.File(path, "w") as file:
        tianshou.utils.converter.to_hdf5(values, file, compression="gzip")
    with h5py.File(path) as file:
        actual = from_hdf5(file)
    assert actual.keys() == values.keys()
    assert actual["a"].tolist() == [0, 1, 2]
    assert torch.equal(actual["t"], torch.ones(2))
    assert (actual["n"], actual["text"], actual["none"], actual["list"]) == (1.5, "hello", None, [1, (2, "x")])
    assert actual["scalar"] == np.float32(0.5)
    assert repr(actual["objects"]) == repr(values["objects"])
    assert actual["strings"].tolist() == actual["wide"].tolist() == ["ab", "c"]
    assert actual["batch"] == Batch(x=[1, 2], y=Batch(z=[3]), names=np.array(["a", "b"], object))
    assert actual["dict"]["b"].tolist() == [1, 1]
