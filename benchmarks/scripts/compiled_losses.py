"""Times of updates with and without `torch.compile`, for the losses of PPO, DQN and SAC.

    python -m benchmarks.scripts compiled_losses --tasks ppo dqn sac

`ppo` and `sac` run updates of `samplebatch.learn`. `dqn` runs the loss of double DQN in plain torch, because `DQN` has
no option `compile`. All runs use one thread and fused Adam. The two variants alternate. The table contains the minimum
over several rounds.
"""

from __future__ import annotations

import argparse
import copy
import time
from collections.abc import Callable
from typing import Any

import torch
from torch import nn
from torch.nn import functional

ROUNDS = 5
ROUND_S = 2.0
"""Seconds per round and variant."""
Step = Callable[[], object]
Loss = Callable[..., torch.Tensor]


def network(inputs: int, outputs: int, *widths: int) -> nn.Sequential:
    """Create a perceptron with rectified hidden layers."""
    sizes = [inputs, *widths]
    layers = [layer for pair in zip(sizes, widths, strict=False) for layer in (nn.Linear(*pair), nn.ReLU())]
    return nn.Sequential(*layers, nn.Linear(sizes[-1], outputs))


def adam(*modules: nn.Module) -> torch.optim.Adam:
    """Create a fused optimizer of several modules."""
    return torch.optim.Adam([parameter for module in modules for parameter in module.parameters()], fused=True)


def descend(optimizer: torch.optim.Adam, loss: torch.Tensor) -> None:
    """Perform a gradient step."""
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()


def ppo(width: int, *, is_compiled: bool) -> Step:
    """Return an update of `PPO` with 2,048 rows in 32 minibatches, for two layers of `width` units."""
    from gymnasium import spaces

    from samplebatch import Collector, VectorReplayBuffer
    from samplebatch.learn import PPO, AdamOptimizerFactory, DiscreteActor, DiscreteActorPolicy, Net, ValueCritic

    observations, actions = spaces.Box(-5, 5, (4,)), spaces.Discrete(2)
    actor, values = (Net.for_space(observations, [width, width]) for _ in range(2))
    policy = DiscreteActorPolicy(actor=DiscreteActor.for_space(actor, actions), action_space=actions)
    algorithm = PPO(policy=policy, critic=ValueCritic(values), optim=AdamOptimizerFactory(), compile=is_compiled)
    buffer = VectorReplayBuffer(2048, 8)
    with Collector(policy, "CartPole-v1", buffer, num_envs=8, seed=0) as collector:
        collector.collect(n_step=2048)
    return lambda: algorithm.update(buffer=buffer, batch_size=64, repeat=1)


def dqn(width: int, *, is_compiled: bool) -> Step:
    """Return a gradient step of double DQN with 128 rows, for two layers of `width` units."""
    values = network(4, 2, width, width)
    target, optimizer = copy.deepcopy(values), adam(values)
    rows = [torch.randn(128, 4), torch.randint(0, 2, (128, 1)), torch.randn(128), torch.randn(128, 4)]

    def loss(obs: Any, act: Any, rew: Any, obs_next: Any) -> torch.Tensor:
        with torch.no_grad():
            best = values(obs_next).argmax(-1, keepdim=True)
            returns = rew + 0.99 * target(obs_next).gather(1, best)[:, 0]
        return functional.mse_loss(values(obs).gather(1, act)[:, 0], returns)

    compute: Loss = torch.compile(loss) if is_compiled else loss
    return lambda: descend(optimizer, compute(*rows))


def sac(width: int, *, is_compiled: bool) -> Step:
    """Return an update of `SAC` with 256 sampled rows, for two layers of `width` units."""
    import numpy as np
    from gymnasium import spaces

    from samplebatch import Batch, ReplayBuffer
    from samplebatch.learn import (
        SAC,
        AdamOptimizerFactory,
        AutoAlpha,
        ContinuousActorProbabilistic,
        ContinuousCritic,
        Net,
        SACPolicy,
    )

    observations, actions = spaces.Box(-5, 5, (17,)), spaces.Box(-1, 1, (6,))
    body = Net.for_space(observations, [width, width])
    actor = ContinuousActorProbabilistic.for_space(body, actions, conditioned_sigma=True)
    algorithm = SAC(
        policy=SACPolicy(actor=actor, action_space=actions),
        policy_optim=AdamOptimizerFactory(),
        critic=ContinuousCritic.for_space(observations, actions, [width, width]),
        critic_optim=AdamOptimizerFactory(),
        alpha=AutoAlpha(-6.0, 0.0, AdamOptimizerFactory()),
        compile=is_compiled,
    )
    rng, rows = np.random.default_rng(0), 10_000
    obs, act, flags = rng.normal(size=(rows, 17)).astype("f4"), rng.random((rows, 6), "f4"), np.zeros(rows, bool)
    buffer = ReplayBuffer(rows)
    buffer.extend(Batch(obs=obs, act=act, rew=obs[:, 0], obs_next=obs, terminated=flags, truncated=flags))
    return lambda: algorithm.update(buffer, 256)


TASKS: dict[str, tuple[Callable[..., Step], tuple[int, ...]]] = {
    "ppo": (ppo, (64, 256)),
    "dqn": (dqn, (64, 256)),
    "sac": (sac, (64, 256)),
}
"""Functions of the tasks, and the widths of their networks."""


def mean_time(step: Step, seconds: float) -> float:
    """Repeat a step for some seconds; return the mean processor time of a step."""
    steps, start, end = 0, time.process_time(), time.perf_counter() + seconds
    while not steps or time.perf_counter() < end:
        step()
        steps += 1
    return (time.process_time() - start) / steps


def main(arguments: list[str] | None = None) -> int:
    """Measure the tasks, and print a table."""
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.scripts compiled_losses",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--tasks", nargs="+", default=list(TASKS), choices=list(TASKS), help="all by default")
    options = parser.parse_args(arguments)
    torch.set_num_threads(1)
    print(f"{'task':6}{'width':>6}{'plain ms':>10}{'compiled ms':>13}{'ratio':>7}{'warm-up s':>11}")
    for name in options.tasks:
        make, widths = TASKS[name]
        for width in widths:
            torch.manual_seed(0)
            plain, compiled = (make(width, is_compiled=is_compiled) for is_compiled in (False, True))
            start = time.perf_counter()
            for _ in range(3):
                compiled()
            warm_up_s = time.perf_counter() - start
            rounds = [[mean_time(step, ROUND_S) for step in (plain, compiled)] for _ in range(ROUNDS)]
            shortest = [1000 * min(times) for times in zip(*rounds, strict=True)]
            ratio = shortest[1] / shortest[0]
            print(f"{name:6}{width:6}{shortest[0]:10.2f}{shortest[1]:13.2f}{ratio:7.2f}{warm_up_s:11.1f}", flush=True)
    return 0
