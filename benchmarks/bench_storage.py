"""`storage.*`: experience on disk, compared with plain pyarrow (`bare`) and the files of peers.

The data are 200,000 steps of a small environment in eight columns; observations account for most bytes. The `2000
steps` rows use the first 2,000 steps, which RLlib can write in reasonable time. Every contestant reads and writes
through the page cache, with its defaults. Files are written to a temporary folder, which is removed when the process
exits.

Our library and bare write a file atomically and flush it to disk before they return. In `save` rows, the files of peers
are also flushed to disk. In `without waiting` rows, no file is flushed (`durable=False`). All contestants start from
columns. Bare builds a table, and neither writes nor verifies checksums. In `random rows` rows, each call opens the
file; in `in memory` rows, calls read loaded data. Bare gathers random rows into allocated memory. `python -m
benchmarks.bench_storage` prints all rows and the bytes on disk.
"""

from __future__ import annotations

import json
import os
import sys
import zlib
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any, BinaryIO

import numpy as np

from benchmarks import storage_peers as peers
from benchmarks.harness import Row, Way, row
from benchmarks.stored import FIRST, N, Setup, columns, episode, files_at, first_columns, folder, random_rows, synced

# Ours


def _ours(form: str) -> Setup:
    def setup(lib: Any, data: Any) -> Any:
        batch, path = lib.SampleBatch(data), folder() / f"ours.{form}"
        batch.save(path)
        return batch, path

    return setup


def _ours_random(lib: Any, data: Any) -> Any:
    from samplebatch import load

    path, rows = folder() / "ours.arrow", random_rows(len(data["t"]))
    lib.SampleBatch(data).save(path)
    return lambda: load(path), lambda batch: batch.take(rows)


def _ours_filtered(form: str) -> Setup:
    def setup(lib: Any, data: Any) -> Any:
        from samplebatch import load

        _, path = _ours(form)(lib, data)
        filters = [("eps_id", "==", episode(len(data["t"])))]
        return lambda: load(path, filters=filters)

    return setup


def _load(**options: Any) -> Callable[[Any], Any]:
    def call(state: Any) -> Any:
        from samplebatch import load

        return load(state[1], **options)

    return call


# Plain pyarrow: a table of the same columns


def _table(data: Any) -> Any:
    import pyarrow as pa

    arrays: dict[str, Any] = {}
    for name, value in data.items():
        flat = pa.array(value.reshape(-1))
        arrays[name] = flat if value.ndim == 1 else pa.FixedSizeListArray.from_arrays(flat, value.shape[1])
    return pa.table(arrays)


@contextmanager
def _replacing(path: Path) -> Iterator[BinaryIO]:
    """Open a temporary file, which replaces the file at `path` after it is flushed to disk."""
    temporary = path.with_name(f"{path.name}.tmp")
    with open(temporary, "wb") as file:
        yield file
        file.flush()
        os.fsync(file.fileno())
    temporary.replace(path)


def _write_arrow(table: Any, path: Path) -> None:
    import pyarrow as pa

    with _replacing(path) as file, pa.ipc.new_file(file, table.schema) as writer:
        writer.write_table(table)


def _write_arrow_with_crc(table: Any, path: Path) -> None:
    """Write the file of `_write_arrow`, and a second file with the CRC-32 of every buffer."""
    _write_arrow(table, path)
    checksums = {
        name: [zlib.crc32(buffer) for chunk in table.column(name).chunks for buffer in chunk.buffers() if buffer]
        for name in table.column_names
    }
    path.with_suffix(".crc").write_text(json.dumps(checksums))


def _write_parquet(table: Any, path: Path) -> None:
    from pyarrow import parquet

    with _replacing(path) as file:
        options: dict[str, Any] = {"compression": "zstd", "use_dictionary": False, "write_page_checksum": True}
        parquet.write_table(table, file, **options)


def _bare(form: str) -> Setup:
    def setup(lib: Any, data: Any) -> Any:
        path = folder() / f"bare.{form}"
        (_write_arrow if form == "arrow" else _write_parquet)(_table(data), path)
        return data, path

    return setup


def _map_arrow(state: Any) -> Any:
    import pyarrow as pa

    with pa.memory_map(str(state[1])) as source:
        return pa.ipc.open_file(source).read_all()


