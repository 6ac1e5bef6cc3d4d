"""`storage.*`: experience on disk, beside what pyarrow does without us and what peers write.

200,000 steps of a small environment: eight columns, of which observations have most of the bytes. Every contestant
reads and writes through the page cache, with its own defaults; files lie in a folder of their own, that goes when the
process ends. Bare pyarrow writes a file as we promise to, whole or not at all and on the disk, but for the checksums.
`python -m benchmarks.bench_storage` prints all rows and the bytes on disk.
"""

from __future__ import annotations

import json
import os
import shutil
import sys
import tempfile
import zlib
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import cache
from pathlib import Path
from typing import Any, BinaryIO

import numpy as np

from benchmarks.harness import Row, Way, row

N = 200_000
_PICKED = 4096


@cache
def _temporary() -> tempfile.TemporaryDirectory[str]:
    return tempfile.TemporaryDirectory(prefix="samplebatch-storage-")


def folder() -> Path:
    """Return the folder of all files; it goes with the process."""
    return Path(_temporary().name)


def columns() -> dict[str, Any]:
    """Make steps: floats that compress little, flags and counters that compress well."""
    rng = np.random.default_rng(0)
    t = np.arange(N)
    return {
        "obs": rng.normal(size=(N, 17)).astype("f4"),
        "new_obs": rng.normal(size=(N, 17)).astype("f4"),
        "actions": rng.normal(size=(N, 6)).astype("f4"),
        "rewards": rng.normal(size=N),
        "terminateds": t % 1000 == 999,
        "truncateds": np.zeros(N, bool),
        "eps_id": t // 1000,
        "t": t % 1000,
    }


def _picked() -> Any:
    return np.random.default_rng(1).integers(N, size=_PICKED)


# Ours


def _ours(form: str) -> Callable[[Any, Any], Any]:
    def setup(lib: Any, data: Any) -> Any:
        batch, path = lib.SampleBatch(data), folder() / f"ours.{form}"
        batch.save(path)
        return batch, path

    return setup


def _ours_random(lib: Any, data: Any) -> Any:
    from samplebatch import load

    path = folder() / "ours.arrow"
    lib.SampleBatch(data).save(path)
    return load(path), _picked()


def _load(**options: Any) -> Callable[[Any], Any]:
    def call(state: Any) -> Any:
        from samplebatch import load

        return load(state[1], **options)

    return call


# Bare pyarrow: the same table, written and read by hand


def _table(data: Any) -> Any:
    import pyarrow as pa

    arrays: dict[str, Any] = {}
    for name, value in data.items():
        flat = pa.array(value.reshape(-1))
        arrays[name] = flat if value.ndim == 1 else pa.FixedSizeListArray.from_arrays(flat, value.shape[1])
    return pa.table(arrays)


@contextmanager
def _replacing(path: Path) -> Iterator[BinaryIO]:
    """Open a file that takes the path's place once it is on the disk."""
    beside = path.with_name(f"{path.name}.tmp")
    with open(beside, "wb") as file:
        yield file
        file.flush()
        os.fsync(file.fileno())
    beside.replace(path)


def _write_arrow(table: Any, path: Path) -> None:
    import pyarrow as pa

    with _replacing(path) as file, pa.ipc.new_file(file, table.schema) as writer:
        writer.write_table(table)


def _write_arrow_with_crc(table: Any, path: Path) -> None:
    """Write a file as `_write_arrow` does, and the CRC-32 of each column beside it."""
    _write_arrow(table, path)
    found = {
        name: [zlib.crc32(buffer) for chunk in table.column(name).chunks for buffer in chunk.buffers() if buffer]
        for name in table.column_names
    }
    path.with_suffix(".crc").write_text(json.dumps(found))


def _write_parquet(table: Any, path: Path) -> None:
    from pyarrow import parquet

    with _replacing(path) as file:
        options: dict[str, Any] = {"compression": "zstd", "use_dictionary": False, "write_page_checksum": True}
        parquet.write_table(table, file, **options)


