"""`sb.*`: operations on one flat batch, and concatenation of batches."""

from __future__ import annotations

from functools import partial
from typing import Any

import numpy as np

from benchmarks import bare, data
from benchmarks.compare import plain
from benchmarks.data import NAMES, flat
from benchmarks.harness import Row, Way, row

SPAN = slice(1000, 1200)


def _concat_way(bind: Any) -> Way:
    """Create a list of batches, and bind the library's function that concatenates them."""
    return Way(lambda lib, fragments: bind(lib, [lib.batch(f) for f in fragments]))


CONCAT: dict[str, Any] = {
    "batch": _concat_way(lambda lib, batches: partial(lib.concat_samples, batches)),
    "tensordict": _concat_way(lambda lib, batches: partial(lib.TensorDict.cat, batches, 0)),
    "bare": Way(bare.concat_setup, bare.concat),
}
CONCAT_TABLES = _concat_way(lambda lib, tables: lambda: lib.pa.concat_tables(tables).combine_chunks())


def _concat_row(name: str, fragments: Any, **ways: Way) -> Row:
    return row(name, fragments, traffic=True, **CONCAT, **ways)


def _construct() -> dict[str, Any]:
    """Pass columns of each library's own type, so that the rows time the construction and not a conversion."""
    return {
        "batch": Way(lambda lib, columns: partial(lib.SampleBatch, columns)),
        "tensordict": Way(lambda lib, columns: partial(lib.TensorDict, lib.tensors(columns), [len(columns["obs"])])),
        "pyarrow": Way(lambda lib, columns: partial(lib.pa.table, lib.arrays(columns))),
        "bare": dict,
    }


def _read(rows: Any) -> None:
    for step in rows:
        for name in NAMES:
            step[name]


def _read_columns(batches: Any) -> None:
    for batch in batches:
        for name in NAMES:
            batch[name]


def _set_rewards(lib: Any, columns: Any) -> Any:
    batch = lib.batch(columns)
    value = lib.tensors(columns)["rewards"] if hasattr(lib, "tensors") else columns["rewards"]
    return partial(batch.__setitem__, "rewards", value)


def _in_order(result: Any) -> Any:
    """Sort rows by their observations to undo a shuffle."""
    columns = plain(result)
    order = np.argsort(columns["obs"][:, 0])
    return {name: values[order] for name, values in columns.items()}


def _shuffled_table(lib: Any, columns: Any) -> Any:
    rng, table = np.random.default_rng(), lib.batch(columns)
    return lambda: table.take(rng.permutation(table.num_rows))


def _shuffled_tensors(lib: Any, columns: Any) -> Any:
    tensors = lib.batch(columns)
    return lambda: tensors[lib.torch.randperm(len(tensors))]


TIMESLICES: dict[str, Any] = {
    "batch": lambda b: b.timeslices(20),
    "tensordict": lambda t: t.split(20),
    "pyarrow": lambda t: [t.slice(start, 20) for start in range(0, t.num_rows, 20)],
    "bare": lambda d: bare.views(d, [(start, start + 20) for start in range(0, 4000, 20)]),
}


def _episode_tables(table: Any) -> Any:
    ids = table.column("eps_id").to_numpy()
    return [table.slice(a, b - a) for a, b in bare.spans(np.flatnonzero(ids[1:] != ids[:-1]) + 1, len(ids))]


def _episode_tensors(tensors: Any) -> Any:
    ids = tensors["eps_id"].numpy()
    edges = np.flatnonzero(ids[1:] != ids[:-1]) + 1
    return tensors.split(np.diff(edges, prepend=0, append=len(ids)).tolist())


def _nested_tensors(lib: Any, columns: Any) -> Any:
    tensors = lib.tensors(columns)
    return lambda: lib.TensorDict(tensors, [200])[50:150]