def _read_parquet(**options: Any) -> Callable[[Any], Any]:
    def call(state: Any) -> Any:
        from pyarrow import parquet

        return parquet.read_table(state[1], page_checksum_verification=True, **options)

    return call


def _bare_random(lib: Any, data: Any) -> Any:
    path, rows = folder() / "bare.arrow", random_rows(len(data["t"]))
    _write_arrow(_table(data), path)
    outputs = {name: np.empty((len(rows), *view.shape[1:]), view.dtype) for name, view in data.items()}

    def views() -> dict[str, Any]:
        table = _map_arrow((None, path))
        columns = {}
        for name in table.column_names:
            chunk = table.column(name).chunk(0)
            nested = hasattr(chunk.type, "list_size")
            values = chunk.flatten() if nested else chunk
            array = values.to_numpy(zero_copy_only=False)
            columns[name] = array.reshape(-1, chunk.type.list_size) if nested else array
        return columns

    # Indices are in bounds; with bounds checks, NumPy would gather through a temporary buffer.
    return views, lambda loaded: {name: view.take(rows, 0, outputs[name], "clip") for name, view in loaded.items()}


def _bare_filtered(lib: Any, data: Any) -> Any:
    from pyarrow import parquet

    _, path = _bare("parquet")(lib, data)
    filters = [("eps_id", "==", episode(len(data["t"])))]
    return lambda: parquet.read_table(path, page_checksum_verification=True, filters=filters)


def _rewards(read: Callable[[Any], Any]) -> Callable[[Any], Any]:
    """Wrap `read` to sum the rewards, so that a memory-mapped column is read."""
    return lambda state: np.asarray(read(state)["rewards"]).sum()


def _loaded(setup: Setup) -> Way:
    """Declare gathering rows from loaded data."""

    def read(lib: Any, data: Any) -> Any:
        read, gather = setup(lib, data)
        loaded = read()
        return lambda: gather(loaded)

    return Way(read)


def _opened(setup: Setup) -> Way:
    """Declare opening a file and gathering rows."""
    return Way(setup, lambda state: state[1](state[0]()))


_SAVE = {
    "ours": Way(_ours("arrow"), lambda state: state[0].save(state[1])),
    "bare": Way(_bare("arrow"), lambda state: _write_arrow(_table(state[0]), state[1])),
}
_RANDOM: dict[str, Setup] = {
    "ours": _ours_random,
    "bare": _bare_random,
    "tianshou": peers.tianshou_rows,
    "tensordict": peers.tensordict_rows,
    "minari": peers.minari_rows,
}
_MANY_PEERS: dict[str, Setup] = {
    "tianshou": peers.tianshou_save,
    "tensordict": peers.tensordict_save,
    "minari": peers.minari_save,
}
_PEERS: dict[str, Setup] = {**_MANY_PEERS, "rllib": peers.rllib_save}


def _saving(name: str, data: Callable[[], Any], writers: Mapping[str, Setup]) -> list[Row]:
    """Declare two rows: one with files flushed to disk, and one without."""

    def peer_ways(wrap: Callable[[Setup], Setup]) -> dict[str, Way]:
        return {name: Way(wrap(setup), lambda state: state[0]()) for name, setup in writers.items()}

    return [
        row(name, data, traffic=True, view=None, **_SAVE, **peer_ways(synced)),
        row(
            f"{name} without waiting",
            data,
            traffic=True,
            view=None,
            ours=Way(_ours("arrow"), lambda state: state[0].save(state[1], durable=False)),
            **peer_ways(lambda setup: setup),
        ),
    ]


