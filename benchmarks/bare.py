"""Lower bounds of the rows: the minimal NumPy calls, on memory that is allocated and warm.

Setup functions allocate the output, and calls fill the output. Functions that return parts of a batch create plain
dicts of views.
"""

from __future__ import annotations

import pickle
from itertools import pairwise
from typing import Any

import lz4.block
import numpy as np

Span = tuple[int, int]


def empty_like(columns: dict[str, Any], rows: int) -> dict[str, Any]:
    """Allocate columns for `rows` rows with the dtypes and row shapes of `columns`, and write every page once."""
    return {
        k: empty_like(v, rows) if isinstance(v, dict) else np.ones((rows, *v.shape[1:]), v.dtype)
        for k, v in columns.items()
    }


def views(columns: dict[str, Any], spans: list[Span]) -> list[dict[str, Any]]:
    """Split a batch into dicts of views, one dict per span."""
    items = list(columns.items())
    return [{k: v[start:stop] for k, v in items} for start, stop in spans]


def tree_slice(columns: dict[str, Any], span: slice) -> dict[str, Any]:
    """Return a nested dict of views of a span."""
    return {k: tree_slice(v, span) if type(v) is dict else v[span] for k, v in columns.items()}


def spans(boundaries: Any, rows: int) -> list[Span]:
    """Return the (start, stop) pairs of all parts; `boundaries` are the start rows of all but the first part."""
    edges = [0, *boundaries.tolist(), rows]
    return list(pairwise(edges))


def concat_setup(_: Any, fragments: list[dict[str, Any]]) -> Any:
    """Allocate the output of `concat`."""
    flat_name = next(name for name, values in fragments[0].items() if type(values) is not dict)
    return fragments, empty_like(fragments[0], sum(len(f[flat_name]) for f in fragments))


def concat(state: Any) -> Any:
    """Concatenate the columns of (nested) dicts."""
    fragments, out = state
    for k, output in out.items():
        parts = [f[k] for f in fragments]
        if type(output) is dict:
            concat((parts, output))
        else:
            np.concatenate(parts, 0, output)
    return out


def copy_setup(_: Any, columns: Any) -> Any:
    """Allocate the output of `copy`."""
    return [(v, np.ones_like(v)) for v in columns.values()], columns.keys()


def copy(state: Any) -> Any:
    """Copy every column."""
    pairs, names = state
    for values, out in pairs:
        np.copyto(out, values)
    return dict(zip(names, [out for _, out in pairs], strict=True))


def shuffle_setup(_: Any, columns: Any) -> Any:
    """Allocate the output of `shuffle` and create its generator."""
    return np.random.default_rng(), columns, empty_like(columns, len(columns["obs"]))


def shuffle(state: Any) -> Any:
    """Draw a permutation and gather every column."""
    rng, columns, out = state
    order = rng.permutation(len(columns["obs"]))
    for k, v in columns.items():
        v.take(order, 0, out[k], "clip")
    return out


def split_by_eps_id(columns: Any) -> Any:
    """Split a batch where the episode id changes."""
    ids = columns["eps_id"]
    return views(columns, spans(np.flatnonzero(ids[1:] != ids[:-1]) + 1, len(ids)))


def split_by_dones(columns: Any) -> Any:
    """Split a batch after each step that ends an episode."""
    is_last = columns["terminateds"] | columns["truncateds"]
    return views(columns, spans(np.flatnonzero(is_last[:-1]) + 1, len(is_last)))


def pad_setup(_: Any, columns: Any) -> Any:
    """Allocate zeros as the output of `pad`; padding stays zero because every call writes the same positions."""
    out = {k: np.zeros((200 * 20, *v.shape[1:]), v.dtype) for k, v in columns.items() if k != "seq_lens"}
    return columns, out


def pad(state: Any) -> Any:
    """Compute the position of every step in the padded layout, and scatter every column."""
    columns, out = state
    lengths = columns["seq_lens"]
    starts = np.arange(0, len(lengths) * 20, 20)
    starts[1:] -= np.cumsum(lengths[:-1])
    positions = np.repeat(starts, lengths)
    positions += np.arange(len(positions))
    for k, padded in out.items():
        padded[positions] = columns[k]
    return {**out, "seq_lens": lengths}


def compress_rows(values: Any) -> Any:
    """Compress each row into its own block."""
    return [lz4.block.compress(row, store_size=False) for row in values]


def compress_bulk(values: Any) -> Any:
    """Compress all rows into one block."""
    return lz4.block.compress(values, store_size=False)


def decompress_rows_setup(_: Any, values: Any) -> Any:
    """Compress the input of `decompress_rows` and allocate its output."""
    return compress_rows(values), values[0].nbytes, np.ones_like(values)


def decompress_rows(state: Any) -> Any:
    """Decompress each block into its row."""
    blocks, size, out = state
    target = memoryview(out.reshape(-1).view(np.uint8))
    for i, block in enumerate(blocks):
        target[i * size : (i + 1) * size] = lz4.block.decompress(block, size)
    return {"obs": out}


def decompress_bulk_setup(_: Any, values: Any) -> Any:
    """Compress the input of `decompress_bulk`."""
    return compress_bulk(values), values


def decompress_bulk(state: Any) -> Any:
    """Decompress one block and return the result as an array without a copy."""
    block, like = state
    return {"obs": np.frombuffer(lz4.block.decompress(block, like.nbytes), like.dtype).reshape(like.shape)}


def round_trip(batch: Any) -> Any:
    """Pickle and unpickle a batch."""
    return pickle.loads(pickle.dumps(batch, protocol=5))


def round_trip_out_of_band(batch: Any) -> Any:
    """Pickle a batch with out-of-band buffers, and unpickle it with views of these buffers."""
    buffers: list[Any] = []
    return pickle.loads(pickle.dumps(batch, protocol=5, buffer_callback=buffers.append), buffers=buffers)


def lockstep_setup(_: Any, policies: dict[str, Any]) -> Any:
    """Allocate the output of `lockstep`."""
    return {p: (columns, empty_like(columns, len(columns["t"]))) for p, columns in policies.items()}


def lockstep(state: Any, k: int) -> list[dict[str, Any]]:
    """Sort every policy's rows by episode and step, and split all policies at every k-th distinct step."""
    codes = {p: columns["eps_id"] * 1000 + columns["t"] for p, (columns, _) in state.items()}
    steps = np.unique(np.concatenate(list(codes.values())))
    parts: list[dict[str, Any]] = [{} for _ in range(0, len(steps), k)]
    for p, (columns, out) in state.items():
        order = np.argsort(codes[p], kind="stable")
        for name, values in columns.items():
            values.take(order, 0, out[name], "clip")
        cuts = np.searchsorted(codes[p][order], steps[k::k])
        for part, view in zip(parts, views(out, spans(cuts, len(order))), strict=True):
            part[p] = view
    return parts
