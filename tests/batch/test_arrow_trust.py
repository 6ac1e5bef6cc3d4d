"""Metadata of Arrow tables is validated, and nothing is unpickled without permission."""

from __future__ import annotations

import pickle
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pytest

from samplebatch import MultiAgentBatch, SampleBatch, load
from samplebatch.batch.arrow import METADATA_KEY
from samplebatch.errors import (
    DeviceError,
    FormatError,
    SampleBatchError,
    UntrustedPickleError,
)
from tests.batch.arrow_tables import tampered, through_ipc


def test_pickled_rows_are_rejected_unless_allowed() -> None:
    batch = SampleBatch(a=[1, 2], infos=[{"set": {1}}, None])
    table = batch.to_arrow()
    with pytest.raises(UntrustedPickleError, match=r"'infos'.*allow_pickle=True"):
        SampleBatch.from_arrow(table)
    assert SampleBatch.from_arrow(table, allow_pickle=True) == batch
    policies = MultiAgentBatch({"p": batch}, 2).to_arrow()
    with pytest.raises(UntrustedPickleError, match="'infos'"):
        MultiAgentBatch.from_arrow(policies)
    assert MultiAgentBatch.from_arrow(policies, allow_pickle=True)["p"] == batch


class Bomb:
    """Object that leaves a trace when it is unpickled."""

    def __init__(self, trace: str) -> None:
        self.trace = trace

    def __reduce__(self) -> tuple[Any, ...]:
        return Path.touch, (Path(self.trace),)


def test_nothing_is_unpickled_without_permission(tmp_path: Path) -> None:
    trace = tmp_path / "trace"
    batch = SampleBatch(infos=[{"bomb": Bomb(str(trace))}])
    table = through_ipc(batch.to_arrow())
    with pytest.raises(UntrustedPickleError):
        SampleBatch.from_arrow(table)
    with pytest.raises(UntrustedPickleError):
        SampleBatch.from_arrow(table.slice(0, 1))
    assert not trace.exists()
    SampleBatch.from_arrow(table, allow_pickle=True)
    assert trace.exists()


@pytest.mark.parametrize(
    "change",
    [
        lambda about: about.pop("nested"),
        lambda about: about.pop("flags"),
        lambda about: about.pop("lists"),
        lambda about: about.pop("version"),
        lambda about: about.update(version=99),
        lambda about: about.update(version="1"),
        lambda about: about.update(type="MultiAgentBatch"),
        lambda about: about.pop("type"),
        lambda about: about.update(nested=3),
        lambda about: about.update(nested={"obs": 3}),
        lambda about: about.update(nested={"obs": {"x": "y"}}),
        lambda about: about.update(nested={"obs": [None, None]}),
        lambda about: about.update(nested=["obs"]),
        lambda about: about.update(flags=[]),
        lambda about: about.update(flags={"unknown": 1}),
        lambda about: about["flags"].update(max_seq_len="3"),
        lambda about: about["flags"].update(max_seq_len=-1),
        lambda about: about["flags"].update(zero_padded="no"),
        lambda about: about["flags"].update(zero_padded=True, max_seq_len=None),
        lambda about: about["flags"].update(zero_padded=True, max_seq_len=2),
        lambda about: about["flags"].update(time_major=True),
        lambda about: about["flags"].update(num_grad_updates="many"),
        lambda about: about.update(lists=3),
        lambda about: about.update(lists=["seq_lens"]),
        lambda about: about.update(lists=[]),
        lambda about: [],
        lambda about: None if about.clear() else "text",
    ],
)
def test_tampered_metadata_is_rejected(change: Callable[[dict[str, Any]], Any]) -> None:
    batch = SampleBatch(obs={"x": np.arange(6)}, a=np.arange(6), state_in_0=np.zeros(3), seq_lens=[1, 2, 3])
    with pytest.raises(SampleBatchError):
        SampleBatch.from_arrow(tampered(batch.to_arrow(), change))["obs"]


@pytest.mark.parametrize("raw", [b"", b"{", b"\xff\xfe", b"null", b"3", b'"x"', b"[]", b"{}"])
def test_metadata_that_is_not_a_description_is_rejected(raw: bytes) -> None:
    table = SampleBatch(a=[1]).to_arrow().replace_schema_metadata({METADATA_KEY: raw})
    for kind in (SampleBatch, MultiAgentBatch):
        with pytest.raises(FormatError):
            kind.from_arrow(table)


def test_lists_that_contradict_the_lengths_are_rejected() -> None:
    table = SampleBatch(a=np.arange(3), seq_lens=[1, 2]).to_arrow()
    for lengths in ([2, 1], [2, 2], [0, 3], [-1, 4]):
        changed = table.set_column(1, table.schema.field(1), pa.array(lengths, pa.int32()))
        with pytest.raises(SampleBatchError):
            SampleBatch.from_arrow(changed)


