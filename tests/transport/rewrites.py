"""Memory that is written to by others after it was checked: batches of every kind are received, and used meanwhile.

The driver of `tests.fuzz` runs it, in a process that may die; by hand, with any number of cases::

    python -m tests.fuzz --cases 3000 tests.transport.rewrites:BLOCKS tests.transport.rewrites:FILES
"""

from __future__ import annotations

import contextlib
import pickle
import threading
from collections.abc import Callable
from pathlib import Path
from random import Random
from typing import Any, NamedTuple

import numpy as np
import pyarrow as pa

from samplebatch import Batch, MultiAgentBatch, SampleBatch, channel, concat_samples, read_arrow, write_arrow
from samplebatch.errors import SampleBatchError
from samplebatch.storage.tables.parquet import write_parquet
from tests.batch.every_kind import in_sequences, with_every_kind
from tests.optional import HAS_TORCH, torch

ROWS = 12
CAPACITY_NBYTES = 1 << 20
NASTY = (0, 1, 2, 3, 7, 63, 64, 255, 1 << 16, 1 << 31, 1 << 40, 1 << 62, (1 << 63) - 1, 1 << 63, (1 << 64) - 1)

BATCHES: dict[str, Callable[[], Any]] = {
    "every kind": lambda: with_every_kind(ROWS),
    "sequences": lambda: in_sequences(padded=False),
    "padded sequences": lambda: in_sequences(padded=True),
    "several policies": lambda: MultiAgentBatch({"a": ragged(), "b": in_sequences(padded=False)}, ROWS),
    "ragged": lambda: ragged(),
    "nested": lambda: nested(),
}


