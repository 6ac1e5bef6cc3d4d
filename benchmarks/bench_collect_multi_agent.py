"""`collect.multi.*`: collection from PettingZoo environments, in microseconds for 200 environment steps.

All contestants step the same environments with three agents each and one policy for all agents. `bare` calls the
policy, steps the environments and stores nothing: the difference from `bare` is the cost of collecting. In `random`
rows, each contestant draws random actions with its own generator.
"""

from __future__ import annotations

import logging
import warnings
from collections.abc import Callable
from functools import partial
from time import perf_counter
from typing import Any

import numpy as np

from benchmarks.harness import Row, Way, row

STEPS = 200
"""Environment steps per call; times of calls with more steps are scaled to this number."""

AGENTS = ("agent_0", "agent_1", "agent_2")


def policy(obs: Any) -> Any:
    """Choose actions from the position of the first landmark."""
    return np.where(obs[:, 4] > 0, 2, 1)


def spread(_: Any = None) -> Any:
    """Create one environment."""
    from mpe2 import simple_spread_v3

    return simple_spread_v3.parallel_env(continuous_actions=False)


def bare(lib: Any, data: tuple[int, bool]) -> Callable[[], float]:
    """Call the policy, step the environments and store nothing."""
    num_envs, at_random = data
    environments = [spread() for _ in range(num_envs)]
    observations = [environment.reset(seed=0)[0] for environment in environments]
    generator = np.random.default_rng(0)

    def choose_actions(count: int) -> Any:
        if at_random:
            return generator.integers(5, size=count)
        return policy(np.stack([obs for env_obs in observations for obs in env_obs.values()]))

    def step_on() -> float:
        start = perf_counter()
        for _ in range(STEPS // num_envs):
            actions = list(choose_actions(num_envs * len(AGENTS)))
            for i, environment in enumerate(environments):
                env_actions = actions[i * len(AGENTS) : (i + 1) * len(AGENTS)]
                observations[i] = environment.step(dict(zip(AGENTS, env_actions, strict=True)))[0]
                if not environment.agents:
                    observations[i] = environment.reset()[0]
        return perf_counter() - start

    return step_on


def ours(lib: Any, data: tuple[int, bool]) -> Callable[[], float]:
    """Collect with our collector."""
    from samplebatch import MultiAgentCollector

    num_envs, at_random = data
    collector = MultiAgentCollector("random" if at_random else {"agent": policy}, spread, num_envs=num_envs, seed=0)

    def collect() -> float:
        start = perf_counter()
        collector.collect(n_step=STEPS)
        return perf_counter() - start

    return collect


def rllib(lib: Any, data: tuple[int, bool]) -> Callable[[], float]:
    """Collect with RLlib's environment runner."""
    num_envs, at_random = data
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        import torch
        from ray.rllib.algorithms.ppo import PPOConfig
        from ray.rllib.core.rl_module import MultiRLModuleSpec, RLModuleSpec
        from ray.rllib.core.rl_module.torch import TorchRLModule
        from ray.rllib.env.multi_agent_env_runner import MultiAgentEnvRunner
        from ray.rllib.env.wrappers.pettingzoo_env import ParallelPettingZooEnv
        from ray.tune.registry import register_env

        class Fixed(TorchRLModule):  # type: ignore[misc]
            def _forward(self, batch: Any, **_: Any) -> Any:
                return {"actions": torch.from_numpy(policy(batch["obs"].numpy()))}

        logging.getLogger("ray").setLevel(logging.ERROR)
        register_env("spread", lambda _: ParallelPettingZooEnv(spread()))
        config = (
            PPOConfig()
            .environment("spread")
            .env_runners(num_envs_per_env_runner=num_envs, num_env_runners=0)
            .multi_agent(policies={"agent"}, policy_mapping_fn=lambda *_, **__: "agent")
            .rl_module(rl_module_spec=MultiRLModuleSpec(rl_module_specs={"agent": RLModuleSpec(module_class=Fixed)}))
        )
        runner = MultiAgentEnvRunner(config=config)

    def sample() -> float:
        start = perf_counter()
        episodes = runner.sample(num_timesteps=STEPS, random_actions=at_random)
        return (perf_counter() - start) * STEPS / sum(episode.env_steps() for episode in episodes)

    return sample


def rows_of(num_envs: int, bar: float) -> list[Row]:
    """Declare the rows for `num_envs` environments."""
    ways = {name: Way(setup, clocked=True) for name, setup in (("ours", ours), ("rllib", rllib), ("bare", bare))}
    return [
        row(
            f"collect.multi.spread{num_envs}.{mode}",
            partial(tuple[int, bool], (num_envs, mode == "random")),
            view=None,
            bar=bar,
            **ways,
        )
        for mode in ("policy", "random")
    ]


ROWS = [*rows_of(1, 1.15), *rows_of(8, 1.10)]
