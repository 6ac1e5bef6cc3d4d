"""`batch.*`: operations on nested batches; a step has an observation of three arrays, and six scalars."""

from __future__ import annotations

import pickle
from collections.abc import Callable
from functools import partial
from typing import Any

import numpy as np

from benchmarks.harness import Row, Way, row

ROWS_OF = 256
INDICES = np.random.default_rng(3).permutation(ROWS_OF)[:64]


def transitions(rows: int = ROWS_OF, seed: int = 7) -> dict[str, Any]:
    """Create the columns of transitions with an observation of three arrays, and six scalars."""
    rng = np.random.default_rng(seed)
    return {
        "obs": {
            "vec": rng.standard_normal((rows, 17), dtype=np.float32),
            "goal": rng.standard_normal((rows, 3), dtype=np.float32),
            "mask": rng.integers(0, 2, (rows, 6)).astype(bool),
        },
        "act": rng.integers(0, 6, rows),
        "rew": rng.standard_normal(rows),
        "terminated": np.arange(rows) % 100 == 99,
        "truncated": np.zeros(rows, bool),
        "logp": rng.standard_normal(rows, dtype=np.float32),
        "value": rng.standard_normal(rows, dtype=np.float32),
    }


def map_arrays(columns: dict[str, Any], function: Callable[[Any], Any]) -> dict[str, Any]:
    """Apply a function to every array of a nested dict."""
    return {k: map_arrays(v, function) if type(v) is dict else function(v) for k, v in columns.items()}


def steps(count: int = 64) -> list[dict[str, Any]]:
    """Create one dict per step, as in an environment loop."""
    columns = transitions(count)
    return [map_arrays(columns, lambda v, i=i: v[i].copy() if v.ndim > 1 else v[i]) for i in range(count)]


def as_batch(lib: Any, columns: Any) -> Any:
    """Create the library's nested batch."""
    return lib.Batch(columns) if hasattr(lib, "Batch") else lib.batch(columns)


def operation(call: Callable[[Any], Any]) -> Way:
    """Declare an operation on a nested batch."""
    return Way(as_batch, call)


def operation_on_both(call: Callable[[Any], Any]) -> dict[str, Way]:
    """Declare the same operation on our batch and on Tianshou's batch."""
    return {"ours": operation(call), "tianshou": operation(call)}


def list_operation(name: str) -> Way:
    """Declare an operation on a list of nested batches, such as `cat`."""
    return Way(lambda lib, parts: partial(getattr(lib.Batch, name), [lib.Batch(part) for part in parts]))


def bare_stack(rows: list[dict[str, Any]]) -> dict[str, Any]:
    """Stack the arrays of nested dicts with equal keys."""
    return {
        k: bare_stack([r[k] for r in rows]) if type(v) is dict else np.array([r[k] for r in rows])
        for k, v in rows[0].items()
    }


def bare_cat_setup(_: Any, parts: list[dict[str, Any]]) -> Any:
    rows = sum(len(part["rew"]) for part in parts)

    def memory(columns: dict[str, Any]) -> dict[str, Any]:
        return map_arrays(columns, lambda v: np.zeros((rows, *v.shape[1:]), v.dtype))

    def pairs(columns: list[dict[str, Any]], out: dict[str, Any]) -> Any:
        for k, v in out.items():
            if type(v) is dict:
                yield from pairs([c[k] for c in columns], v)
            else:
                yield [c[k] for c in columns], v

    out = memory(parts[0])
    copies = list(pairs(parts, out))

    def call() -> Any:
        for arrays, target in copies:
            np.concatenate(arrays, 0, target)
        return out

    return call


def write_rows(lib: Any, columns: Any) -> Any:
    """Create a batch and the rows that each call writes into the batch."""
    target, rows = as_batch(lib, map_arrays(columns, np.copy)), as_batch(lib, map_arrays(columns, lambda v: v[INDICES]))

    def call() -> Any:
        target[INDICES] = rows
        return target

    return call