def ragged() -> SampleBatch:
    """Return a batch that consists mostly of offsets and other values that control memory access."""
    rows = [np.arange(i % 4, dtype=np.int16) for i in range(ROWS)]
    shaped = [np.full((i % 3, 2), i, np.int8) for i in range(ROWS)]
    plain = SampleBatch(r=rows, s=shaped, image=np.zeros((ROWS, 8), np.uint8), eps_id=np.arange(ROWS) // 3)
    return plain.compress(columns={"image"})


def nested() -> Batch:
    """Return a nested batch of arrays and columns, and a tensor if torch is installed."""
    columns = ragged()
    inner = Batch(r=columns["r"], s=columns["s"], i=[{"a": 1}] * ROWS)
    weight = torch.ones(3, 2, requires_grad=True) if HAS_TORCH else np.ones((3, 2), np.float32)
    return Batch(x=np.arange(ROWS), weight=weight, inner=inner)


class Case(NamedTuple):
    """Batch to send and the changes of its memory after the receipt; None for no change."""

    batch: str
    seed: int | None


class Rewriter:
    """Writer of random words to memory that another process reads, between the reader's steps or continuously."""

    def __init__(self, memory: np.ndarray, seed: int) -> None:
        self._rng = np.random.default_rng(seed)
        self._words = memory[: memory.nbytes // 8 * 8].view(np.uint64)
        # Numbers that are small look like offsets, lengths and sizes.
        self._small = np.flatnonzero(self._words < 1 << 12)
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._run)

    def write(self, count: int) -> None:
        rng = self._rng
        everywhere = rng.integers(0, len(self._words), count)
        places = np.where(rng.random(count) < 0.7, rng.choice(self._small, count), everywhere)
        values = rng.choice(np.array(NASTY, np.uint64), count)
        self._words[places] = np.where(rng.random(count) < 0.3, self._words[places] + 1, values)

    def _run(self) -> None:
        while not self._stop.wait(1e-4):
            self.write(64)

    def __enter__(self) -> Rewriter:
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._stop.set()
        self._thread.join()


def uses_of(batch: Any, rng: Random, folder: Path) -> list[Callable[[], Any]]:
    """List the operations that a receiver may apply to a batch."""
    if isinstance(batch, Batch):
        inner = batch.__dict__.get("inner", batch)
        return [
            lambda: list(map(touch, inner.__dict__.values())),
            lambda: [column.copy() for column in inner.__dict__.values()],
            lambda: pickle.dumps(batch),
            lambda: inner[2:7],
            lambda: send_on(batch),
        ]
    parts = batch.policy_batches.values() if isinstance(batch, MultiAgentBatch) else [batch]
    return [
        lambda: export(batch.to_arrow()),
        lambda: write_parquet(batch, folder / "batch.parquet"),
        lambda: write_arrow(batch, folder / "batch.arrow"),
        lambda: pickle.dumps(batch, 5),
        lambda: batch.copy(),
        lambda: concat_samples([batch, batch]),
        lambda: send_on(batch),
        *[use for part in parts for use in uses_of_part(part, rng)],
    ]


def uses_of_part(part: SampleBatch, rng: Random) -> list[Callable[[], Any]]:
    n = len(part)
    start, stop = sorted(rng.choices(range(n + 1), k=2))
    rows = np.array(rng.choices(range(n), k=n))
    uses: list[Callable[[], Any]] = [
        lambda: [touch(part[name]) for name in part.column_names],
        lambda: export(part[start:stop].to_arrow()),
        lambda: part.take(rows),
        lambda: part[start:stop].copy(),
        lambda: part.decompress_if_needed(),
        lambda: part.timeslices(num_slices=3),
    ]
    if "seq_lens" in part.column_names:
        uses += [
            lambda: part.right_zero_pad(4),
            lambda: part.take_sequences(np.array([3, 0])),
            lambda: part[1:4].mask(),
        ]
    elif "eps_id" in part.column_names:
        uses += [lambda: part.split_by_episode(), lambda: part.shuffle()]
    return uses


def perform(uses: list[Callable[[], Any]], *, may_refuse: bool) -> None:
    """Apply all operations to a batch; library errors are allowed if the memory was rewritten."""
    for use in uses:
        with contextlib.suppress(SampleBatchError) if may_refuse else contextlib.nullcontext():
            use()


def touch(column: Any) -> None:
    """Read every element of a column's value: an array, a tensor, or rows of either."""
    for row in column:
        repr(row)


def export(table: pa.Table) -> None:
    """Read all values of a table with Arrow, by the table's offsets."""
    sink = pa.BufferOutputStream()
    with pa.ipc.new_stream(sink, table.schema) as writer:
        writer.write_table(table)
    for column in table.columns:
        for chunk in column.chunks:
            chunk.take(pa.array(np.arange(len(chunk))[::-1]))


def send_on(batch: Any) -> None:
    producer, consumer = channel(CAPACITY_NBYTES, allow_pickle=True)
    with producer, consumer:
        producer.send(batch)
        consumer.recv(timeout_s=5).copy()


class Blocks:
    """Batches in the block of a channel, which the sender overwrites after their receipt."""

    def samples(self, folder: Path) -> list[Case]:
        return [Case(name, None) for name in BATCHES]

    def mutate(self, sample: Case, rng: Random) -> Case:
        return sample._replace(seed=rng.getrandbits(32))

    def read(self, sample: Case, folder: Path) -> None:
        rng = Random(sample.seed)
        producer, consumer = channel(CAPACITY_NBYTES, allow_pickle=True)
        with producer, consumer:
            producer.send(BATCHES[sample.batch]())
            batch = consumer.recv(timeout_s=5)
            uses = uses_of(batch, rng, folder)
            rng.shuffle(uses)
            if sample.seed is None:
                perform(uses, may_refuse=False)
                return
            rewriter = Rewriter(block_of(producer, consumer), sample.seed)
            for use in uses:
                rewriter.write(16)
                perform([use], may_refuse=True)
            if sample.seed % 4 == 0:
                with rewriter:
                    perform(uses, may_refuse=True)


def block_of(producer: Any, consumer: Any) -> np.ndarray:
    """View the only lent block from the sender's side."""
    ((lease),) = [reference() for reference in consumer._lent.values()]
    start = lease.ctypes.data - consumer._memory.ctypes.data
    return np.asarray(producer._memory)[start : start + lease.nbytes]


class Mapped:
    """Batches in memory-mapped Arrow files, which another process overwrites after they were read."""

    def samples(self, folder: Path) -> list[Case]:
        return [Case(name, None) for name in BATCHES if name != "nested"]

    def mutate(self, sample: Case, rng: Random) -> Case:
        return sample._replace(seed=rng.getrandbits(32))

    def read(self, sample: Case, folder: Path) -> None:
        rng = Random(sample.seed)
        path = folder / "mapped.arrow"
        write_arrow(BATCHES[sample.batch](), path)
        batch = read_arrow(path, allow_pickle=True)
        if sample.seed is not None:
            memory = np.memmap(path, np.uint8, "r+")
            Rewriter(memory, sample.seed).write(256)
        perform(uses_of(batch, rng, folder), may_refuse=sample.seed is not None)


BLOCKS, FILES = Blocks(), Mapped()
