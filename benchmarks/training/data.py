"""Data of the offline tasks of the learning benchmark, collected by our collector.

A run of the benchmark writes the data once; all contestants and seeds use the same data.
"""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import torch

from benchmarks.training import ours
from benchmarks.training.tasks import TASKS, Curve
from samplebatch import VectorReplayBuffer
from samplebatch.rollout import Collector


def balance(obs: Any) -> Any:
    """Return one CartPole action per row of observations, by a rule that balances the pole."""
    return (obs[:, 2] + 0.3 * obs[:, 3] > 0).astype(np.int64)


def write_balanced(path: Path) -> None:
    """Write 50 CartPole episodes, collected by a rule that balances the pole, with 10 % random actions."""
    make = TASKS["bc"].make
    rng, space = np.random.default_rng(0), make().action_space
    space.seed(0)

    def act(obs: Any) -> Any:
        actions = balance(np.asarray(obs))
        for row in np.flatnonzero(rng.random(len(actions)) < 0.1):
            actions[row] = space.sample()
        return actions

    with Collector(act, [make] * 10, seed=0, infos=False) as collector:
        rows: Any = collector.collect(n_episode=50).batch
    rows.save(path)


def write_replay(path: Path, steps: int = 10_000) -> None:
    """Write all steps of a SAC run on Pendulum: first random steps, finally steps of a policy that solves the task.

    Replays of such runs are the "medium-replay" data of D4RL (Fu et al., arXiv:2004.07219).
    """
    torch.set_num_threads(1)
    torch.manual_seed(0)
    task = replace(TASKS["sac"], steps=steps)
    buffer = VectorReplayBuffer(task.steps, task.envs, random_seed=0)
    ours.sac(task, Curve(), 0, buffer)()
    buffer.to_sample_batch().save(path)


WRITERS = {"bc": write_balanced, "cql": write_replay, "iql": write_replay}
"""Functions that write the data of offline tasks, by task name."""
