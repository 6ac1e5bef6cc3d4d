"""Packed columns of RLlib are unpacked without executing code, or rejected."""

from __future__ import annotations

import base64
import pickle
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pytest

from samplebatch import MultiAgentBatch, SampleBatch
from samplebatch.errors import FormatError, UntrustedPickleError

ROWS = np.arange(24, dtype=np.float32).reshape(4, 2, 3)


def frame(pickled: bytes) -> bytes:
    sink = pa.BufferOutputStream()
    with pa.CompressedOutputStream(sink, "lz4") as stream:
        stream.write(pickled)
    return sink.getvalue().to_pybytes()


def pack(value: Any) -> str:
    """Pack a value like RLlib, which uses the newest pickle protocol."""
    return base64.b64encode(frame(pickle.dumps(value, 5))).decode()


@pytest.mark.parametrize(
    "rows",
    [
        [pack(row) for row in ROWS],
        np.array([pack(row) for row in ROWS]),
        [pack(row).encode() for row in ROWS],
        [frame(pickle.dumps(row, 5)) for row in ROWS],
    ],
    ids=["strings", "array of strings", "base64 bytes", "bytes"],
)
def test_packed_rows_are_unpacked(rows: Any) -> None:
    batch = SampleBatch(obs=rows, t=np.arange(4))
    assert batch.decompress_if_needed() is batch
    assert batch["obs"].dtype == np.float32
    assert batch["obs"].tolist() == ROWS.tolist()
    assert batch.decompress_if_needed()["obs"].tolist() == ROWS.tolist()


def test_other_columns_are_unpacked_only_if_listed() -> None:
    batch = SampleBatch(obs={"x": [pack(row) for row in ROWS]}, actions=[pack(np.int64(i)) for i in range(4)])
    MultiAgentBatch({0: batch}, 4).decompress_if_needed(["obs", "actions"])
    assert batch["obs"]["x"].tolist() == ROWS.tolist()
    assert batch["actions"].tolist() == [0, 1, 2, 3]


def test_rows_that_differ_in_shape_become_ragged() -> None:
    batch = SampleBatch(obs=[pack(ROWS[0]), pack(ROWS[0, :1])]).decompress_if_needed()
    assert batch.column("obs").kind == "ragged"


def test_ordinary_strings_are_not_unpacked() -> None:
    for words in (["north", "BCJ"], [b"north", b""], ["", "BCJNG"], np.array(["a", "b"])):
        batch = SampleBatch(obs=words).decompress_if_needed()
        assert list(batch["obs"]) == list(words)
    assert len(SampleBatch(obs=np.empty(0, "U3")).decompress_if_needed()) == 0


class Touch:
    def __init__(self, path: Path) -> None:
        self.path = path

    def __reduce__(self) -> Any:
        return Path.touch, (self.path,)


def test_pickled_code_runs_only_with_permission(tmp_path: Path) -> None:
    trap = tmp_path / "trap"
    rows = [pack({"obs": Touch(trap)})]
    batch = SampleBatch(obs=rows)
    with pytest.raises(UntrustedPickleError, match=r"column 'obs' holds pickled objects.*allow_pickle=True"):
        batch.decompress_if_needed()
    assert batch["obs"].tolist() == rows
    assert not trap.exists()
    batch.decompress_if_needed(allow_pickle=True)
    assert trap.exists()


@pytest.mark.parametrize(
    "damage",
    [
        lambda packed: packed[:-8],
        lambda packed: packed[:12] + "!" + packed[13:],
        lambda packed: "north",
        lambda packed: base64.b64encode(frame(b"no pickle")).decode(),
    ],
    ids=["cut", "no base64", "plain", "no pickle"],
)
def test_damaged_rows_are_rejected(damage: Any) -> None:
    packed = pack(ROWS[0])
    with pytest.raises(FormatError, match="column 'obs' must have rows"):
        SampleBatch(obs=[packed, damage(packed)]).decompress_if_needed()


@pytest.mark.filterwarnings("ignore")
def test_rllib_packs_rows_in_the_same_format() -> None:
    compression = pytest.importorskip("ray.rllib.utils.compression", exc_type=ImportError)
    if not compression.compression_supported():
        pytest.skip("RLlib packs nothing without lz4")
    theirs = [compression.pack(row) for row in ROWS]
    assert SampleBatch(obs=theirs).decompress_if_needed()["obs"].tolist() == ROWS.tolist()
