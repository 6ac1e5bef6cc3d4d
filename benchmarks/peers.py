"""Contestants: our library, the installed peers, and NumPy.

Each contestant is a namespace of the functions and classes that rows use. `batch` creates the library's batch from a
(possibly nested) dict of arrays. The namespaces of RLlib and of our library have the same names.
"""

from __future__ import annotations

import sys
import warnings
from collections.abc import Callable
from functools import cache, partial
from types import SimpleNamespace
from typing import Any

import numpy as np

OURS = "ours"
BARE = "bare"


def _ours() -> SimpleNamespace:
    # Load the compiled kernels; otherwise, the first calls run in NumPy.
    import samplebatch.kernels  # noqa: F401
    from samplebatch import (
        MultiAgentBatch,
        PrioritizedReplayBuffer,
        ReplayBuffer,
        SampleBatch,
        VectorReplayBuffer,
        concat_samples,
    )
    from samplebatch.batch.nested.batch import Batch

    return SimpleNamespace(
        batch=SampleBatch,
        Batch=Batch,
        SampleBatch=SampleBatch,
        MultiAgentBatch=MultiAgentBatch,
        PrioritizedReplayBuffer=PrioritizedReplayBuffer,
        ReplayBuffer=ReplayBuffer,
        VectorReplayBuffer=VectorReplayBuffer,
        concat_samples=concat_samples,
    )


def _rllib() -> SimpleNamespace:
    from ray.rllib.policy.sample_batch import MultiAgentBatch, SampleBatch, concat_samples
    from ray.rllib.utils.replay_buffers import ReplayBuffer

    return SimpleNamespace(
        batch=SampleBatch,
        SampleBatch=SampleBatch,
        MultiAgentBatch=MultiAgentBatch,
        ReplayBuffer=ReplayBuffer,
        concat_samples=concat_samples,
    )


def _tianshou() -> SimpleNamespace:
    import tianshou.data

    return SimpleNamespace(
        batch=tianshou.data.Batch,
        Batch=tianshou.data.Batch,
        PrioritizedReplayBuffer=tianshou.data.PrioritizedReplayBuffer,
        ReplayBuffer=tianshou.data.ReplayBuffer,
        VectorReplayBuffer=tianshou.data.VectorReplayBuffer,
        to_torch=tianshou.data.to_torch,
        to_numpy=tianshou.data.to_numpy,
    )


def _tensordict() -> SimpleNamespace:
    import torch
    from tensordict import TensorDict

    def tensors(columns: Any) -> Any:
        return {k: tensors(v) if isinstance(v, dict) else torch.from_numpy(v) for k, v in columns.items()}

    def batch(columns: Any) -> Any:
        return TensorDict(tensors(columns), batch_size=[len(next(iter(_leaves(columns))))])

    return SimpleNamespace(batch=batch, tensors=tensors, TensorDict=TensorDict, torch=torch)


def _pyarrow() -> SimpleNamespace:
    import pyarrow as pa

    def array(values: Any) -> Any:
        if values.dtype == bool:
            return pa.ExtensionArray.from_storage(pa.bool8(), pa.array(values.view(np.int8)))
        if values.ndim == 1:
            return pa.array(values)
        return pa.FixedShapeTensorArray.from_numpy_ndarray(values)

    def arrays(columns: Any) -> Any:
        return {name: array(values) for name, values in columns.items()}

    return SimpleNamespace(batch=lambda columns: pa.table(arrays(columns)), arrays=arrays, pa=pa)


def _cpprb() -> SimpleNamespace:
    import cpprb

    return SimpleNamespace(PrioritizedReplayBuffer=cpprb.PrioritizedReplayBuffer, ReplayBuffer=cpprb.ReplayBuffer)


def _sb3() -> SimpleNamespace:
    import gymnasium
    from stable_baselines3.common.buffers import ReplayBuffer

    def buffer(size: int, obs: int, act: int, n_envs: int = 1) -> Any:
        spaces = [gymnasium.spaces.Box(-np.inf, np.inf, (n,), np.float32) for n in (obs, act)]
        return ReplayBuffer(size, *spaces, device="cpu", n_envs=n_envs, handle_timeout_termination=False)

    return SimpleNamespace(buffer=buffer)


def _minari() -> SimpleNamespace:
    import gymnasium
    import minari
    from minari.data_collector import EpisodeBuffer

    def box(n: int) -> Any:
        return gymnasium.spaces.Box(-np.inf, np.inf, (n,), np.float32)

    def write(name: str, episodes: Any, observations: Any, actions: Any) -> None:
        spaces = {"observation_space": observations, "action_space": actions}
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # Minari warns about missing authors and a missing code location
            minari.create_dataset_from_buffers(name, episodes, **spaces, description="steps")

    def read(name: str) -> Any:
        return list(minari.load_dataset(name).iterate_episodes())

    def read_episode(name: str, number: int) -> Any:
        return minari.load_dataset(name)[number]

    return SimpleNamespace(EpisodeBuffer=EpisodeBuffer, box=box, write=write, read=read, read_episode=read_episode)


def _torch() -> SimpleNamespace:
    import torch
    import torch.multiprocessing

    strategy = torch.multiprocessing.set_sharing_strategy
    return SimpleNamespace(torch=torch, multiprocessing=torch.multiprocessing, strategy=strategy)


