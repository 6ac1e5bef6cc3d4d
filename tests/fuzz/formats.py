"""The formats that are fuzzed: files and folders of batches and buffers, states, pickles read as data."""

from __future__ import annotations

import pickle
from collections.abc import Callable
from contextlib import ExitStack, suppress
from pathlib import Path
from random import Random
from typing import Any
from unittest import mock

import numpy as np

from samplebatch import (
    Batch,
    CachedReplayBuffer,
    Dataset,
    MultiAgentBatch,
    MultiAgentReplayBuffer,
    PrioritizedReplayBuffer,
    PrioritizedVectorReplayBuffer,
    ReplayBuffer,
    SampleBatch,
    VectorReplayBuffer,
    load,
    read_arrow,
    read_parquet,
    write_arrow,
    write_parquet,
)
from samplebatch.batch.inert_pickle import is_plain, read_pickle
from samplebatch.column.compressed import CompressedColumn
from samplebatch.column.tensor import TensorColumn
from samplebatch.errors import ArgumentError, ColumnNotFoundError
from samplebatch.storage.buffers.file import write_buffer
from samplebatch.storage.buffers.state import CHECKSUMS
from samplebatch.storage.hdf5 import from_hdf5, to_hdf5, write_hdf5
from tests.fuzz.driver import FileTarget, files_of, written
from tests.fuzz.mutations import Files, mutate, mutate_tree
from tests.optional import HAS_TORCH, torch
from tests.uncompiled import uncompile_tianshou

N = 6


def bfloat16(*shape: int) -> Any:
    """Return a tensor of a dtype that NumPy lacks; without torch, an array of another dtype."""
    return torch.zeros(*shape, dtype=torch.bfloat16) if HAS_TORCH else np.zeros(shape, np.float16)


def batches() -> list[SampleBatch | MultiAgentBatch]:
    """Return batches with every kind of column."""
    rng = np.random.default_rng(0)
    plain = SampleBatch(obs=rng.normal(size=(N, 3)).astype("f4"), rewards=np.arange(N), terminateds=np.zeros(N, bool))
    objects = SampleBatch(
        infos=[{"lives": i, "name": "x" * i, "path": [0.5] * i, "at": (1, None)} for i in range(N)],
        empty=[{}] * N,
        nothing=[None] * N,
        words=["left", "right", None, "", "up", "up"],
        seen=[np.arange(i, dtype=np.int32) for i in range(N)],
        maps=[np.zeros((i, 2)) for i in range(N)],
    )
    nested = SampleBatch(
        obs={"image": np.zeros((N, 4, 4), np.uint8), "inner": {"z": np.arange(N) * 1j}},
        dates=np.arange(N).astype("M8[s]"),
        tensor=bfloat16(N, 2),
    )
    recurrent = SampleBatch(a=np.arange(N), state_in_0=np.ones((2, 4)), seq_lens=[4, 2])
    agents = MultiAgentBatch({"one": plain, "two": SampleBatch(obs=np.zeros((3, 2)), infos=[{}, {}, {"a": 1}])}, N)
    return [plain, objects, nested, recurrent, agents]


