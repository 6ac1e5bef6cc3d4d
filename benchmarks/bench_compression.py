"""`sb.compress.*` and `sb.decompress.*`: LZ4 compression of an observation column, as one block (`bulk`) or row by row.

Small rows are random floats, which do not compress. The upper half of each image is constant, and compresses.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from benchmarks import bare, data
from benchmarks.harness import Row, Way, row


def _arrow_blocks(bulk: bool) -> Any:
    """Compress with Arrow's codec, and allocate the output of `_arrow_decompress_rows`."""

    def setup(lib: Any, obs: Any) -> Any:
        codec = lib.pa.Codec("lz4_raw")
        parts = [obs] if bulk else list(obs)
        out = np.ones_like(obs)
        return codec, [codec.compress(part) for part in parts], parts[0].nbytes, out

    return setup


def _arrow_decompress_bulk(state: Any) -> Any:
    codec, (block,), size, like = state
    return {"obs": np.frombuffer(codec.decompress(block, size), like.dtype).reshape(like.shape)}


def _arrow_decompress_rows(state: Any) -> Any:
    codec, blocks, size, out = state
    target = memoryview(out.reshape(-1).view(np.int8))
    for i, block in enumerate(blocks):
        target[i * size : (i + 1) * size] = codec.decompress(block, size)
    return {"obs": out}


def _compress(name: str, obs: Any, *, bulk: bool) -> Row:
    return row(
        f"sb.compress.{name}",
        obs,
        traffic=bulk,
        view=None,
        batch=Way(
            lambda lib, obs: lib.batch({"obs": obs}),
            lambda b: b.compress(bulk=bulk)["obs"],
            fresh=lambda b: b.copy(shallow=True),
        ),
        pyarrow=Way(
            lambda lib, obs: (lib.pa.Codec("lz4_raw").compress, obs),
            (lambda state: state[0](state[1])) if bulk else (lambda state: [state[0](values) for values in state[1]]),
        ),
        bare=bare.compress_bulk if bulk else bare.compress_rows,
    )


def _decompress(name: str, obs: Any, *, bulk: bool) -> Row:
    return row(
        f"sb.decompress.{name}",
        obs,
        traffic=bulk,
        batch=Way(
            lambda lib, obs: lib.batch({"obs": obs}).compress(bulk=bulk),
            lambda b: {"obs": b.decompress_if_needed()["obs"]},
            fresh=lambda b: b.copy(shallow=True),
        ),
        pyarrow=Way(_arrow_blocks(bulk), _arrow_decompress_bulk if bulk else _arrow_decompress_rows),
        bare=Way(bare.decompress_bulk_setup, bare.decompress_bulk)
        if bulk
        else Way(bare.decompress_rows_setup, bare.decompress_rows),
    )


ROWS = [
    make(f"{kind}.{size}", obs, bulk=kind == "bulk")
    for size, obs in (("1000x17", data.floats), ("128x84x84x4", data.images))
    for kind in ("bulk", "rows")
    for make in (_compress, _decompress)
]