def test_field_metadata_that_contradicts_the_data_is_rejected() -> None:
    from samplebatch.column.types import DTYPE_KEY, TORCH_KEY

    array = pa.array([1, 2, 3], pa.int64())
    for metadata in (
        {DTYPE_KEY: b"O"},
        {DTYPE_KEY: b"no dtype"},
        {DTYPE_KEY: b"<f4"},
        {DTYPE_KEY: b"V8"},
        {DTYPE_KEY: b">i8"},
        {DTYPE_KEY: b"\xff"},
        {DTYPE_KEY: b"<c8"},
        {TORCH_KEY: b"no_dtype"},
        {TORCH_KEY: b"float32"},
        {TORCH_KEY: b"nn"},
        {TORCH_KEY: b"\xff"},
        {b"samplebatch.objects": b"{}"},
        {b"samplebatch.objects": b'{"kind": "pickle"}'},
        {b"samplebatch.objects": b'{"kind": "list", "children": [{"kind": "int"}]}'},
    ):
        table = pa.Table.from_arrays([array], schema=pa.schema([pa.field("a", pa.int64(), metadata=metadata)]))
        with pytest.raises(SampleBatchError, match="'a'"):
            SampleBatch.from_arrow(table)


LOAD = """
import sys
from samplebatch import load
from samplebatch.errors import FormatError

for path in sys.argv[1:]:
    try:
        print(path, load(path)["a"].clone())
    except FormatError as error:
        print("refused:", error)
"""


def test_dtypes_in_files_must_be_constructible_from_bytes(tmp_path: Path) -> None:
    pytest.importorskip("torch")
    paths = [str(tmp_path / name) for name in ("qint8", "quint8", "quint4x2", "quint2x4", "uint4", "bits8")]
    for path in paths:
        field = pa.field("a", pa.uint8(), metadata={b"samplebatch.torch": Path(path).name.encode()})
        metadata = SampleBatch(a=[1]).to_arrow().schema.metadata
        table = pa.table([pa.array([1, 2, 3], pa.uint8())], schema=pa.schema([field], metadata))
        with pa.ipc.new_file(f"{path}.arrow", table.schema) as file:
            file.write_table(table)
    # In a process that may die: torch does not survive every use of such tensors.
    command = [sys.executable, "-c", LOAD, *(f"{path}.arrow" for path in paths)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=60)
    assert done.returncode == 0, done.stdout + done.stderr
    lines = done.stdout.splitlines()
    assert len(lines) == len(paths), done.stdout
    for line in lines:
        assert line.startswith("refused"), line
        assert "column 'a' must name the torch dtype of its values" in line, line


@pytest.mark.parametrize("values", [[0.5, 1.5], [[0.5], [1.5, 2.5]]], ids=["tensor", "ragged"])
def test_memory_on_a_device_is_rejected(values: Any) -> None:
    batch = SampleBatch(a=values).to_device("meta")
    with pytest.raises(DeviceError, match="to_device"):
        batch.to_arrow()
    with pytest.raises(DeviceError, match="to_device"):
        pickle.dumps(batch, 5)


def empty_lists(rows: int) -> pa.Array:
    """Return rows without elements, which occupy no bytes."""
    return pa.Array.from_buffers(pa.list_(pa.int64(), 0), rows, [None], children=[pa.array([], pa.int64())])


@pytest.mark.parametrize(
    ("column", "subject"),
    [
        (empty_lists(10**9), "a table must have at most 65536 rows"),
        (pa.ExtensionArray.from_storage(pa.fixed_shape_tensor(pa.int64(), (0,)), empty_lists(10**9)), "a table must"),
        (pa.Array.from_buffers(pa.binary(0), 10**9, [None, pa.py_buffer(b"")]), "a table must"),
        (pa.LargeListArray.from_arrays([0, 10**9], empty_lists(10**9)), "a row of column 'obs' must have at most"),
    ],
)
def test_rows_without_bytes_are_rejected(column: pa.Array, subject: str, tmp_path: Path) -> None:
    table = pa.table({"obs": column})
    with pytest.raises(FormatError, match=subject):
        SampleBatch.from_arrow(table)
    table = table.replace_schema_metadata(SampleBatch(obs=[1]).to_arrow().schema.metadata)
    with pa.OSFile(str(tmp_path / "rows.arrow"), "wb") as sink, pa.ipc.new_file(sink, table.schema) as file:
        file.write_table(table)
    with pytest.raises(FormatError, match=subject):
        load(tmp_path / "rows.arrow")


def test_rows_without_bytes_are_preserved_beside_others() -> None:
    rows = 100_000
    actual = SampleBatch.from_arrow(pa.table({"obs": empty_lists(rows), "t": np.arange(rows, dtype=np.int8)}))
    assert actual["obs"].shape == (rows, 0)
    assert SampleBatch.from_arrow(SampleBatch(obs=np.zeros((rows, 0))).to_arrow().slice(0, 65536)).count == 65536