def _reading(kind: str, data: Callable[[], Any], *, with_rllib: bool) -> list[Row]:
    """Declare the rows that read all data, one column, random rows or one episode."""
    rllib = {
        "load": Way(peers.rllib_save, peers.rllib_load),
        "column": Way(peers.rllib_save, _rewards(peers.rllib_load)),
        "filtered": Way(peers.rllib_filtered),
    }

    def rllib_way(operation: str) -> dict[str, Way]:
        return {"rllib": rllib[operation]} if with_rllib else {}

    random = _RANDOM | ({"rllib": peers.rllib_rows} if with_rllib else {})
    return [
        row(
            f"storage.load.{kind}",
            data,
            view=None,
            ours=Way(_ours("arrow"), _load()),
            bare=Way(_bare("arrow"), _map_arrow),
            tianshou=Way(peers.tianshou_save, peers.tianshou_load),
            tensordict=Way(peers.tensordict_save, peers.tensordict_load),
            minari=Way(peers.minari_load),
            **rllib_way("load"),
        ),
        row(
            f"storage.one column of eight.{kind}",
            data,
            view=None,
            ours=Way(_ours("arrow"), _rewards(_load(columns=["rewards"]))),
            bare=Way(_bare("arrow"), _rewards(_map_arrow)),
            tianshou=Way(peers.tianshou_save, lambda state: peers.tianshou_column(state).sum()),
            tensordict=Way(peers.tensordict_save, _rewards(peers.tensordict_load)),
            minari=Way(peers.minari_column, lambda read: read().sum()),
            **rllib_way("column"),
        ),
        row(
            f"storage.random rows.{kind}",
            data,
            traffic=True,
            view=None,
            **{name: _opened(setup) for name, setup in random.items()},
        ),
        row(
            f"storage.random rows in memory.{kind}",
            data,
            traffic=True,
            view=None,
            **{name: _loaded(setup) for name, setup in random.items()},
        ),
        row(
            f"storage.filtered.{kind}",
            data,
            traffic=True,
            view=None,
            ours=Way(_ours_filtered("arrow")),
            tianshou=Way(peers.tianshou_filtered),
            tensordict=Way(peers.tensordict_filtered),
            minari=Way(peers.minari_filtered),
            **rllib_way("filtered"),
        ),
    ]


ROWS: list[Row] = [
    *_saving("storage.save.arrow", columns, _MANY_PEERS),
    row(
        "storage.save.arrow with checksums",
        columns,
        traffic=True,
        view=None,
        ours=_SAVE["ours"],
        bare=Way(_bare("arrow"), lambda state: _write_arrow_with_crc(_table(state[0]), state[1])),
    ),
    *_reading("arrow", columns, with_rllib=False),
    *_saving("storage.save.2000 steps", first_columns, _PEERS),
    *_reading("2000 steps", first_columns, with_rllib=True),
    row(
        "storage.save.parquet",
        columns,
        traffic=True,
        view=None,
        ours=Way(_ours("parquet"), lambda state: state[0].save(state[1])),
        bare=Way(_bare("parquet"), lambda state: _write_parquet(_table(state[0]), state[1])),
    ),
    row(
        "storage.load.parquet",
        columns,
        traffic=True,
        view=None,
        ours=Way(_ours("parquet"), _load()),
        bare=Way(_bare("parquet"), _read_parquet()),
    ),
    row(
        "storage.one column of eight.parquet",
        columns,
        traffic=True,
        view=None,
        ours=Way(_ours("parquet"), _load(columns=["rewards"])),
        bare=Way(_bare("parquet"), _read_parquet(columns=["rewards"])),
    ),
    row(
        "storage.filtered.parquet",
        columns,
        traffic=True,
        view=None,
        ours=Way(_ours_filtered("parquet")),
        bare=Way(_bare_filtered),
    ),
]


def sizes() -> dict[str, int]:
    """Return each contestant's bytes on disk for the same steps; for RLlib, extrapolate from 2,000 steps."""
    from types import SimpleNamespace

    from benchmarks.peers import library

    ours = library("ours")
    data = columns()
    nbytes = {f"ours.{form}": _ours(form)(ours, data)[1].stat().st_size for form in ("arrow", "parquet")}
    nbytes |= {f"bare.{form}": _bare(form)(None, data)[1].stat().st_size for form in ("arrow", "parquet")}
    for name, setup in _PEERS.items():
        peer = library(name) or SimpleNamespace()
        path = setup(peer, first_columns() if name == "rllib" else data)[1]
        nbytes[name] = sum(file.stat().st_size for file in files_at(path)) * (N // FIRST if name == "rllib" else 1)
    return nbytes


def show_all(arguments: list[str]) -> None:
    """Measure all rows with command-line arguments, and print them and the bytes on disk as Markdown."""
    from benchmarks.__main__ import main

    main(["storage", "--markdown", *arguments])
    print("\n| on disk | MB |\n|---|---:|")
    for contestant, nbytes in sizes().items():
        print(f"| {contestant} | {nbytes / 1e6:.1f} |")


if __name__ == "__main__":
    show_all(sys.argv[1:])