ROWS = [
    row("sb.construct", flat(200), **_construct()),
    _concat_row("sb.concat.64x200", data.fragments(64, 200), pyarrow=CONCAT_TABLES),
    _concat_row("sb.concat.8x128x84x84x4", lambda: [{"obs": data.images()} for _ in range(8)], pyarrow=CONCAT_TABLES),
    _concat_row("sb.concat.2x1", data.fragments(2, 1), pyarrow=CONCAT_TABLES),
    row(
        "sb.rows.1000",
        flat(1000),
        batch=lambda b: list(b.rows()),
        tensordict=lambda t: list(t.unbind(0)),
        bare=lambda d: [dict(zip(d, values, strict=True)) for values in zip(*d.values(), strict=True)],
    ),
    row(
        "sb.rows+read.1000",
        flat(1000),
        batch=lambda b: _read(b.rows()),
        tensordict=lambda t: _read(t.unbind(0)),
        bare=lambda d: _read(dict(zip(d, values, strict=True)) for values in zip(*d.values(), strict=True)),
    ),
    row(
        "sb.columns",
        flat(200),
        batch=lambda b: b.columns(NAMES),
        tensordict=lambda t: [t[name] for name in NAMES],
        pyarrow=lambda t: [t.column(name) for name in NAMES],
        bare=lambda d: [d[name] for name in NAMES],
    ),
    row(
        "sb.getitem.column",
        flat(200),
        batch=lambda b: b["rewards"],
        tensordict=lambda t: t["rewards"],
        pyarrow=lambda t: t["rewards"],
        bare=lambda d: d["rewards"],
    ),
    row(
        "sb.setitem.column",
        flat(200),
        batch=Way(_set_rewards),
        tensordict=Way(_set_rewards),
        bare=Way(_set_rewards),
    ),
    row(
        "sb.shuffle.20k",
        flat(20_000),
        traffic=True,
        view=_in_order,
        batch=lambda b: b.shuffle(),
        tensordict=Way(_shuffled_tensors),
        pyarrow=Way(_shuffled_table),
        bare=Way(bare.shuffle_setup, bare.shuffle),
    ),
    row("sb.timeslices20.4000", flat(4000), **TIMESLICES),
    row(
        "sb.timeslices20+read.4000",
        flat(4000),
        **{name: lambda b, split=split: _read_columns(split(b)) for name, split in TIMESLICES.items()},
    ),
    row(
        "sb.split_by_episode.eps_id",
        flat(20_000),
        batch=lambda b: b.split_by_episode(),
        tensordict=_episode_tensors,
        pyarrow=_episode_tables,
        bare=bare.split_by_eps_id,
    ),
    row(
        "sb.split_by_episode.dones",
        data.without("eps_id", 20_000),
        batch=lambda b: b.split_by_episode(),
        bare=bare.split_by_dones,
    ),
    row(
        "sb.slice",
        flat(4000),
        batch=lambda b: b[SPAN],
        tensordict=lambda t: t[SPAN],
        pyarrow=lambda t: t.slice(1000, 200),
        bare=lambda d: {k: v[SPAN] for k, v in d.items()},
    ),
    row(
        "sb.slice+obs",
        flat(4000),
        batch=lambda b: b[SPAN]["obs"],
        tensordict=lambda t: t[SPAN]["obs"],
        pyarrow=lambda t: t.slice(1000, 200)["obs"],
        bare=lambda d: {k: v[SPAN] for k, v in d.items()}["obs"],
    ),
    *(
        row(
            f"sb.copy.{label}",
            flat(rows),
            traffic=True,
            batch=lambda b: b.copy(),
            tensordict=lambda t: t.clone(),
            bare=Way(bare.copy_setup, bare.copy),
        )
        for label, rows in (("20k", 20_000), ("200", 200))
    ),
    row(
        "sb.size_bytes",
        flat(200),
        batch=lambda b: b.size_bytes(),
        tensordict=lambda t: t.bytes(),
        pyarrow=lambda t: t.nbytes,
        bare=lambda d: sum(v.nbytes for v in d.values()),
    ),
    row(
        "sb.right_zero_pad.200",
        data.sequences,
        batch=Way(
            lambda lib, d: partial(lib.SampleBatch, d), lambda b: b.right_zero_pad(20), fresh=lambda make: make()
        ),
        bare=Way(bare.pad_setup, bare.pad),
    ),
    *(
        row(
            f"sb.pickle5{kind}.{label}",
            flat(rows),
            traffic=True,
            batch=trip,
            tensordict=trip,
            pyarrow=trip,
            bare=trip,
        )
        for label, rows in (("2000", 2000), ("20k", 20_000))
        for kind, trip in (("", bare.round_trip), ("oob", bare.round_trip_out_of_band))
    ),
    row(
        "sb.nested.construct+slice",
        lambda: data.nested_columns(200),
        batch=Way(lambda lib, d: lambda: lib.SampleBatch(d)[50:150]),
        tensordict=Way(_nested_tensors),
        bare=lambda d: bare.tree_slice(d, slice(50, 150)),
    ),
    _concat_row("sb.nested.concat.16x200", lambda: [data.nested_columns(200, seed) for seed in range(16)]),
]
