"""Storage of steps by peers, as their users would do it; entire files if a library cannot read parts.

Each `*_save` sets up and returns a write function and the path; each reader has the peer and the path as arguments.
"""

from __future__ import annotations

import json
import os
import shutil
from functools import partial
from typing import Any

import numpy as np

from benchmarks.stored import episode, folder, picked

# Tianshou: a batch in HDF5


def tianshou_save(lib: Any, data: Any) -> Any:
    """Set up Tianshou's writing of a batch."""
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
    """Read a batch of Tianshou's."""
    import h5py
    from tianshou.data.utils.converter import from_hdf5

    with h5py.File(state[1], "r") as file:
        return from_hdf5(file)


def tianshou_column(state: Any) -> Any:
    """Read one data set of the file."""
    import h5py

    with h5py.File(state[1], "r") as file:
        return file["rewards"][:]


def tianshou_rows(lib: Any, data: Any) -> Any:
    """Set up the reading of a batch, which is the only way that Tianshou has to random rows, and their gathering."""
    state, rows = tianshou_save(lib, data), picked(len(data["t"]))
    return lambda: lib.Batch(tianshou_load(state)), lambda batch: batch[rows]


def tianshou_filtered(lib: Any, data: Any) -> Any:
    """Set up reading a batch and selecting the rows of an episode."""
    state, number = tianshou_save(lib, data), episode(len(data["t"]))

    def read() -> Any:
        batch = lib.Batch(tianshou_load(state))
        return batch[batch.eps_id == number]

    return read


# TensorDict: a folder of memory maps


def tensordict_save(lib: Any, data: Any) -> Any:
    """Set up TensorDict's writing of a folder."""
    import torch
    from tensordict import TensorDict

    path = folder() / "tensordict"
    tensordict = TensorDict({name: torch.from_numpy(value) for name, value in data.items()}, [len(data["t"])])
    tensordict.memmap(str(path))
    return lambda: tensordict.memmap(str(path)), path, tensordict


def tensordict_load(state: Any) -> Any:
    """Map a folder of TensorDict's."""
    from tensordict import TensorDict

    return TensorDict.load_memmap(str(state[1]))


def tensordict_rows(lib: Any, data: Any) -> Any:
    """Set up the mapping of a folder, and the gathering of random rows."""
    import torch

    state, rows = tensordict_save(lib, data), torch.from_numpy(picked(len(data["t"])))
    return lambda: tensordict_load(state), lambda mapped: mapped[rows]


def tensordict_filtered(lib: Any, data: Any) -> Any:
    """Set up mapping a folder and gathering the rows of an episode."""
    state, number = tensordict_save(lib, data), episode(len(data["t"]))

    def read() -> Any:
        mapped = tensordict_load(state)
        return mapped[mapped["eps_id"] == number]

    return read


# RLlib: a batch in a line of JSON


def rllib_save(lib: Any, data: Any) -> Any:
    """Set up RLlib's writing of a batch."""
    from ray.rllib.offline.json_writer import _to_json

    batch, path = lib.SampleBatch(data), folder() / "rllib.json"

    def write() -> None:
        path.write_text(_to_json(batch, []))

    write()
    return write, path


def rllib_load(state: Any) -> Any:
    """Read a batch of RLlib's."""
    from ray.rllib.offline.json_reader import from_json_data

    return from_json_data(json.loads(state[1].read_text()), None)


def rllib_rows(lib: Any, data: Any) -> Any:
    """Set up the reading of a batch, and the gathering of random rows by column: RLlib's batch rejects indices."""
    state, rows = rllib_save(lib, data), picked(len(data["t"]))
    return lambda: rllib_load(state), lambda batch: {name: values[rows] for name, values in batch.items()}


def rllib_filtered(lib: Any, data: Any) -> Any:
    """Set up reading a batch and selecting the rows of an episode."""
    state, number = rllib_save(lib, data), episode(len(data["t"]))

    def read() -> Any:
        batch = rllib_load(state)
        in_episode = batch["eps_id"] == number
        return {name: values[in_episode] for name, values in batch.items()}

    return read


# Minari: a data set of episodes, without next observations and ids


def minari_save(lib: Any, data: Any) -> Any:
    """Set up Minari's writing of a data set."""
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
    """Set up the reading of all episodes."""
    minari_save(lib, data)
    return partial(_minari_read, lib)


def minari_column(lib: Any, data: Any) -> Any:
    """Set up the reading of all episodes for their rewards: Minari reads entire episodes."""
    minari_save(lib, data)
    return lambda: np.concatenate([read.rewards for read in _minari_read(lib)])


def minari_rows(lib: Any, data: Any) -> Any:
    """Set up the reading and joining of all episodes, and the gathering of random rows."""
    minari_save(lib, data)
    rows = picked(len(data["t"]))

    def read() -> Any:
        episodes = list(_minari_read(lib))
        return {
            "obs": np.concatenate([found.observations[:-1] for found in episodes]),
            "new_obs": np.concatenate([found.observations[1:] for found in episodes]),
            "actions": np.concatenate([found.actions for found in episodes]),
            "rewards": np.concatenate([found.rewards for found in episodes]),
            "terminateds": np.concatenate([found.terminations for found in episodes]),
            "truncateds": np.concatenate([found.truncations for found in episodes]),
        }

    return read, lambda joined: {name: values[rows] for name, values in joined.items()}


def minari_filtered(lib: Any, data: Any) -> Any:
    """Set up the reading of one episode, which Minari finds by its number."""
    minari_save(lib, data)
    return lambda: lib.read_episode("steps/steps-v0", episode(len(data["t"])))
