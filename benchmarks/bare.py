"""Lower bound of each row: the minimum of NumPy calls on allocated, warm memory.

Setups allocate the memory and calls fill it. Where the work returns parts of a batch, plain dicts of views are created.
"""

from __future__ import annotations

import pickle
from itertools import pairwise
from typing import Any

import lz4.block
import numpy as np

Span = tuple[int, int]


def empty_like(columns: dict[str, Any], rows: int) -> dict[str, Any]:
    """Allocate memory for some rows of the same columns, with touched pages."""
    return {
        k: empty_like(v, rows) if isinstance(v, dict) else np.ones((rows, *v.shape[1:]), v.dtype)
        for k, v in columns.items()
    }


def views(columns: dict[str, Any], spans: list[Span]) -> list[dict[str, Any]]:
    """Cut a batch into dicts of views."""
    items = list(columns.items())
    return [{k: v[start:stop] for k, v in items} for start, stop in spans]


def tree_slice(columns: dict[str, Any], span: slice) -> dict[str, Any]:
    """Cut one nested dict of views."""
    return {k: tree_slice(v, span) if type(v) is dict else v[span] for k, v in columns.items()}


def spans(boundaries: Any, rows: int) -> list[Span]:
    """Pair the row numbers at which parts start."""
    edges = [0, *boundaries.tolist(), rows]
    return list(pairwise(edges))


def concat_setup(_: Any, fragments: list[dict[str, Any]]) -> Any:
    """Allocate the output of `concat`."""
    counted = next(name for name, values in fragments[0].items() if type(values) is not dict)
    return fragments, empty_like(fragments[0], sum(len(f[counted]) for f in fragments))


def concat(state: Any) -> Any:
    """Join the columns of (nested) dicts."""
    fragments, out = state
    for k, joined in out.items():
        parts = [f[k] for f in fragments]
        if type(joined) is dict:
            concat((parts, joined))
        else:
            np.concatenate(parts, 0, joined)
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
    """Cut where the episode id changes."""
    ids = columns["eps_id"]
    return views(columns, spans(np.flatnonzero(ids[1:] != ids[:-1]) + 1, len(ids)))


def split_by_dones(columns: Any) -> Any:
    """Cut after each step that ends an episode."""
    over = columns["terminateds"] | columns["truncateds"]
    return views(columns, spans(np.flatnonzero(over[:-1]) + 1, len(over)))


def pad_setup(_: Any, columns: Any) -> Any:
    """Allocate the output of `pad`: zeros that stay zero, because every call writes the same positions."""
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
    """Compress each row into a block."""
    return [lz4.block.compress(row, store_size=False) for row in values]


def compress_bulk(values: Any) -> Any:
    """Compress all rows into one block."""
    return lz4.block.compress(values, store_size=False)


def decompress_rows_setup(_: Any, values: Any) -> Any:
    """Create the blocks and the output of `decompress_rows`."""
    return compress_rows(values), values[0].nbytes, np.ones_like(values)


def decompress_rows(state: Any) -> Any:
    """Decompress each block into its row."""
    blocks, size, out = state
    target = memoryview(out.reshape(-1).view(np.uint8))
    for i, block in enumerate(blocks):
        target[i * size : (i + 1) * size] = lz4.block.decompress(block, size)
    return {"obs": out}


def decompress_bulk_setup(_: Any, values: Any) -> Any:
    """Create the block of `decompress_bulk`."""
    return compress_bulk(values), values


def decompress_bulk(state: Any) -> Any:
    """Decompress one block; the array is a view of LZ4's result."""
    block, like = state
    return {"obs": np.frombuffer(lz4.block.decompress(block, like.nbytes), like.dtype).reshape(like.shape)}


def round_trip(batch: Any) -> Any:
    """Pickle, and unpickle."""
    return pickle.loads(pickle.dumps(batch, protocol=5))


def round_trip_out_of_band(batch: Any) -> Any:
    """Pickle with out-of-band arrays, and unpickle over them."""
    buffers: list[Any] = []
    return pickle.loads(pickle.dumps(batch, protocol=5, buffer_callback=buffers.append), buffers=buffers)


def lockstep_setup(_: Any, policies: dict[str, Any]) -> Any:
    """Allocate the output of `lockstep`."""
    return {p: (columns, empty_like(columns, len(columns["t"]))) for p, columns in policies.items()}


def lockstep(state: Any, k: int) -> list[dict[str, Any]]:
    """Sort every policy's rows by episode and step, and cut all policies at every k-th distinct step."""
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