def use_batch(batch: Any) -> None:
    """Read every value of a batch."""
    if isinstance(batch, MultiAgentBatch):
        for part in batch.policy_batches.values():
            use_batch(part)
        return
    repr(batch)
    for value in batch.values():
        use_value(value)
    if len(batch):
        batch[: len(batch) // 2 + 1].copy()
    batch.to_arrow()
    assert batch == batch.copy() or batch.count != len(batch)


def use_value(value: Any) -> None:
    if isinstance(value, dict):
        for inner in value.values():
            use_value(inner)
    elif hasattr(value, "numpy"):
        value.float().sum()
    elif isinstance(value, np.ndarray) and value.dtype.kind in "biufc":
        with np.errstate(all="ignore"):
            value.sum()
    else:
        repr(value)


def without_checksums() -> ExitStack:
    """Write files without checksums, like older versions and forgers, so that changes are not detected by checksums."""
    stack = ExitStack()
    stack.enter_context(mock.patch("samplebatch.storage.checksums.add"))
    stack.enter_context(mock.patch("samplebatch.storage.checksums.write", lambda file, data, form: file.write(data)))
    return stack


class BatchFile(FileTarget):
    """File with a batch."""

    def __init__(self, write: Callable[[Any, Path], Any], read: Callable[[Path], Any]) -> None:
        self._write, self._read = write, read

    def samples(self, folder: Path) -> list[Files]:
        folder.mkdir()
        created = []
        for batch in batches():
            self._write(batch, folder / "batch")
            created.append({"batch": (folder / "batch").read_bytes()})
            with without_checksums():
                self._write(batch, folder / "batch")
            created.append({"batch": (folder / "batch").read_bytes()})
        return created

    def read(self, sample: Files, folder: Path) -> None:
        use_batch(self._read(written(sample, folder) / "batch"))


ARROW = BatchFile(write_arrow, read_arrow)
# Unverified: the checksums of pages would find all changes of values.
PARQUET = BatchFile(write_parquet, lambda path: read_parquet(path, verify=False))


class SelectedFile(BatchFile):
    """File with a batch, of which only some columns and rows are read."""

    def read(self, sample: Files, folder: Path) -> None:
        path = written(sample, folder) / "batch"
        for options in ({"columns": ["obs"]}, {"filters": [("rewards", ">", 1)]}):
            with suppress(ColumnNotFoundError, ArgumentError):
                use_any(load(path, verify=False, **options))


def use_any(batch: Any) -> None:
    """Read every value of a batch of any type."""
    if isinstance(batch, Batch):
        use_nested(batch)
    else:
        use_batch(batch)


SELECTED_ARROW = SelectedFile(write_arrow, load)
SELECTED_PARQUET = SelectedFile(write_parquet, load)
BATCH_HDF5 = BatchFile(write_hdf5, lambda path: load(path, verify=False))


class DatasetFolder(FileTarget):
    """Folder of Parquet files."""

    def samples(self, folder: Path) -> list[Files]:
        dataset = Dataset(folder)
        with without_checksums():
            for start in range(3):
                dataset.extend(SampleBatch(obs=np.zeros((N, 2)), t=np.arange(N) + start, infos=[{"a": 1}] * N))
        return [files_of(folder)]

    def read(self, sample: Files, folder: Path) -> None:
        dataset = Dataset(written(sample, folder))
        for batch in dataset.fragments():
            use_batch(batch)
        use_batch(dataset.read())


PARQUET_DATASET = DatasetFolder()


# Buffers


def steps(n: int, make: Any = Batch, *, objects: bool = False) -> list[Any]:
    """Return steps of n environments; if n is 0, a single step without a leading axis."""
    many = max(n, 1)
    actual = []
    for i in range(14):
        batch = make(
            obs={"x": np.full((many, 3), i, np.float32), "image": np.full((many, 4, 4), i, np.uint8)},
            act=np.arange(many) + i,
            rew=np.ones(many) * i,
            terminated=np.full(many, i % 7 == 6),
            truncated=np.full(many, i % 5 == 4),
            obs_next={"x": np.full((many, 3), i + 1, np.float32), "image": np.full((many, 4, 4), i + 1, np.uint8)},
            info={"lives": np.full(many, i % 3)},
        )
        if objects:
            batch.info.text = np.array(["a" * (i % 4)] * many, object)
        actual.append(batch if n else batch[0])
    return actual


def buffers(**options: Any) -> list[Any]:
    """Return partly filled and overwritten buffers of several classes; with `storage`, buffers in folders."""
    storage = options.pop("storage", None)
    objects = storage is None
    created: list[tuple[Any, int]] = []

    def kept(name: str) -> dict[str, Any]:
        return options if storage is None else {**options, "storage": f"{storage}/{name}"}

    created.append((ReplayBuffer(20, **kept("plain")), 0))
    created.append((VectorReplayBuffer(20, 2, stack_num=2, ignore_obs_next=True, **kept("vector")), 2))
    created.append((PrioritizedVectorReplayBuffer(16, 2, alpha=0.6, beta=0.4, ignore_obs_next=True, **kept("prio")), 2))
    if storage is None:
        created.append((ReplayBuffer(10, compress="obs"), 0))
    for buffer, n in created:
        for step in steps(n, objects=objects):
            buffer.add(step)
    return [buffer for buffer, _ in created]


def use_buffer(buffer: Any) -> None:
    """Read, sample and fill a buffer."""
    repr(buffer)
    if len(buffer):
        use_nested(buffer.sample(8)[0])
        use_nested(buffer[buffer.sample_indices(0)])
    for _ in range(2):
        buffer.add(steps(buffer.buffer_num if hasattr(buffer, "buffer_num") else 0, objects="text" in str(buffer))[0])
    buffer.state_dict()


def use_nested(batch: Batch) -> None:
    for value in batch.__dict__.values():
        if isinstance(value, Batch):
            use_nested(value)
        else:
            use_value(value)


class BufferFile(FileTarget):
    """File with a buffer."""

    def __init__(self, write: Callable[[Any, Path], Any], read: Callable[[Path], Any]) -> None:
        self._write, self._read = write, read

    def made(self) -> list[Any]:
        return buffers()

    def samples(self, folder: Path) -> list[Files]:
        folder.mkdir()
        actual = []
        for buffer in self.made():
            with without_checksums():
                self._write(buffer, folder / "buffer")
            actual.append({"buffer": (folder / "buffer").read_bytes()})
        return actual

    def read(self, sample: Files, folder: Path) -> None:
        use_buffer(self._read(written(sample, folder) / "buffer"))


BUFFER_FILE = BufferFile(write_buffer, ReplayBuffer.load)
BUFFER_PARQUET = BufferFile(lambda buffer, path: write_buffer(buffer, path, "Parquet"), ReplayBuffer.load)
BUFFER_HDF5 = BufferFile(lambda buffer, path: buffer.save_hdf5(path), ReplayBuffer.load_hdf5)


class TianshouBuffer(BufferFile):
    """A buffer file from Tianshou, which does not contain the buffer's class."""

    def made(self) -> list[Any]:
        uncompile_tianshou()
        from tianshou import data

        result = [
            (data.ReplayBuffer(20), 0),
            (data.VectorReplayBuffer(20, 2), 2),
            (data.PrioritizedVectorReplayBuffer(20, 2, alpha=0.6, beta=0.4), 2),
        ]
        for buffer, n in result:
            for step in steps(n, data.Batch):
                buffer.add(step)
        return [buffer for buffer, _ in result]


TIANSHOU_HDF5 = TianshouBuffer(lambda buffer, path: buffer.save_hdf5(str(path)), ReplayBuffer.load_hdf5)


class BufferFolder(FileTarget):
    """Folder with a buffer whose columns are memory-mapped."""

    def samples(self, folder: Path) -> list[Files]:
        folder.mkdir()
        for buffer in buffers(storage=folder):
            buffer.close()
        return [files_of(path) for path in sorted(folder.iterdir())]

    def read(self, sample: Files, folder: Path) -> None:
        buffer = ReplayBuffer.open(written(sample, folder))
        try:
            use_buffer(buffer)
        finally:
            buffer.close()


BUFFER_FOLDER = BufferFolder()


class Policies(FileTarget):
    """Folder with a multi-agent buffer."""

    def samples(self, folder: Path) -> list[Files]:
        buffer = MultiAgentReplayBuffer(10, lockstep=True)
        for start in range(3):
            t = np.arange(4)
            rows = SampleBatch(
                obs=t, actions=t, rewards=t * 1.0, terminateds=t == 3, eps_id=np.full(4, start), t=t, infos=[{}] * 4
            )
            buffer.add(MultiAgentBatch({"one": rows, "two": rows[:2]}, 4))
        with without_checksums():
            buffer.save(folder)
        return [files_of(folder)]

    def read(self, sample: Files, folder: Path) -> None:
        buffer = load(written(sample, folder))
        repr(buffer)
        if buffer.env_steps():
            buffer.sample(4)


POLICIES = Policies()


class BufferState:
    """State of a buffer as plain values and arrays."""

    def samples(self, folder: Path) -> list[Any]:
        states = [buffer.state_dict() for buffer in (*buffers(), self._cached())]
        return [*states, *({name: part for name, part in state.items() if name != CHECKSUMS} for state in states)]

    def _cached(self) -> Any:
        buffer = CachedReplayBuffer(ReplayBuffer(8), 2, 6)
        for step in steps(2):
            buffer.add(step, buffer_ids=[0, 1])
        return buffer

    def mutate(self, sample: Any, rng: Random) -> Any:
        return mutate_tree(sample, rng)

    def read(self, sample: Any, folder: Path) -> None:
        kind = sample.get("class") if isinstance(sample, dict) else None
        buffer: Any = {
            "VectorReplayBuffer": lambda: VectorReplayBuffer(20, 2, stack_num=2, ignore_obs_next=True),
            "PrioritizedVectorReplayBuffer": lambda: PrioritizedVectorReplayBuffer(
                16, 2, alpha=0.6, beta=0.4, ignore_obs_next=True
            ),
            "CachedReplayBuffer": self._cached,
            "PrioritizedReplayBuffer": lambda: PrioritizedReplayBuffer(20, alpha=0.6, beta=0.4),
        }.get(kind if isinstance(kind, str) else "", lambda: ReplayBuffer(_size_of(sample)))()
        buffer.load_state_dict(sample)
        if not isinstance(buffer, CachedReplayBuffer):
            use_buffer(buffer)


def _size_of(sample: Any) -> int:
    try:
        return int(sample["table"]["rings"]["maxsizes"][0]) % 64
    except (KeyError, TypeError, IndexError, ValueError, OverflowError):
        return 20


BUFFER_STATE = BufferState()


# HDF5 without a buffer


class Hdf5(FileTarget):
    """HDF5 file with nested values."""

    def samples(self, folder: Path) -> list[Files]:
        import h5py

        folder.mkdir()
        values = {
            "rew": np.ones(N),
            "text": "hello",
            "names": np.array(["a", "bc"], object),
            "none": None,
            "list": [1, {"a": (2, 3)}, np.arange(3)],
            "tensor": bfloat16(3, 2),
            "inner": Batch(x=np.zeros((40, 30), np.uint8), lives=3),
        }
        actual = []
        for compression in (None, "gzip"):
            with h5py.File(folder / "values", "w") as file:
                to_hdf5(values, file, compression)
            actual.append({"values": (folder / "values").read_bytes()})
        return actual

    def read(self, sample: Files, folder: Path) -> None:
        import h5py

        try:
            file = h5py.File(written(sample, folder) / "values", "r")
        except OSError:
            return  # opened by the user, who is told by h5py
        with file:
            for value in from_hdf5(file).values():
                use_value(value)


HDF5 = Hdf5()


# Bytes


class InertPickle:
    """Pickle that is read without being executed."""

    def samples(self, folder: Path) -> list[bytes]:
        shared: Any = (1, "a")
        values = [
            {"a": np.arange(4), "b": [None, np.array(["x", None], object)], "c": Path("/tmp")},
            [shared, (shared, shared), {1, 2}, frozenset("ab"), b"xy", 1 << 80, -1.5],
            np.array([{"k": np.float32(1)}, (np.datetime64(3, "s"),)], object),
            np.asfortranarray(np.zeros((3, 4), ">f4")),
        ]
        return [pickle.dumps(value, protocol) for value in values for protocol in (4, 5)]

    def mutate(self, sample: bytes, rng: Random) -> bytes:
        return mutate(sample, rng)

    def read(self, sample: bytes, folder: Path) -> None:
        is_plain(read_pickle(sample))


INERT_PICKLE = InertPickle()


class Compressed:
    """Compressed column as received from another process: header and blocks."""

    def samples(self, folder: Path) -> list[Any]:
        frames = np.arange(40 * 12 * 12).reshape(40, 12, 12).astype(np.uint16) // 100
        column = CompressedColumn.compress(TensorColumn(frames), 7)
        actual = []
        for part in (column, column.slice(3, 30), CompressedColumn.compress(TensorColumn(frames), bulk=True)):
            header, blocks = part.dump()
            actual.append((tuple(header), [bytes(block) for block in blocks]))
        return actual

    def mutate(self, sample: Any, rng: Random) -> Any:
        header, blocks = sample
        if rng.random() < 0.5:
            return mutate_tree(header, rng), blocks
        at = rng.randrange(len(blocks))
        return header, [*blocks[:at], mutate(blocks[at], rng), *blocks[at + 1 :]]

    def read(self, sample: Any, folder: Path) -> None:
        header, blocks = sample
        column = CompressedColumn.load(header, blocks, allow_pickle=False)
        rows = column.to_numpy()
        assert len(rows) == len(column)
        column.take(np.arange(len(column))[::2])


COMPRESSED = Compressed()

TARGETS = {
    name: f"tests.fuzz.formats:{name}"
    for name in (
        "ARROW", "PARQUET", "PARQUET_DATASET", "BUFFER_FILE", "BUFFER_FOLDER", "BUFFER_STATE", "BUFFER_HDF5",
        "TIANSHOU_HDF5", "HDF5", "INERT_PICKLE", "COMPRESSED", "SELECTED_ARROW", "SELECTED_PARQUET", "BATCH_HDF5",
        "BUFFER_PARQUET", "POLICIES",
    )
}  # fmt: skip