def ray_alone() -> Any:
    """Return the `ray` module, connected to a cluster that only this process uses."""
    import ray

    if not ray.is_initialized():
        ray.init(
            "local",  # start a cluster even if others run on this machine
            num_cpus=1,
            include_dashboard=False,
            log_to_driver=False,
            logging_level="ERROR",
            object_store_memory=2**31,
        )
    return ray


def _ray() -> SimpleNamespace:
    ray = ray_alone()

    @ray.remote
    class Receiver:
        def seen(self, columns: Any) -> tuple[int, float]:
            return len(columns["rewards"]), float(columns["rewards"][-1])

    return SimpleNamespace(put=ray.put, get=ray.get, seen=Receiver.remote().seen.remote)


def _ray_tianshou() -> SimpleNamespace:
    from tianshou.data import ReplayBuffer

    from benchmarks.served import EPISODE, SIZES, STORED, steps

    tianshou_names = {
        "new_obs": "obs_next",
        "actions": "act",
        "rewards": "rew",
        "terminateds": "terminated",
        "truncateds": "truncated",
    }
    ray = ray_alone()

    def rows(columns: Any) -> Any:
        named_columns = {tianshou_names.get(name, name): values for name, values in columns.items()}
        return ReplayBuffer.from_data(**named_columns, done=named_columns["terminated"])

    @ray.remote(num_cpus=0)
    class Buffer:
        """Ray actor with a Tianshou buffer."""

        def __init__(self, kind: str) -> None:
            self._size, self._stored = SIZES[kind], STORED[kind]
            self._sequences = kind == "sequences"
            self._buffer = rows(steps(kind, STORED[kind]))
            self._rng = np.random.default_rng(7)

        def sample(self) -> Any:
            if not self._sequences:
                return dict(self._buffer.sample(self._size)[0])
            starts = self._rng.integers(self._stored - EPISODE, size=self._size)
            return dict(self._buffer[(starts[:, None] + np.arange(EPISODE)).reshape(-1)])

        def insert(self, columns: Any) -> int:
            self._buffer.update(rows(columns))
            return len(self._buffer)

    return SimpleNamespace(buffer=Buffer.remote, get=ray.get, kill=ray.kill)


def _torchrl() -> SimpleNamespace:
    from torchrl.data import LazyTensorStorage, RayReplayBuffer, SliceSampler

    ray_alone()

    def buffer(capacity: int, batch_size: int, length: int | None) -> Any:
        sampler_options = (
            {} if length is None else {"sampler": partial(SliceSampler, slice_len=length, end_key="terminateds")}
        )
        return RayReplayBuffer(
            storage=partial(LazyTensorStorage, capacity),
            batch_size=batch_size,
            remote_config={"num_cpus": 0, "num_gpus": 0},
            **sampler_options,
        )

    return SimpleNamespace(batch=_tensordict().batch, buffer=buffer)


def _transfer_queue() -> SimpleNamespace:
    import ray
    import transfer_queue
    from tensordict import TensorDict

    if not ray.is_initialized():
        # The controller and storage units of TransferQueue reserve logical CPUs.
        ray.init("local", num_cpus=8, include_dashboard=False, log_to_driver=False, logging_level="ERROR")
    if ray.cluster_resources()["CPU"] < 8:
        raise ImportError("transfer_queue must run without other Ray rows: --filter tokens.service")
    import torch

    transfer_queue.init()
    return SimpleNamespace(queue=transfer_queue, torch=torch, TensorDict=TensorDict)


def _reverb() -> SimpleNamespace:
    from benchmarks.reverb_peer import ReverbSession, python

    python()
    return SimpleNamespace(session=ReverbSession)


def _leaves(columns: Any) -> Any:
    for value in columns.values():
        if isinstance(value, dict):
            yield from _leaves(value)
        else:
            yield value


def _numpy() -> SimpleNamespace:
    return SimpleNamespace(batch=lambda columns: columns)


def _awkward() -> SimpleNamespace:
    import awkward

    return SimpleNamespace(ak=awkward)


_MAKERS: dict[str, Callable[[], SimpleNamespace]] = {
    OURS: _ours,
    "rllib": _rllib,
    "tianshou": _tianshou,
    "tensordict": _tensordict,
    "pyarrow": _pyarrow,
    "cpprb": _cpprb,
    "sb3": _sb3,
    "cleanrl": _sb3,
    "minari": _minari,
    "torch fd": _torch,
    "torch padded": _torch,
    "torch fs": _torch,
    "ray": _ray,
    "ray tianshou": _ray_tianshou,
    "torchrl": _torchrl,
    "awkward": _awkward,
    "reverb": _reverb,
    "transfer queue": _transfer_queue,
    "numpy": _numpy,
    "pipe": _numpy,
    "python": _numpy,
    BARE: _numpy,
}


@cache
def library(name: str) -> SimpleNamespace | None:
    """Import a contestant; if it is not installed, print a message once and return None.

    Raises
    ------
    ImportError
        If our library cannot be imported.
    """
    try:
        return _MAKERS[name]()
    except ImportError as error:
        if name == OURS:
            raise
        print(f"{name} is left out ({error}); install it with: pip install 'samplebatch[bench]'", file=sys.stderr)
        return None
