"""`service.*`: writing to and sampling from a replay buffer in another process on the same machine.

There are three kinds of samples. `vectors` are 256 steps with observations of 17 floats. `frames` are 32 steps whose
observations are four frames of 84 x 84 bytes. `sequences` are 8 sequences of 80 steps with observations of 17 floats.
Each step includes the next observation, so samples occupy about 48 KB, 1.8 MB and 116 KB.

- `sample`: a learner requests one sample and receives it. Our client maps large samples from shared memory.
- `wire`: as `sample`, without shared memory.
- `gather`: as `wire`, but bare also gathers the rows of each sample.
- `stream`: 16 samples from a prefetching stream, without shared memory. Reverb, which prefetches all its samples, is
  the only peer of `stream`. The first samples are ready before the clock starts: the time is the waiting time of a
  learner that computes between two batches.
- `sustained`: 128 samples of such a stream, read sequentially by a learner that does nothing else.
- `insert`: 8 fragments, sent without waiting for each other, until the last fragment is acknowledged.
- `p99`: the 99th percentile of the seconds between sending a fragment and its acknowledgement; one fragment is sent at
  a time.

Bare is plain Arrow Flight. The Flight server stores precomputed samples in memory, which together have about as many
bytes as our table, and discards received fragments. In `gather`, bare is the lower limit of sampling: NumPy gathers the
rows of each column from a ring into the memory of one record batch. Peers are a Tianshou buffer in a Ray actor,
TorchRL's `RayReplayBuffer`, and Reverb. Reverb runs in a separate interpreter: the environment variable `REVERB_PYTHON`
is the path of an interpreter that can import Reverb.
"""

from __future__ import annotations

import contextlib
import itertools
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from time import perf_counter
from typing import Any

import numpy as np

from benchmarks import served
from benchmarks.harness import Row, Way
from benchmarks.served import EPISODE, KINDS, SIZES, STEPS, STORED, steps

STREAMED, SUSTAINED, INSERTED, TIMED = 16, 128, 8, 100
"""Per call: `stream` samples, `sustained` samples, `insert` fragments, and individually timed `p99` fragments."""
FLIGHT_BAR = 1.25
"""Largest acceptable multiple of the time of plain Arrow Flight: 80 % of its throughput."""

Call = Callable[[], Any]


class Connection:
    """Call and its connection; the connection is closed when the object is deleted."""

    def __init__(self, call: Call, close: Call) -> None:
        self._call, self._close = call, close

    def __call__(self) -> Any:
        return self._call()

    def __del__(self) -> None:
        # The servers may have stopped already when the program exits.
        with contextlib.suppress(Exception):
            self._close()


def p99(insert: Call) -> float:
    """Return the 99th percentile of the durations of inserts in seconds."""
    seconds = []
    for _ in range(TIMED):
        start = perf_counter()
        insert()
        seconds.append(perf_counter() - start)
    return float(np.percentile(seconds, 99))


