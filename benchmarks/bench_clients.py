"""`clients.*`: training loops of Tianshou's DQN, PPO and SAC, with Tianshou's or our batches and buffers.

Both contestants use Tianshou's unmodified environments, networks, optimizers, collectors and algorithms, which account
for most of the time. Only the batches and buffers differ. A call collects steps and updates the networks. torch uses
one thread, because a second thread would slow down networks this small. Times are processor times, because a loop never
waits.
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
    """Create a DQN loop: each call alternates ten times between ten CartPole steps and an update with 64 rows."""
    from tianshou.algorithm.modelfree.dqn import DQN

    from benchmarks.training.tianshou_setup import discrete, network, optimizer, q_policy

    envs = discrete(ENVIRONMENTS)
    policy = q_policy(envs, network(envs, HIDDEN))
    algorithm = DQN(policy=policy, optim=optimizer(), n_step_return_horizon=3, target_update_freq=320)
    return off_policy(data, algorithm, envs, sample=64)


def sac(data: Any) -> Loop:
    """Create a SAC loop: each call alternates ten times between ten Pendulum steps and an update with 256 rows."""
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
    """Create a PPO loop: each call collects 640 CartPole steps and updates for two epochs in minibatches of 64."""
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
    """Fill a buffer with random steps, and return a loop that alternates between collecting and updating."""
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
    """Create a loop that times itself while Tianshou's modules use the batch and buffer classes of a library."""
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
                start = process_time()
                loop()
                return process_time() - start
        finally:
            torch.set_num_threads(threads)

    return timed


def row_of(make: Callable[[Any], Loop]) -> Row:
    """Declare the row of a loop."""
    ways = {
        name: Way(partial(seeded, classes=classes), clocked=True)
        for name, classes in (("ours", OURS), ("tianshou", THEIRS))
    }
    return row(f"clients.{make.__name__}", lambda: make, **ways, view=None)


ROWS = [row_of(dqn), row_of(ppo), row_of(sac)]