def bare_write_rows(_: Any, columns: Any) -> Any:
    target, rows = map_arrays(columns, np.copy), map_arrays(columns, lambda v: v[INDICES])

    def write(target_columns: dict[str, Any], values: dict[str, Any]) -> None:
        for k, v in target_columns.items():
            if type(v) is dict:
                write(v, values[k])
            else:
                v[INDICES] = values[k]

    def call() -> Any:
        write(target, rows)
        return target

    return call


def bare_split(columns: dict[str, Any]) -> list[dict[str, Any]]:
    order = np.random.permutation(ROWS_OF)
    return [map_arrays(columns, lambda v, o=order[i : i + 64]: v[o]) for i in range(0, ROWS_OF, 64)]


def tensor_rows(lib: Any, rows: Any) -> Any:
    tensordicts = [lib.TensorDict(map_arrays(r, lib.torch.as_tensor), []) for r in rows]
    return partial(lib.TensorDict.stack, tensordicts)


def bare_eq(a: dict[str, Any], b: dict[str, Any]) -> bool:
    return all(bare_eq(v, b[k]) if type(v) is dict else (v == b[k]).all() for k, v in a.items())


def bare_iterate(columns: dict[str, Any]) -> list[Any]:
    return [map_arrays(columns, lambda v, i=i: v[i]) for i in range(ROWS_OF)]


def to_torch_setup(lib: Any, columns: Any) -> Any:
    batch = lib.Batch(columns)
    return batch.to_torch


def plain_arrays(result: Any) -> Any:
    """Convert a nested batch, or a list of batches, to plain dicts of arrays."""
    if isinstance(result, list):
        return [plain_arrays(item) for item in result]
    if hasattr(result, "items"):
        return {k: plain_arrays(v) for k, v in result.items()}
    return np.asarray(result)


def _torch_of(lib: Any, columns: Any) -> Any:
    import torch

    return lib.Batch(map_arrays(columns, torch.from_numpy))


def _bare_torch(_: Any, columns: Any) -> Any:
    import torch

    return lambda: map_arrays(columns, torch.from_numpy)


def _bare_numpy(_: Any, columns: Any) -> Any:
    import torch

    tensors = map_arrays(columns, torch.from_numpy)
    return lambda: map_arrays(tensors, lambda t: t.numpy())


def _setattr(lib: Any, columns: Any) -> Any:
    batch, value = as_batch(lib, columns), columns["rew"]

    def call() -> None:
        batch.rew = value

    return call


def _tensor_set(lib: Any, columns: Any) -> Any:
    batch, value = lib.batch(columns), lib.torch.from_numpy(columns["rew"])
    return partial(batch.set, "rew", value)


def _bare_set(_: Any, columns: Any) -> Any:
    batch, value = dict(columns), columns["rew"]

    def call() -> None:
        batch["rew"] = value

    return call


def _equal(lib: Any, columns: Any) -> Any:
    a, b = as_batch(lib, columns), as_batch(lib, map_arrays(columns, np.copy))
    return lambda: a == b


def _tensor_equal(lib: Any, columns: Any) -> Any:
    a, b = lib.batch(columns), lib.batch(map_arrays(columns, np.copy))
    return lambda: bool((a == b).all())