def sustained(read: Call) -> float:
    """Return the duration in seconds of reading many samples of a stream; prefetched samples are read first."""
    for _ in range(2):
        read()
    start = perf_counter()
    for _ in range(SUSTAINED // STREAMED):
        read()
    return perf_counter() - start


# Ours


def _client(table: str, **options: Any) -> Any:
    from samplebatch.service import ReplayClient

    return ReplayClient(served.service(), table, **options)


def _ours_sample(_: Any, kind: str, **options: Any) -> Call:
    client = _client(kind, **options)
    if kind == "sequences":
        call = partial(client.sample_sequences, SIZES[kind], EPISODE)
    else:
        call = partial(client.sample, SIZES[kind])
    call()
    return Connection(call, client.close)


def _ours_stream(_: Any, kind: str) -> Call:
    client = _client(kind, shared_memory=False)
    options = {"mode": "sequences", "length": EPISODE} if kind == "sequences" else {}
    samples = client.stream(SIZES[kind], prefetch=16, **options)
    return Connection(lambda: [next(samples) for _ in range(STREAMED)][-1], lambda: (samples.close(), client.close()))


def _ours_insert(lib: Any, kind: str, count: int = INSERTED) -> Call:
    client = _client(f"written {kind}")
    rows = lib.SampleBatch(steps(kind, STEPS[kind]))

    def call() -> None:
        for _ in range(count):
            client.extend(rows)
        client.flush()

    call()
    return Connection(call, client.close)


# Plain Arrow Flight


def _connect() -> Any:
    from pyarrow import flight

    return flight.connect(served.raw_flight())


def _raw_sample(_: Any, kind: str, work: str = "send") -> Call:
    from pyarrow import flight

    client = _connect()
    writer, reader = client.do_exchange(flight.FlightDescriptor.for_command(f"{work} {kind}"))

    def call() -> Any:
        writer.write_metadata(b"{}")
        return reader.read_chunk().data

    call()
    return Connection(call, lambda: (writer.close(), client.close()))


def _raw_stream(_: Any, kind: str) -> Call:
    from pyarrow import flight

    client = _connect()
    reader = client.do_get(flight.Ticket(kind))
    return Connection(
        lambda: [reader.read_chunk().data for _ in range(STREAMED)][-1], lambda: (reader.cancel(), client.close())
    )


def _raw_insert(lib: Any, kind: str, count: int = INSERTED) -> Call:
    from pyarrow import flight

    from samplebatch import SampleBatch
    from samplebatch.service.fragments import FragmentEncoder

    client = _connect()
    rows = FragmentEncoder().encode(SampleBatch(steps(kind, STEPS[kind])))
    writer, reader = client.do_put(flight.FlightDescriptor.for_path(kind), rows.schema)

    def call() -> None:
        for _ in range(count):
            writer.write_batch(rows)
        for _ in range(count):
            reader.read()

    call()
    return Connection(call, lambda: (writer.close(), client.close()))


# Peers


def _actor_sample(lib: Any, kind: str) -> Call:
    actor = lib.buffer(kind)

    def call() -> Any:
        return lib.get(actor.sample.remote())

    call()
    return Connection(call, partial(lib.kill, actor))


def _actor_insert(lib: Any, kind: str, count: int = INSERTED) -> Call:
    actor = lib.buffer(kind)
    rows = steps(kind, STEPS[kind])

    def call() -> None:
        lib.get([actor.insert.remote(rows) for _ in range(count)])

    call()
    return Connection(call, partial(lib.kill, actor))


def _torchrl_sample(lib: Any, kind: str) -> Call:
    length = EPISODE if kind == "sequences" else None
    buffer = lib.buffer(STORED[kind], STEPS[kind], length)
    buffer.extend(lib.batch(steps(kind, STORED[kind])))
    buffer.sample()
    return Connection(buffer.sample, buffer.close)


def _torchrl_insert(lib: Any, kind: str, count: int = INSERTED) -> Call:
    buffer = lib.buffer(STORED[kind], STEPS[kind], None)
    rows = lib.batch(steps(kind, STEPS[kind]))

    def call() -> None:
        for _ in range(count):
            buffer.extend(rows)

    call()
    return Connection(call, buffer.close)


def _actor(setup: Callable[..., Call], kind: str, *kinds: str) -> Way:
    """Declare a peer in a Ray actor; quick runs include only some kinds of samples, because actors start slowly."""
    return Way(setup, quick=kind in kinds)


def _reverb(work: str) -> Way:
    """Declare Reverb's implementation, which runs and times itself in a separate interpreter."""
    return Way(lambda lib, kind: lib.session(work, kind), clocked=True)


def _p99_way(setup: Callable[..., Call]) -> Way:
    """Declare an implementation that measures the 99th percentile of single inserts."""
    return Way(lambda lib, kind: partial(p99, setup(lib, kind, 1)), clocked=True)


def _sustained_way(setup: Callable[..., Call]) -> Way:
    """Declare an implementation that reads a sustained stream."""
    return Way(lambda lib, kind: partial(sustained, setup(lib, kind)), clocked=True)


def _row(work: str, kind: str, *, bar: float | None = None, level: float = 1.0, **ways: Way) -> Row:
    row_ways = {name.replace("_", " "): way for name, way in ways.items()}
    # Samples are not compared, because each contestant has its own random generator.
    return Row(f"service.{work}.{kind}", partial(str, kind), row_ways, traffic=True, view=None, bar=bar, level=level)


def _rows(kind: str) -> list[Row]:
    wire = partial(_ours_sample, shared_memory=False)
    return [
        _row("stream", kind, ours=Way(_ours_stream), reverb=_reverb("stream"), bare=Way(_raw_stream), bar=FLIGHT_BAR),
        _row("sustained", kind, ours=_sustained_way(_ours_stream), bare=_sustained_way(_raw_stream), bar=FLIGHT_BAR),
        _row("wire", kind, ours=Way(wire), bare=Way(_raw_sample), bar=FLIGHT_BAR),
        _row("gather", kind, ours=Way(wire), bare=Way(partial(_raw_sample, work="gather")), bar=FLIGHT_BAR),
        _row(
            "sample",
            kind,
            ours=Way(_ours_sample),
            ray_tianshou=_actor(_actor_sample, kind, "vectors", "sequences"),
            torchrl=_actor(_torchrl_sample, kind, "vectors", "sequences"),
            bare=Way(_raw_sample),
            bar=FLIGHT_BAR,
        ),
        _row(
            "insert",
            kind,
            ours=Way(_ours_insert),
            ray_tianshou=_actor(_actor_insert, kind, "frames"),
            torchrl=_actor(_torchrl_insert, kind, "vectors"),
            reverb=_reverb("insert"),
            bare=Way(_raw_insert),
            bar=FLIGHT_BAR,
        ),
        _row(
            "p99",
            kind,
            ours=_p99_way(_ours_insert),
            # `insert` makes the same calls of both peers.
            ray_tianshou=replace(_p99_way(_actor_insert), quick=False),
            torchrl=replace(_p99_way(_torchrl_insert), quick=False),
            reverb=_reverb("p99"),
            bare=_p99_way(_raw_insert),
        ),
    ]


ROWS = list(itertools.chain.from_iterable(zip(*map(_rows, KINDS), strict=True)))
