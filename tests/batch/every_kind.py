"""Columns of every supported kind, and checks of all kinds."""

from __future__ import annotations

from typing import Any

import numpy as np

from samplebatch import SampleBatch
from samplebatch.column.ragged import RaggedColumn
from tests.optional import HAS_TORCH, torch

NUMBERS = ("?", "i1", "i2", "i4", "i8", "u1", "u2", "u4", "u8", "f2", "f4", "f8", "c8", "c16")
DATES = ("M8[D]", "M8[s]", "M8[ms]", "M8[us]", "M8[ns]", "M8[h]", "m8[ns]", "m8[D]", "m8[s]")
STRINGS = ("S3", "U5")
TORCH = ("bfloat16", "float16", "float32", "float64", "int64", "uint8", "bool", "complex64")


def numbers(dtype: str, *shape: int) -> np.ndarray:
    """Return distinct values of a dtype, as far as it has them; equal at each call."""
    counted = np.arange(1, 1 + int(np.prod(shape))).reshape(shape)
    kind = np.dtype(dtype).kind
    if kind == "b":
        return counted % 3 == 0
    if kind in "SU":
        return counted.astype(f"{kind}3").astype(dtype)
    if kind in "mM":
        return counted.astype(np.int64).view(dtype)
    if kind == "c":
        return (counted + 0.5j * counted).astype(dtype)
    return (counted * 3).astype(dtype) if kind in "iu" else (counted / 4).astype(dtype)


def tensor(dtype: str, *shape: int) -> torch.Tensor:
    """Return values of a torch dtype; equal at each call."""
    counted = torch.arange(1, 1 + int(np.prod(shape))).reshape(shape)
    return (counted % 2 == 0) if dtype == "bool" else counted.to(getattr(torch, dtype))


def float32(*shape: int) -> Any:
    """Return the values of `tensor` as a tensor if torch is installed, otherwise as an array."""
    return tensor("float32", *shape) if HAS_TORCH else np.arange(1, 1 + np.prod(shape), dtype="f4").reshape(shape)


def every_kind(n: int) -> dict[str, Any]:
    """Return columns of n rows of every kind, by kind; tensors are included if torch is installed."""
    values: dict[str, Any] = {}
    for dtype in (*NUMBERS, *DATES, *STRINGS):
        values[f"flat {dtype}"] = numbers(dtype, n)
        values[f"wide {dtype}"] = numbers(dtype, n, 2, 3)
    for name in TORCH if HAS_TORCH else ():
        values[f"torch {name}"] = tensor(name, n)
        values[f"torch wide {name}"] = tensor(name, n, 2)
    values["zero-width"] = np.zeros((n, 0, 2), np.float32)
    values["ragged"] = RaggedColumn.from_rows([np.arange(i % 4) for i in range(n)], dtype=np.float32)
    values["ragged 2-D"] = RaggedColumn.from_rows([np.full((i % 3, 2 + i % 2), i, np.int16) for i in range(n)])
    if HAS_TORCH:
        values["ragged torch"] = SampleBatch(rows=values["ragged"]).to_torch(floats="bfloat16")["rows"]
    values["infos"] = [{"lives": i, "name": f"agent{i}", "ratio": i / 2} for i in range(n)]
    values["infos mixed"] = [None if i % 3 == 0 else {"key": (i, {"deep": [i]})} for i in range(n)]
    values["objects"] = np.array([{1, i} for i in range(n)] + [None], object)[:-1]
    values["text"] = [f"step {i} \u6f22" * (i % 3) for i in range(n)]
    values["text or none"] = [f"b{i}" if i % 3 else None for i in range(n)] if n > 1 else ["x"] * n or numbers("U1", 0)
    values["bytes"] = [b"\x00\xff" * i for i in range(n)] or numbers("S1", 0)
    values["words"] = np.array([f"word {i}" * (i % 4) for i in range(n)], np.dtypes.StringDType())
    values["nested"] = {"camera": numbers("u1", n, 4, 4), "arm": (numbers("f4", n, 2), {"grip": numbers("f8", n)})}
    values["pair"] = (numbers("i4", n), float32(n, 3))
    return values


def with_every_kind(n: int) -> SampleBatch:
    """Return a batch of n steps with columns of every kind, including a compressed one."""
    batch = SampleBatch(every_kind(n), squeezed=numbers("f4", n, 5), squeezed_rows=numbers("f4", n, 5))
    return batch.compress(bulk=True, columns={"squeezed"}).compress(columns={"squeezed_rows"})


def in_sequences(*, padded: bool) -> SampleBatch:
    """Return a batch of 4 sequences, including an empty one, with states and columns of every kind of row."""
    batch = SampleBatch(
        a=np.arange(6),
        b=numbers("f4", 6, 2),
        words=numbers("U5", 6),
        infos=[{"step": i} for i in range(6)],
        obs={"x": numbers("f8", 6), "y": (numbers("u1", 6, 3), float32(6))},
        state_in_0=np.array([[1.0], [2.0], [3.0], [4.0]], np.float32),
        state_in_1=np.arange(8).reshape(4, 2),
        state_out_0=np.arange(6.0).reshape(6, 1),
        seq_lens=[2, 3, 0, 1],
        _num_grad_updates=1.5,
        _is_training=True,
    )
    return batch.right_zero_pad(4) if padded else batch
