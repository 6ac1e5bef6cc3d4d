"""WorkerSpec and requests: a rollout worker, its tasks, and how work is shared out."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from samplebatch.batch.multi_agent_builder import PolicyMapping
from samplebatch.env.registry import Environment
from samplebatch.rollout.buffers import RemoteBuffer


@dataclass(frozen=True)
class WorkerSpec:
    """The environments and the policy of one worker, pickled to its process.

    Attributes
    ----------
    index
        Which of the workers it is, counted from 0.
    envs
        The names or functions that make its environments.
    policy
        Makes the policy, or the policies by their ids.
    num_envs
        How many environments it steps, whose ids begin at `index * num_envs`.
    policy_mapping, exploration_noise, map_action, hooks, infos
        As given to `RolloutWorkers`.
    seed
        The seed of the run, or, where the worker takes the place of another, one derived from it.
    first_unroll_id
        The `unroll_id` of its first fragment.
    earlier_versions
        How many weights had been published when the run was resumed, beyond those that this run's memory counts.
    buffer
        Where the worker writes its steps itself; None to send them.
    """

    index: int
    envs: tuple[Environment, ...]
    policy: Callable[[], Any]
    num_envs: int
    policy_mapping: PolicyMapping | None
    exploration_noise: Any
    map_action: Any
    hooks: Sequence[Any]
    seed: np.random.SeedSequence
    infos: bool = True
    first_unroll_id: int = 0
    earlier_versions: int = 0
    buffer: RemoteBuffer | None = None

    @property
    def env_ids(self) -> range:
        """The `env_id` of each of its environments, as long as these are no vector environments of their own."""
        return range(self.index * self.num_envs, (self.index + 1) * self.num_envs)


@dataclass(frozen=True)
class Request:
    """An order to one worker, pickled to its process.

    Attributes
    ----------
    n_step, n_episode
        How much to collect; neither: as much as it can.
    fragment_length
        Environment steps in a fragment; None: all in one.
    """

    n_step: int | None = None
    n_episode: int | None = None
    fragment_length: int | None = None


@dataclass(frozen=True)
class StateRequest(Request):
    """An order to one worker to tell its state, or to go on from one, pickled to its process.

    Attributes
    ----------
    state
        The state to go on from; None to tell the own.
    earlier_versions
        As of `WorkerSpec`, with a state.
    """

    state: Mapping[str, Any] | None = None
    earlier_versions: int = 0


def shares(total: int | None, workers: int, envs: int) -> list[int | None]:
    """Share a number out to the environments, as many to each, give or take one, and return the share of each worker.

    The first environments get one more. So each environment gets the same in any worker.

    >>> shares(10, 2, 2), shares(10, 4, 1), shares(None, 2, 1)
    ([6, 4], [3, 3, 2, 2], [None, None])
    """
    if total is None:
        return [None] * workers
    least, more = divmod(total, workers * envs)
    return [least * envs + min(max(more - index * envs, 0), envs) for index in range(workers)]
