"""No code of a file's writer runs unless that is allowed: every format, at every depth."""

from __future__ import annotations

import json
import pickle
from collections import deque
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pytest
from pyarrow import parquet

from samplebatch import Batch, Dataset, MultiAgentBatch, ReplayBuffer, SampleBatch
from samplebatch.errors import FormatError, SampleBatchError, UntrustedPickleError
from samplebatch.storage.tables.arrow import read_arrow
from samplebatch.storage.tables.parquet import read_parquet
from tests.malice import NESTINGS, ROWS, Mark, field_of, with_field
from tests.storage.parts import commit

# -- batches -----------------------------------------------------------------------------------------------------------


class Capsule:
    """Stream of tables that another library exports."""

    def __init__(self, table: pa.Table) -> None:
        self._table = table

    def __arrow_c_stream__(self, requested_schema: Any = None) -> Any:
        return self._table.__arrow_c_stream__(requested_schema)


def batch_table(nesting: str, mark: Path) -> pa.Table:
    batch = SampleBatch(obs=np.zeros((ROWS, 3)), infos=[{}] * ROWS)
    return with_field(batch.to_arrow(), *field_of(nesting, mark, "infos"))


def policies_table(nesting: str, mark: Path) -> pa.Table:
    batch = SampleBatch(infos=[{}] * ROWS)
    return with_field(MultiAgentBatch({"wolf": batch}, ROWS).to_arrow(), *field_of(nesting, mark, "infos"))


def arrow_file(table: pa.Table, folder: Path) -> Path:
    path = folder / "batch.arrow"
    with pa.OSFile(str(path), "wb") as file, pa.ipc.new_file(file, table.schema) as writer:
        writer.write_table(table)
    return path


def parquet_file(table: pa.Table, folder: Path) -> Path:
    path = folder / "part-000000-00000000.parquet"
    parquet.write_table(table, path)
    return path


FROM_ARROW: dict[str, Callable[[pa.Table, Path], Any]] = {
    "from_arrow": lambda table, _: SampleBatch.from_arrow(table),
    "a capsule": lambda table, _: SampleBatch.from_arrow(Capsule(table)),
    "an Arrow file": lambda table, folder: read_arrow(arrow_file(table, folder)),
    "an Arrow file that is read": lambda table, folder: read_arrow(arrow_file(table, folder), memory_map=False),
    "a Parquet file": lambda table, folder: read_parquet(parquet_file(table, folder)),
    "a Parquet dataset": lambda table, folder: Dataset(commit(parquet_file(table, folder))).read(),
}


@pytest.mark.parametrize("nesting", NESTINGS)
@pytest.mark.parametrize("way", FROM_ARROW)
def test_tables_are_not_unpickled(way: str, nesting: str, mark: Path, tmp_path: Path) -> None:
    with pytest.raises(UntrustedPickleError, match="column 'infos' holds pickled objects"):
        FROM_ARROW[way](batch_table(nesting, mark), tmp_path)


@pytest.mark.parametrize("nesting", NESTINGS)
@pytest.mark.parametrize("way", ["from_arrow", "an Arrow file", "a Parquet file"])
def test_tables_of_several_policies_are_not_unpickled(way: str, nesting: str, mark: Path, tmp_path: Path) -> None:
    reads = FROM_ARROW | {"from_arrow": lambda table, _: MultiAgentBatch.from_arrow(table)}
    with pytest.raises(UntrustedPickleError, match="column 'infos' holds pickled objects"):
        reads[way](policies_table(nesting, mark), tmp_path)


@pytest.mark.parametrize("nesting", NESTINGS)
def test_the_pickle_permission_applies_at_every_depth(nesting: str, tmp_path: Path) -> None:
    mark = tmp_path / "code has run"
    mark.mkdir()
    empty = nesting in ("nothing but None", "list without elements")
    if empty:
        assert len(SampleBatch.from_arrow(batch_table(nesting, mark), allow_pickle=True)) == ROWS
        return
    with pytest.raises(FormatError, match="File exists"):
        SampleBatch.from_arrow(batch_table(nesting, mark), allow_pickle=True)


def test_extension_types_of_arrow_are_not_unpickled(mark: Path, tmp_path: Path) -> None:
    metadata = {
        b"ARROW:extension:name": b"arrow.py_extension_type",
        b"ARROW:extension:metadata": pickle.dumps(Mark(mark)),
    }
    table = pa.table([pa.array([1, 2])], pa.schema([pa.field("obs", pa.int64(), metadata=metadata)]))
    assert SampleBatch.from_arrow(pa.ipc.open_file(arrow_file(table, tmp_path)).read_all())["obs"].tolist() == [1, 2]


# -- buffers -----------------------------------------------------------------------------------------------------------


def buffer_with_notes() -> ReplayBuffer:
    """Return a buffer of two steps with objects in rows and in final observations."""
    buffer = ReplayBuffer(ROWS, ignore_obs_next=True)
    for _ in range(ROWS):
        obs, info = {"x": 0.0, "note": "text"}, {"note": "text"}
        buffer.add(Batch(obs=obs, obs_next=obs, act=0, rew=0.0, terminated=False, truncated=True, info=info))
    return buffer


def repeated(array: pa.Array, n: int) -> pa.Array:
    """Repeat the rows of an array until they are n."""
    return array.take(pa.array(np.arange(n) % len(array)))


