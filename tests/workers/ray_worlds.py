"""A cluster of raylets on this machine, and environments and policies that its actors import."""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any
from unittest import mock

import gymnasium
import gyms
import numpy as np

ROOT = Path(__file__).parents[2]
PATHS = os.pathsep.join([str(ROOT), str(ROOT / "tests" / "rollout")])
ENVIRONMENT = {"env_vars": {"PYTHONPATH": PATHS}}
"""Lets the processes of Ray import this working tree."""
_STORE = {"object_store_memory": 100 << 20}
NODE = {"num_cpus": 4, **_STORE}
"""A node with room for some actors."""


@contextmanager
def started_cluster(*nodes: dict[str, Any]) -> Iterator[tuple[Any, list[Any]]]:
    """Start a head node without room for actors and some others, and connect this process; yield it and the others."""
    import ray
    from ray._private import services
    from ray.cluster_utils import Cluster

    # A node is taken for dead after five seconds, in place of fifteen.
    quick = {"health_check_initial_delay_ms": 2000, "health_check_period_ms": 1000, "health_check_failure_threshold": 5}
    # Ray gives a node 30 seconds to register, which is too short beside other tests on a slow machine.
    patient = mock.patch.object(services, "get_node", partial(_get_node_patiently, services.get_node))
    with patient:
        cluster = Cluster(
            initialize_head=True,
            head_node_args={"num_cpus": 0, "include_dashboard": False, "_system_config": quick, **_STORE},
        )
    try:
        with patient:
            added = [cluster.add_node(**{**NODE, **node}) for node in nodes]
        ray.init(address=cluster.address, log_to_driver=False, logging_level="ERROR", runtime_env=ENVIRONMENT)
        yield cluster, added
    finally:
        ray.shutdown()
        cluster.shutdown()


def _get_node_patiently(get_node: Callable[..., Any], *arguments: Any) -> Any:
    deadline = time.monotonic() + 180
    while True:
        try:
            return get_node(*arguments)
        except RuntimeError:
            if time.monotonic() > deadline:
                raise
            time.sleep(0.5)


class SlowLadder(gyms.Ladder):
    """A slow ladder."""

    def __init__(self, pause_s: float = 0.001) -> None:
        super().__init__(0, 7)
        self._pause_s = pause_s

    def step(self, action: Any) -> Any:
        time.sleep(self._pause_s)
        return super().step(action)


class Breaking(gyms.Ladder):
    """A ladder that raises in its thirtieth step."""

    def __init__(self) -> None:
        super().__init__(0, 7)

    def step(self, action: Any) -> Any:
        if len(self.made) == 29:
            raise RuntimeError("the rung broke")
        return super().step(action)


class Hanging(gyms.Ladder):
    """A ladder that hangs in its thirtieth step."""

    def __init__(self) -> None:
        super().__init__(0, 7)

    def step(self, action: Any) -> Any:
        while len(self.made) == 29:
            time.sleep(1)
        return super().step(action)


class Closing(SlowLadder):
    """A ladder that makes a file when it is closed."""

    def __init__(self, folder: str, pause_s: float = 0.0) -> None:
        super().__init__(pause_s)
        self._folder = folder

    def close(self) -> None:
        Path(self._folder, str(os.getpid())).touch()


class Pictures(gymnasium.Env):
    """Episodes of ten pictures, each of one brightness, which counts on."""

    observation_space = gymnasium.spaces.Box(0, 255, (84, 84, 4), np.uint8)
    action_space = gymnasium.spaces.Discrete(2)

    def __init__(self) -> None:
        self._num_frames = 0

    def _observe(self) -> Any:
        self._num_frames += 1
        return np.full((84, 84, 4), self._num_frames % 256, np.uint8)

    def reset(self, *, seed: int | None = None, options: Any = None) -> Any:
        super().reset(seed=seed)
        return self._observe(), {}

    def step(self, action: Any) -> Any:
        return self._observe(), 1.0, self._num_frames % 10 == 0, False, {}


def climb_here(obs: Any) -> dict[str, Any]:
    """Act, and record the process id."""
    return {"act": np.zeros(len(obs), np.int64), "policy": {"pid": np.full(len(obs), os.getpid())}}


def tell_node(obs: Any) -> dict[str, Any]:
    """Act, and say on which node, by the first digits of its id."""
    import ray

    node = int(ray.get_runtime_context().get_node_id()[:8], 16)
    return {"act": np.zeros(len(obs), np.int64), "policy": {"node": np.full(len(obs), node)}}


def node_number(node: Any) -> int:
    """Return the number that `tell_node` says on a node of a cluster."""
    return int(node.node_id[:8], 16)


def draw(obs: Any) -> Any:
    """Act by the process's own generator, as distributions of torch do."""
    return np.random.randint(0, 2, len(obs))
