"""Storage of steps with the peers' own functions; peers that cannot read parts of a file read the entire file.

Each `*_save` function returns a state that starts with a write function and a path; `*_load` functions read this state.
Most other functions return one function that reads, or a pair of functions: one that reads and one that selects rows.
"""

from __future__ import annotations

import json
import os
import shutil
from functools import partial
from typing import Any

import numpy as np

from benchmarks.stored import episode, folder, random_rows

# Tianshou: a batch in HDF5


def tianshou_save(lib: Any, data: Any) -> Any:
    """Write a Tianshou batch to HDF5; return a function that repeats the write, and the path."""
    import h5py
    from tianshou.data.utils.converter import to_hdf5

    path = folder() / "tianshou.hdf5"
    batch = lib.Batch(**data)

    def write() -> None:
        with h5py.File(path, "w") as file:
            to_hdf5(batch, file)

    write()
    return write, path


def tianshou_load(state: Any) -> Any:
    """Read the file as a Tianshou batch."""
    import h5py
    from tianshou.data.utils.converter import from_hdf5

    with h5py.File(state[1], "r") as file:
        return from_hdf5(file)


def tianshou_column(state: Any) -> Any:
    """Read one dataset of the HDF5 file."""
    import h5py

    with h5py.File(state[1], "r") as file:
        return file["rewards"][:]


def tianshou_rows(lib: Any, data: Any) -> Any:
    """Return a function that reads the entire batch, and a function that gathers random rows of the batch."""
    state, rows = tianshou_save(lib, data), random_rows(len(data["t"]))
    return lambda: lib.Batch(tianshou_load(state)), lambda batch: batch[rows]


def tianshou_filtered(lib: Any, data: Any) -> Any:
    """Prepare reading a batch and selecting the rows of an episode."""
    state, number = tianshou_save(lib, data), episode(len(data["t"]))

    def read() -> Any:
        batch = lib.Batch(tianshou_load(state))
        return batch[batch.eps_id == number]

    return read


# TensorDict: a folder of memory maps


def tensordict_save(lib: Any, data: Any) -> Any:
    """Write a TensorDict to a folder of memory maps; return a write function, the path and the TensorDict."""
    import torch
    from tensordict import TensorDict

    path = folder() / "tensordict"
    tensordict = TensorDict({name: torch.from_numpy(value) for name, value in data.items()}, [len(data["t"])])
    tensordict.memmap(str(path))
    return lambda: tensordict.memmap(str(path)), path, tensordict


def tensordict_load(state: Any) -> Any:
    """Memory-map the folder as a TensorDict."""
    from tensordict import TensorDict

    return TensorDict.load_memmap(str(state[1]))


def tensordict_rows(lib: Any, data: Any) -> Any:
    """Return a function that memory-maps the folder, and a function that gathers random rows."""
    import torch

    state, rows = tensordict_save(lib, data), torch.from_numpy(random_rows(len(data["t"])))
    return lambda: tensordict_load(state), lambda mapped: mapped[rows]


def tensordict_filtered(lib: Any, data: Any) -> Any:
    """Return a function that memory-maps the folder and gathers the rows of one episode."""
    state, number = tensordict_save(lib, data), episode(len(data["t"]))

    def read() -> Any:
        mapped = tensordict_load(state)
        return mapped[mapped["eps_id"] == number]

    return read


# RLlib: a batch in a line of JSON


def rllib_save(lib: Any, data: Any) -> Any:
    """Write an RLlib batch as JSON; return a function that repeats the write, and the path."""
    from ray.rllib.offline.json_writer import _to_json

    batch, path = lib.SampleBatch(data), folder() / "rllib.json"

    def write() -> None:
        path.write_text(_to_json(batch, []))

    write()
    return write, path


def rllib_load(state: Any) -> Any:
    """Read the file as an RLlib batch."""
    from ray.rllib.offline.json_reader import from_json_data

    return from_json_data(json.loads(state[1].read_text()), None)


def rllib_rows(lib: Any, data: Any) -> Any:
    """Return a function that reads a batch, and a function that gathers random rows.

    RLlib's batch rejects indices, so the rows of each column are gathered separately.
    """
    state, rows = rllib_save(lib, data), random_rows(len(data["t"]))
    return lambda: rllib_load(state), lambda batch: {name: values[rows] for name, values in batch.items()}


def rllib_filtered(lib: Any, data: Any) -> Any:
    """Prepare reading a batch and selecting the rows of an episode."""
    state, number = rllib_save(lib, data), episode(len(data["t"]))

    def read() -> Any:
        batch = rllib_load(state)
        in_episode = batch["eps_id"] == number
        return {name: values[in_episode] for name, values in batch.items()}

    return read


# Minari: a dataset of episodes, without next observations and ids


def minari_save(lib: Any, data: Any) -> Any:
    """Write a Minari dataset; return a function that repeats the write, and the folder."""
    target = folder() / "minari"
    os.environ["MINARI_DATASETS_PATH"] = str(target)
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
        shutil.rmtree(target / "steps", ignore_errors=True)
        lib.write("steps/steps-v0", episodes, *(lib.box(data[name].shape[1]) for name in ("obs", "actions")))

    write()
    return write, target


def _minari_read(lib: Any) -> Any:
    return lib.read("steps/steps-v0")


def minari_load(lib: Any, data: Any) -> Any:
    """Write the dataset; return a function that reads all episodes."""
    minari_save(lib, data)
    return partial(_minari_read, lib)


def minari_column(lib: Any, data: Any) -> Any:
    """Write the dataset; return a function that reads the rewards, for which Minari must read entire episodes."""
    minari_save(lib, data)
    return lambda: np.concatenate([part.rewards for part in _minari_read(lib)])


def minari_rows(lib: Any, data: Any) -> Any:
    """Return a function that reads and concatenates all episodes, and a function that gathers random rows."""
    minari_save(lib, data)
    rows = random_rows(len(data["t"]))

    def read() -> Any:
        episodes = list(_minari_read(lib))
        return {
            "obs": np.concatenate([part.observations[:-1] for part in episodes]),
            "new_obs": np.concatenate([part.observations[1:] for part in episodes]),
            "actions": np.concatenate([part.actions for part in episodes]),
            "rewards": np.concatenate([part.rewards for part in episodes]),
            "terminateds": np.concatenate([part.terminations for part in episodes]),
            "truncateds": np.concatenate([part.truncations for part in episodes]),
        }

    return read, lambda columns: {name: values[rows] for name, values in columns.items()}


def minari_filtered(lib: Any, data: Any) -> Any:
    """Write the dataset; return a function that reads one episode by its number."""
    minari_save(lib, data)
    return lambda: lib.read_episode("steps/steps-v0", episode(len(data["t"])))
