"""Server processes for the rows of `bench_service`: our replay service, and plain Arrow Flight.

Each server is started on first use, serves all rows, and is stopped when this process exits.
"""

from __future__ import annotations

import atexit
import json
import multiprocessing
from collections.abc import Callable
from functools import cache
from itertools import cycle
from typing import Any

import numpy as np

EPISODE = 80
"""Steps per episode and per sequence."""
SIZES = {"vectors": 256, "frames": 32, "sequences": 8}
"""Items per sample: steps, or sequences."""
STEPS = {"vectors": 256, "frames": 32, "sequences": 8 * EPISODE}
"""Steps per sample and per fragment."""
STORED = {"vectors": 20_000, "frames": 512, "sequences": 20_000}
"""Number of steps in a table from which samples are drawn."""
KINDS = tuple(SIZES)

Columns = dict[str, Any]


def steps(kind: str, rows: int, seed: int = 7) -> Columns:
    """Create transitions with observations of 17 floats or four 84 x 84 frames, and actions of 6 floats."""
    rng = np.random.default_rng(seed)

    def observations() -> Any:
        if kind == "frames":
            return rng.integers(0, 256, (rows, 4, 84, 84), np.uint8)
        return rng.standard_normal((rows, 17), dtype=np.float32)

    number = np.arange(rows)
    return {
        "obs": observations(),
        "new_obs": observations(),
        "actions": rng.standard_normal((rows, 6), dtype=np.float32),
        "rewards": rng.standard_normal(rows),
        "terminateds": number % EPISODE == EPISODE - 1,
        "truncateds": np.zeros(rows, bool),
    }


def draw_samples(kind: str) -> list[Any]:
    """Draw the samples that plain Arrow Flight sends, packed as our service packs them.

    All samples together have about as many bytes as the table. A single sample would be sent from the processor's
    cache, which cannot contain the rows of a table.
    """
    from samplebatch.service.samples import pack

    table = _table(kind, filled=True)
    return [pack(_sample(table, kind)).batch for _ in range(STORED[kind] // STEPS[kind])]


class SampleGatherer:
    """Lower bound of sampling: gathers rows from one byte ring per column into the memory of one record batch.

    The number of rows and the column widths equal those of a sample of `kind`. The memory is reused: a client may
    request the next sample only after it has read the previous sample.
    """

    def __init__(self, kind: str) -> None:
        import pyarrow as pa

        sample = draw_samples(kind)[0]
        self._kind, self._rng = kind, np.random.default_rng(7)
        self._columns, arrays = [], []
        for column in sample.columns:
            values = np.frombuffer(column.buffers()[-1], np.uint8).copy()
            storage = column.storage if isinstance(column, pa.ExtensionArray) else column
            arrays.append(_view_of(values, storage, column.type))
            if values.nbytes >= STEPS[kind]:
                rows = values.reshape(STEPS[kind], -1)
                self._columns.append((self._rng.integers(0, 256, (STORED[kind], rows.shape[1]), np.uint8), rows))
        self._batch = pa.RecordBatch.from_arrays(arrays, schema=sample.schema)

    def draw(self) -> Any:
        """Gather a sample."""
        if self._kind == "sequences":
            starts = self._rng.integers(STORED[self._kind] - EPISODE, size=SIZES[self._kind])
            rows = (starts[:, None] + np.arange(EPISODE)).reshape(-1)
        else:
            rows = self._rng.integers(STORED[self._kind], size=SIZES[self._kind])
        for ring, out in self._columns:
            np.take(ring, rows, 0, out=out, mode="clip")
        return self._batch


def _view_of(values: Any, storage: Any, kind: Any) -> Any:
    """Create an array with the type and length of `storage` as a view of `values`."""
    import pyarrow as pa

    if pa.types.is_fixed_size_list(storage.type):
        flat = storage.type.value_type
        inner = pa.Array.from_buffers(flat, values.nbytes // flat.byte_width, [None, pa.py_buffer(values)])
        array = pa.Array.from_buffers(storage.type, len(storage), [None], children=[inner])
    else:
        array = pa.Array.from_buffers(storage.type, len(storage), [None, pa.py_buffer(values)])
    return array if storage.type == kind else pa.ExtensionArray.from_storage(kind, array)


def _sample(table: Any, kind: str) -> Any:
    if kind == "sequences":
        return table.sample(SIZES[kind], mode="sequences", length=EPISODE)
    return table.sample(SIZES[kind])


def _table(kind: str, *, filled: bool) -> Any:
    from samplebatch import SampleBatch
    from samplebatch.service import ReplayTable

    table = ReplayTable(kind if filled else f"written {kind}", capacity=STORED[kind], seed=7)
    if filled:
        table.extend(SampleBatch(steps(kind, STORED[kind])))
    return table


def _serve_tables(back: Any) -> None:
    from samplebatch.service import ReplayServer

    with ReplayServer([_table(kind, filled=filled) for kind in KINDS for filled in (True, False)]) as server:
        _send_and_wait(back, server.uri)


def _serve_bytes(back: Any) -> None:
    from pyarrow import RecordBatchReader, flight

    samples = {kind: draw_samples(kind) for kind in KINDS}

    class Bytes(flight.FlightServerBase):  # type: ignore[misc]
        """Server that sends precomputed or gathered samples, and discards received fragments."""

        def do_get(self, context: Any, ticket: Any) -> Any:
            batches = samples[ticket.ticket.decode()]
            return flight.RecordBatchStream(RecordBatchReader.from_batches(batches[0].schema, cycle(batches)))

        def do_exchange(self, context: Any, descriptor: Any, reader: Any, writer: Any) -> None:
            work, kind = descriptor.command.decode().split()
            next_sample = SampleGatherer(kind).draw if work == "gather" else cycle(samples[kind]).__next__
            writer.begin(samples[kind][0].schema)
            for _ in reader:
                writer.write_batch(next_sample())

        def do_put(self, context: Any, descriptor: Any, reader: Any, writer: Any) -> None:
            for _ in reader:
                writer.write(json.dumps({"inserted": 1}).encode())

    with Bytes("grpc://127.0.0.1:0") as server:
        _send_and_wait(back, f"grpc://127.0.0.1:{server.port}")


def _send_and_wait(back: Any, uri: str) -> None:
    back.send(uri)
    while back.poll(None):
        return


def _start(serve: Callable[[Any], None]) -> str:
    context = multiprocessing.get_context("spawn")
    local, remote = context.Pipe()
    context.Process(target=serve, args=(remote,), daemon=True, name=f"benchmarks {serve.__name__}").start()
    remote.close()
    atexit.register(local.close)
    return str(local.recv())


@cache
def service() -> str:
    """Start our replay service on the first call, and return its address."""
    return _start(_serve_tables)


@cache
def raw_flight() -> str:
    """Start a plain Arrow Flight server with samples in memory on the first call, and return its address."""
    return _start(_serve_bytes)