def _bare(form: str) -> Callable[[Any, Any], Any]:
    def setup(lib: Any, data: Any) -> Any:
        table, path = _table(data), folder() / f"bare.{form}"
        (_write_arrow if form == "arrow" else _write_parquet)(table, path)
        return table, path

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
    _write_arrow(_table(data), folder() / "bare.arrow")
    table = _map_arrow((None, folder() / "bare.arrow"))
    views = {}
    for name in table.column_names:
        chunk = table.column(name).chunk(0)
        nested = hasattr(chunk.type, "list_size")
        values = chunk.flatten() if nested else chunk
        array = values.to_numpy(zero_copy_only=False)
        views[name] = array.reshape(-1, chunk.type.list_size) if nested else array
    return views, _picked()


# Peers


def _tianshou_save(lib: Any, data: Any) -> Any:
    import h5py
    from tianshou.data.utils.converter import to_hdf5

    path = folder() / "tianshou.hdf5"
    batch = lib.Batch(**data)

    def write() -> None:
        with h5py.File(path, "w") as file:
            to_hdf5(batch, file)

    write()
    return write, path


def _tianshou_load(state: Any) -> Any:
    import h5py
    from tianshou.data.utils.converter import from_hdf5

    with h5py.File(state[1], "r") as file:
        return from_hdf5(file)


def _tianshou_column(state: Any) -> Any:
    import h5py

    with h5py.File(state[1], "r") as file:
        return file["rewards"][:]


def _tensordict_save(lib: Any, data: Any) -> Any:
    import torch
    from tensordict import TensorDict

    path = folder() / "tensordict"
    held = TensorDict({name: torch.from_numpy(value) for name, value in data.items()}, [N])
    held.memmap(str(path))
    return lambda: held.memmap(str(path)), path, held


def _tensordict_load(state: Any) -> Any:
    from tensordict import TensorDict

    return TensorDict.load_memmap(str(state[1]))


def _tensordict_random(lib: Any, data: Any) -> Any:
    import torch

    return _tensordict_load(_tensordict_save(lib, data)), torch.from_numpy(_picked())


def _rllib_save(lib: Any, data: Any) -> Any:
    from ray.rllib.offline.json_writer import _to_json

    batch, path = lib.SampleBatch({name: value[:2000] for name, value in data.items()}), folder() / "rllib.json"

    def write() -> None:
        path.write_text(_to_json(batch, []))

    write()
    return write, path


def _rllib_load(path: Path) -> Any:
    from ray.rllib.offline.json_reader import from_json_data

    return from_json_data(json.loads(path.read_text()), None)


def _minari_save(lib: Any, data: Any) -> Any:
    place = folder() / "minari"
    os.environ["MINARI_DATASETS_PATH"] = str(place)
    ends = np.flatnonzero(np.diff(data["eps_id"], append=-1)) + 1
    episodes = [
        lib.EpisodeBuffer(
            observations=np.concatenate([data["obs"][start:stop], data["new_obs"][stop - 1 : stop]]),
            actions=data["actions"][start:stop],
            rewards=data["rewards"][start:stop].tolist(),
            terminations=data["terminateds"][start:stop].tolist(),
            truncations=data["truncateds"][start:stop].tolist(),
        )
        for start, stop in zip([0, *ends[:-1].tolist()], ends.tolist(), strict=True)
    ]

    def write() -> None:
        shutil.rmtree(place / "steps", ignore_errors=True)
        lib.write("steps/steps-v0", episodes, *(lib.box(data[name].shape[1]) for name in ("obs", "actions")))

    write()
    return write, place


def _minari_load(lib: Any, data: Any) -> Any:
    _minari_save(lib, data)
    return lib


def _first_steps() -> dict[str, Any]:
    return {name: value[:2000] for name, value in columns().items()}


_FILTER = [("eps_id", "==", 77)]