ROWS: list[Row] = [
    row(
        "batch.construct",
        transitions,
        ours=Way(lambda lib, c: partial(lib.Batch, **c)),
        tianshou=Way(lambda lib, c: partial(lib.Batch, **c)),
        tensordict=Way(lambda lib, c: partial(lib.TensorDict, lib.tensors(c), [ROWS_OF])),
        bare=lambda d: map_arrays(d, np.asarray),
        view=plain_arrays,
    ),
    row("batch.len", transitions, **operation_on_both(len), tensordict=len, view=None),
    row(
        "batch.getattr.obs.vec",
        transitions,
        **operation_on_both(lambda b: b.obs.vec),
        tensordict=lambda t: t["obs", "vec"],
        bare=lambda d: d["obs"]["vec"],
        view=plain_arrays,
    ),
    row(
        "batch.setattr",
        transitions,
        ours=Way(_setattr),
        tianshou=Way(_setattr),
        tensordict=Way(_tensor_set),
        bare=Way(_bare_set),
        view=None,
    ),
    row(
        "batch.index.int",
        transitions,
        **operation_on_both(lambda b: b[3]),
        tensordict=lambda t: t[3],
        bare=lambda d: map_arrays(d, lambda v: v[3]),
        view=plain_arrays,
    ),
    row(
        "batch.index.slice",
        transitions,
        **operation_on_both(lambda b: b[32:96]),
        tensordict=lambda t: t[32:96],
        bare=lambda d: map_arrays(d, lambda v: v[32:96]),
        view=plain_arrays,
    ),
    row(
        "batch.index.array64",
        transitions,
        **operation_on_both(lambda b: b[INDICES]),
        tensordict=lambda t: t[INDICES],
        bare=lambda d: map_arrays(d, lambda v: v[INDICES]),
        view=plain_arrays,
    ),
    row(
        "batch.setitem.array64",
        transitions,
        ours=Way(write_rows),
        tianshou=Way(write_rows),
        tensordict=Way(write_rows),
        bare=Way(bare_write_rows),
        view=plain_arrays,
    ),
    row(
        "batch.stack.64",
        steps,
        ours=list_operation("stack"),
        tianshou=list_operation("stack"),
        tensordict=Way(tensor_rows),
        bare=bare_stack,
        view=plain_arrays,
    ),
    row(
        "batch.from_list_of_dicts.64",
        steps,
        ours=Way(lambda lib, rows: partial(lib.Batch, rows)),
        tianshou=Way(lambda lib, rows: partial(lib.Batch, rows)),
        bare=bare_stack,
        view=plain_arrays,
    ),
    row(
        "batch.cat.16x256",
        lambda: [transitions(seed=seed) for seed in range(16)],
        ours=list_operation("cat"),
        tianshou=list_operation("cat"),
        tensordict=Way(lambda lib, parts: partial(lib.TensorDict.cat, [lib.batch(p) for p in parts], 0)),
        bare=Way(bare_cat_setup),
        traffic=True,
        view=plain_arrays,
    ),
    row(
        "batch.split.64",
        transitions,
        **operation_on_both(lambda b: list(b.split(64))),
        tensordict=Way(
            lambda lib, c: (lambda t: lambda: [t[i] for i in lib.torch.randperm(ROWS_OF).split(64)])(lib.batch(c))
        ),
        bare=bare_split,
        view=None,
    ),
    row(
        "batch.to_torch",
        transitions,
        ours=Way(to_torch_setup),
        tianshou=Way(to_torch_setup),
        tensordict=Way(lambda lib, c: lambda: lib.batch(c)),
        bare=Way(_bare_torch),
        view=plain_arrays,
    ),
    row(
        "batch.to_numpy",
        transitions,
        ours=Way(_torch_of, lambda b: b.to_numpy()),
        tianshou=Way(_torch_of, lambda b: b.to_numpy()),
        tensordict=lambda t: t.numpy(),
        bare=Way(_bare_numpy),
        view=plain_arrays,
    ),
    row(
        "batch.iterate.256",
        transitions,
        **operation_on_both(list),
        tensordict=list,
        bare=bare_iterate,
        view=plain_arrays,
    ),
    row(
        "batch.pickle5",
        transitions,
        **operation_on_both(lambda b: pickle.loads(pickle.dumps(b, protocol=5))),
        tensordict=lambda t: pickle.loads(pickle.dumps(t, protocol=5)),
        bare=lambda d: pickle.loads(pickle.dumps(d, protocol=5)),
        view=plain_arrays,
    ),
    row(
        "batch.copy",
        transitions,
        ours=Way(lambda lib, c: partial(lib.Batch, lib.Batch(c), copy=True)),
        tianshou=Way(lambda lib, c: partial(lib.Batch, lib.Batch(c), copy=True)),
        tensordict=lambda t: t.clone(),
        bare=lambda d: map_arrays(d, np.copy),
        view=plain_arrays,
    ),
    row(
        "batch.eq",
        transitions,
        ours=Way(_equal),
        tianshou=Way(_equal),
        tensordict=Way(_tensor_equal),
        bare=Way(lambda _, c: partial(bare_eq, c, map_arrays(c, np.copy))),
        view=None,
    ),
]