@pytest.mark.parametrize("nesting", NESTINGS)
@pytest.mark.parametrize("name", ["info.note", "obs_next.note"])
def test_saved_buffers_are_not_unpickled(name: str, nesting: str, mark: Path, tmp_path: Path) -> None:
    path = tmp_path / "batch.arrow"
    buffer_with_notes().save(path)
    with pa.OSFile(str(path)) as source:
        table = pa.ipc.open_file(source).read_all()
    field, array = field_of(nesting, mark, name)
    if name.startswith("obs_next"):
        lists = table.column(name).chunk(0)
        array = pa.LargeListArray.from_arrays(lists.offsets, repeated(array, len(lists.values)))
        field = pa.field(name, array.type, metadata=field.metadata)
    arrow_file(with_field(table, field, array), tmp_path)
    with pytest.raises(UntrustedPickleError, match=f"column '{name}' holds pickled objects"):
        ReplayBuffer.load(path)


def test_a_folder_rejects_object_columns(mark: Path, tmp_path: Path) -> None:
    folder = tmp_path / "buffer"
    with ReplayBuffer(ROWS, storage=folder) as buffer:
        buffer.add(Batch(obs=0, act=0, rew=0.0, terminated=False, truncated=False))
    (layout,) = folder.glob("layout.*.json")
    plain = json.loads(layout.read_text())
    del plain["checksum"]
    for dtype in ("O", "|O", "object"):
        plain["columns"]["obs"]["dtype"] = dtype
        layout.write_text(json.dumps(plain))
        (folder / f"{plain['columns']['obs']['file']}.column").write_bytes(pickle.dumps(Mark(mark)).ljust(16)[:16])
        with pytest.raises(FormatError, match="must describe column 'obs'"):
            ReplayBuffer.open(folder, verify=False)


def test_a_state_dict_contains_plain_values_and_no_pickles(mark: Path) -> None:
    state = buffer_with_notes().state_dict()
    for name in ("generator", "sampler", "table"):
        buffer = ReplayBuffer(ROWS, ignore_obs_next=True)
        with pytest.raises(SampleBatchError):
            buffer.load_state_dict({**state, name: pickle.dumps(Mark(mark))}, verify=False)


# -- HDF5 --------------------------------------------------------------------------------------------------------------

IN_HDF5: dict[str, Callable[[Mark], Any]] = {
    "object": lambda mark: mark,
    "list": lambda mark: [mark],
    "tuple": lambda mark: (1, (mark,)),
    "dict in a list": lambda mark: [{"a": mark}],
    "dict's key": lambda mark: [{Key(mark): 1}],
    "set": lambda mark: {Key(mark)},
    "array of objects": lambda mark: np.array([mark, None], object),
    "array within an array": lambda mark: np.array([np.array([mark, 1], object), None], object),
    "state of an object": lambda mark: deque([mark]),
}


class Key:
    """Hashable object that is pickled as another object."""

    def __init__(self, mark: Mark) -> None:
        self._mark = mark

    def __reduce__(self) -> Any:
        return self._mark.__reduce__()


@pytest.mark.parametrize("nesting", IN_HDF5)
@pytest.mark.parametrize("protocol", [0, 2, 4, 5])
def test_values_in_hdf5_are_not_unpickled(nesting: str, protocol: int, mark: Path, tmp_path: Path) -> None:
    h5py = pytest.importorskip("h5py")
    from samplebatch import from_hdf5

    data = pickle.dumps(IN_HDF5[nesting](Mark(mark)), protocol)
    path = tmp_path / "values.hdf5"
    with h5py.File(path, "w") as file:
        dataset = file.create_group("info").create_dataset("note", data=np.frombuffer(data, np.int8))
        dataset.attrs["__data_type__"] = "list"
    with h5py.File(path) as file, pytest.raises((UntrustedPickleError, FormatError)) as error:
        from_hdf5(file)
    # Protocols before 3 have calls where later ones have none, and are not read at all.
    assert protocol < 4 or ("'/info/note' holds pickled" in str(error.value) and error.type is UntrustedPickleError)


@pytest.mark.parametrize("position", ["column", "final observations", "buffers", "reward function"])
def test_buffers_in_hdf5_are_not_unpickled(position: str, mark: Path, tmp_path: Path) -> None:
    h5py = pytest.importorskip("h5py")
    path = tmp_path / "buffer.hdf5"
    buffer_with_notes().save_hdf5(path)
    pickled = np.frombuffer(pickle.dumps([Mark(mark)]), np.int8)
    with h5py.File(path, "a") as file:
        if position == "column":
            del file["_meta/info/note"]
            file["_meta/info/note"] = pickled
            file["_meta/info/note"].attrs["__data_type__"] = "pickled_ndarray"
        elif position == "final observations":
            attributes = file["_indices"].attrs
            attributes["samplebatch.finals"] = with_malicious_note(attributes["samplebatch.finals"], mark)
        else:
            name = {"buffers": "buffers", "reward function": "compute_reward_fn"}[position]
            file[name] = pickled
            file[name].attrs["__data_type__"] = "pickled_ndarray"
    if position in ("column", "final observations"):
        with pytest.raises(UntrustedPickleError, match="holds pickled objects"):
            ReplayBuffer.load_hdf5(path)
    else:
        # Of such a buffer's own there is nothing to be read there.
        assert len(ReplayBuffer.load_hdf5(path)) == ROWS


def with_malicious_note(stream: Any, mark: Path) -> np.ndarray:
    """Insert a malicious column into the stream of final observations."""
    batch = pa.ipc.open_stream(pa.py_buffer(np.asarray(stream, np.uint8))).read_next_batch()
    position = next(i for i, field in enumerate(batch.schema) if field.metadata)
    field, array = field_of("dict", mark, batch.schema.field(position).name)
    schema = batch.schema.set(position, field)
    columns = [repeated(array, batch.num_rows) if i == position else column for i, column in enumerate(batch.columns)]
    sink = pa.BufferOutputStream()
    with pa.ipc.new_stream(sink, schema) as writer:
        writer.write_batch(pa.record_batch(columns, schema=schema))
    return np.frombuffer(sink.getvalue(), np.uint8)