ROWS: list[Row] = [
    row(
        "storage.save.arrow",
        columns,
        traffic=True,
        view=None,
        ours=Way(_ours("arrow"), lambda state: state[0].save(state[1])),
        bare=Way(_bare("arrow"), lambda state: _write_arrow(*state)),
        tianshou=Way(_tianshou_save, lambda state: state[0]()),
        tensordict=Way(_tensordict_save, lambda state: state[0]()),
    ),
    row(
        "storage.save.arrow with checksums",
        columns,
        traffic=True,
        view=None,
        ours=Way(_ours("arrow"), lambda state: state[0].save(state[1])),
        bare=Way(_bare("arrow"), lambda state: _write_arrow_with_crc(*state)),
    ),
    row(
        "storage.save.parquet",
        columns,
        traffic=True,
        view=None,
        ours=Way(_ours("parquet"), lambda state: state[0].save(state[1])),
        bare=Way(_bare("parquet"), lambda state: _write_parquet(*state)),
    ),
    row(
        "storage.save.2000 steps",
        _first_steps,
        traffic=True,
        view=None,
        ours=Way(_ours("arrow"), lambda state: state[0].save(state[1])),
        bare=Way(_bare("arrow"), lambda state: _write_arrow(*state)),
        rllib=Way(_rllib_save, lambda state: state[0]()),
        minari=Way(_minari_save, lambda state: state[0]()),
    ),
    row(
        "storage.load.2000 steps",
        _first_steps,
        traffic=True,
        view=None,
        ours=Way(_ours("arrow"), _load()),
        bare=Way(_bare("arrow"), _map_arrow),
        rllib=Way(_rllib_save, lambda state: _rllib_load(state[1])),
        minari=Way(_minari_load, lambda lib: lib.read("steps/steps-v0")),
    ),
    row(
        "storage.load.arrow",
        columns,
        view=None,
        ours=Way(_ours("arrow"), _load()),
        bare=Way(_bare("arrow"), _map_arrow),
        tianshou=Way(_tianshou_save, _tianshou_load),
        tensordict=Way(_tensordict_save, _tensordict_load),
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
        "storage.one column of eight.arrow",
        columns,
        view=None,
        ours=Way(_ours("arrow"), lambda state: _load(columns=["rewards"])(state)["rewards"].sum()),
        bare=Way(_bare("arrow"), lambda state: _map_arrow(state).column("rewards").to_numpy().sum()),
        tianshou=Way(_tianshou_save, lambda state: _tianshou_column(state).sum()),
        tensordict=Way(_tensordict_save, lambda state: _tensordict_load(state)["rewards"].sum()),
    ),
    row(
        "storage.filtered.parquet",
        columns,
        traffic=True,
        view=None,
        ours=Way(_ours("parquet"), _load(filters=_FILTER)),
        bare=Way(_bare("parquet"), _read_parquet(filters=_FILTER)),
    ),
    row(
        "storage.random rows",
        columns,
        traffic=True,
        view=None,
        ours=Way(_ours_random, lambda state: state[0].take(state[1])),
        bare=Way(_bare_random, lambda state: {name: view.take(state[1], 0) for name, view in state[0].items()}),
        tensordict=Way(_tensordict_random, lambda state: state[0][state[1]]),
    ),
]


def sizes() -> dict[str, int]:
    """Return the bytes that each contestant has on disk for the same steps; RLlib's, for a hundredth, times 100."""
    from types import SimpleNamespace

    from benchmarks.peers import library

    data = columns()
    ours = library("ours")
    found = {f"ours.{form}": _ours(form)(ours, data)[1].stat().st_size for form in ("arrow", "parquet")}
    found |= {f"bare.{form}": _bare(form)(None, data)[1].stat().st_size for form in ("arrow", "parquet")}
    peers: dict[str, Callable[[Any, Any], Any]] = {
        "tianshou.hdf5": _tianshou_save,
        "tensordict": _tensordict_save,
        "rllib.json": _rllib_save,
        "minari": _minari_save,
    }
    for name, make in peers.items():
        peer = library(name.split(".")[0]) or SimpleNamespace()
        path = make(peer, data)[1]
        files = [path] if path.is_file() else [entry for entry in path.rglob("*") if entry.is_file()]
        found[name] = sum(entry.stat().st_size for entry in files) * (100 if name == "rllib.json" else 1)
    return found


def show_all(arguments: list[str]) -> None:
    """Print all rows as Markdown, measured as the command line asks, and the bytes on disk."""
    from benchmarks.__main__ import main

    main(["storage", "--markdown", *arguments])
    print("\n| on disk | MB |\n|---|---:|")
    for who, nbytes in sizes().items():
        print(f"| {who} | {nbytes / 1e6:.1f} |")


if __name__ == "__main__":
    show_all(sys.argv[1:])
