"""Fragments for the tests of replay tables."""

from __future__ import annotations

import json
import struct
from typing import Any

import numpy as np
import pyarrow as pa

from samplebatch import SampleBatch


def episode(eps_id: int, t: range, *, done: bool = True, **columns: Any) -> SampleBatch[Any]:
    """Return steps of an episode; the observation is 100 * episode + time."""
    times = np.array(t)
    return SampleBatch(
        obs=100.0 * eps_id + times,
        new_obs=100.0 * eps_id + times + 1,
        actions=times,
        rewards=np.ones(len(times)),
        terminateds=(times == t[-1]) & done,
        truncateds=np.zeros(len(times), bool),
        eps_id=np.full(len(times), eps_id),
        t=times,
        **{name: np.full(len(times), value) for name, value in columns.items()},
    )


def fragment(number: int, rows: int = 2) -> SampleBatch[Any]:
    """Return a fragment whose rows contain its number."""
    return SampleBatch(number=np.full(rows, number))


def lengthened(rows: pa.RecordBatch) -> pa.RecordBatch:
    """Return a record batch that declares 1000 rows but contains the bytes of 321."""
    sink = pa.BufferOutputStream()
    with pa.ipc.new_stream(sink, rows.schema) as stream:
        stream.write_batch(rows)
    output = sink.getvalue().to_pybytes().replace(struct.pack("<q", 321), struct.pack("<q", 1000))
    return pa.ipc.open_stream(output).read_next_batch()


def write_stream(rows: pa.RecordBatch) -> bytes:
    """Write a record batch as an Arrow stream."""
    sink = pa.BufferOutputStream()
    with pa.ipc.new_stream(sink, rows.schema) as stream:
        stream.write_batch(rows)
    return bytes(sink.getvalue())


def samples_in(chunk: Any) -> list[pa.RecordBatch]:
    """Decode the samples in a message of a session as documented."""
    metadata, _, streams = chunk.app_metadata.to_pybytes().partition(b"\n")
    actual, start = [], 0
    for nbytes in json.loads(metadata)["streams"]:
        actual.append(pa.ipc.open_stream(streams[start : start + nbytes]).read_next_batch())
        start += -(-nbytes // 64) * 64
    return actual
