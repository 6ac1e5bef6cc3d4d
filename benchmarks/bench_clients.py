"""Entire training loops: Tianshou's own DQN, PPO and SAC over its batches and buffers and over ours.

Environments, networks, optimizers, collectors and algorithms are Tianshou's for both, unmodified, and most of the time
is theirs; what differs is the memory in between. A call collects some steps and updates the networks, in turns. torch
computes in one thread: for networks this small, a second one costs more than it brings. Processor time is measured: all
of a loop is computing.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from time import process_time
from typing import Any

from benchmarks.harness import Row, Way, row
from benchmarks.training.tianshou_classes import OURS, THEIRS, classes_of

HIDDEN = (64, 64)
ENVIRONMENTS = 10

Loop = Callable[[], None]


def dqn(data: Any) -> Loop:
    """Ten times ten steps of CartPole, and an update of 64 rows of 3 steps."""
    from tianshou.algorithm.modelfree.dqn import DQN

    from benchmarks.training.tianshou_setup import discrete, network, optimizer, q_policy

    envs = discrete(ENVIRONMENTS)
    policy = q_policy(envs, network(envs, HIDDEN))
    algorithm = DQN(policy=policy, optim=optimizer(), n_step_return_horizon=3, target_update_freq=320)
    return off_policy(data, algorithm, envs, sample=64)


def sac(data: Any) -> Loop:
    """Ten times ten steps of Pendulum, and an update of 256 rows."""
    from tianshou.algorithm.modelfree.sac import SAC

    from benchmarks.training.tianshou_setup import continuous, optimizer, pair_values, soft_policy

    envs = continuous(ENVIRONMENTS)
    algorithm = SAC(
        policy=soft_policy(envs, HIDDEN),
        policy_optim=optimizer(),
        critic=pair_values(envs, HIDDEN),
        critic_optim=optimizer(),
    )
    return off_policy(data, algorithm, envs, sample=256)


def ppo(data: Any) -> Loop:
    """Collect 640 steps of CartPole, and go over them twice in batches of 64."""
    from tianshou.algorithm.modelfree.ppo import PPO
    from tianshou.data import Collector

    from benchmarks.training.tianshou_setup import discrete, discrete_actor, optimizer, state_values, training

    envs = discrete(ENVIRONMENTS)
    algorithm = PPO(policy=discrete_actor(envs, HIDDEN), critic=state_values(envs, HIDDEN), optim=optimizer())
    buffer = data.VectorReplayBuffer(1000, ENVIRONMENTS)
    collector = Collector(algorithm, envs, buffer)
    collector.reset()

    def loop() -> None:
        with training(algorithm):
            collector.collect(n_step=640)
            algorithm.update(buffer=buffer, batch_size=64, repeat=2)
            collector.reset_buffer(keep_statistics=True)

    return loop


def off_policy(data: Any, algorithm: Any, envs: Any, *, sample: int) -> Loop:
    """Fill a buffer with random steps; then collect and update in turns."""
    from tianshou.data import Collector

    from benchmarks.training.tianshou_setup import training

    buffer = data.VectorReplayBuffer(20_000, ENVIRONMENTS)
    collector = Collector(algorithm, envs, buffer, exploration_noise=True)
    collector.reset()
    collector.collect(n_step=1000, random=True)

    def loop() -> None:
        with training(algorithm):
            for _ in range(10):
                collector.collect(n_step=ENVIRONMENTS)
                algorithm.update(buffer=buffer, sample_size=sample)

    return loop


def seeded(lib: Any, make: Callable[[Any], Loop], *, classes: str) -> Callable[[], float]:
    """Make a loop over the classes of a library, which measures itself while Tianshou's modules use them."""
    import numpy as np
    import torch

    np.random.seed(0)
    torch.manual_seed(0)
    with classes_of(classes) as data:
        loop = make(data)

    def timed() -> float:
        threads = torch.get_num_threads()
        torch.set_num_threads(1)
        try:
            with classes_of(classes):
                began = process_time()
                loop()
                return process_time() - began
        finally:
            torch.set_num_threads(threads)

    return timed


def row_of(make: Callable[[Any], Loop]) -> Row:
    """Declare the row of a loop."""
    ways = {
        who: Way(partial(seeded, classes=classes), clocked=True)
        for who, classes in (("ours", OURS), ("tianshou", THEIRS))
    }
    return row(f"clients.{make.__name__}", lambda: make, **ways, view=None)


ROWS = [row_of(dqn), row_of(ppo), row_of(sac)]
