"""`collect.*`: collection from vectorized CartPole, in microseconds for 256 steps of all environments.

All contestants step the same environments. `bare` steps Gymnasium's vector environment with the same policy and stores
nothing: the difference from `bare` is the cost of collecting. In `list` rows, our collector receives the environments
as a list. In `derived` rows, the vector environment overrides `step`, so that our collector cannot step the
environments individually. RLlib's runner acts at random, which is its cheapest mode.

In `calls` rows, each `collect` call adds 1 or 128 steps of all environments to a buffer. Calls with one
step have the pattern of a DQN loop. In `calls` rows, `bare` writes every column of its steps into a preallocated array.
In `agent` rows, a torch module returns actions, log-probabilities and values, and each call creates the batch of a PPO
update. In `agent` rows, `bare` calls the same module and writes the same columns into arrays.
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

STEPS = 256
"""Joint steps of all environments per call; times of calls with more or fewer steps are scaled to this number."""
EPISODES = 256


def policy(obs: Any) -> Any:
    """Push the cart in the direction in which the pole leans."""
    return (obs[:, 2] > 0).astype(np.int64)


class StepCounter:
    """Counter of joint steps of all environments."""

    count = 0


def counted_environments(num_envs: int, *, count_resets: bool) -> tuple[list[Any], StepCounter]:
    """Create single environments; the first environment counts its steps and, optionally, resets after an episode."""
    import gymnasium

    counter = StepCounter()

    class First(gymnasium.Wrapper):  # type: ignore[misc,type-arg]
        is_done = False

        def step(self, action: Any) -> Any:
            counter.count += 1
            step = super().step(action)
            self.is_done = step[2] or step[3]
            return step

        def reset(self, **keywords: Any) -> Any:
            counter.count += count_resets and self.is_done
            self.is_done = False
            return super().reset(**keywords)

    return [First(cartpole()), *(cartpole() for _ in range(num_envs - 1))], counter


def derived(num_envs: int) -> tuple[Any, StepCounter]:
    """Create a vector environment of a derived class, whose environments cannot be stepped individually."""
    import gymnasium

    counter = StepCounter()

    class Derived(gymnasium.vector.SyncVectorEnv):  # type: ignore[misc]
        def step(self, actions: Any) -> Any:
            counter.count += 1
            return super().step(actions)

    return Derived([cartpole] * num_envs), counter


def make_environments(num_envs: int, mode: str) -> tuple[Any, StepCounter]:
    """Create a vector environment or a list of environments, and a counter of joint steps."""
    import gymnasium

    if mode == "Derived":
        return derived(num_envs)
    environments, counter = counted_environments(num_envs, count_resets=mode == "NextStep")
    if mode == "List":
        return environments, counter
    autoreset = gymnasium.vector.AutoresetMode(mode)
    return gymnasium.vector.SyncVectorEnv(
        [partial(_identity, env) for env in environments], autoreset_mode=autoreset
    ), counter


def _identity(env: Any) -> Any:
    return env


def cartpole() -> Any:
    """Create one environment."""
    import gymnasium

    return gymnasium.make("CartPole-v1")


def bare(lib: Any, data: tuple[int, str]) -> Callable[[], float]:
    """Step the environments and store nothing."""
    num_envs, mode = data
    env, _ = make_environments(num_envs, "SameStep" if mode == "List" else mode)
    obs, _ = env.reset(seed=0)

    def step_on() -> float:
        nonlocal obs
        start = perf_counter()
        for _ in range(STEPS):
            obs, *_ = env.step(policy(obs))
        return perf_counter() - start

    return step_on


def vector_env(num_envs: int) -> Any:
    """Create Gymnasium's vector environment with same-step autoreset."""
    import gymnasium

    return gymnasium.vector.SyncVectorEnv(
        [cartpole] * num_envs, autoreset_mode=gymnasium.vector.AutoresetMode.SAME_STEP
    )


def bare_stored(lib: Any, num_envs: int) -> Callable[[], float]:
    """Step the environments and write every column into preallocated arrays."""
    env, slots = vector_env(num_envs), 1000
    obs, _ = env.reset(seed=0)
    stored_obs, next_obs = np.zeros((2, slots, *obs.shape), obs.dtype)
    actions, rewards = np.zeros((slots, num_envs), np.int64), np.zeros((slots, num_envs))
    flags = np.zeros((3, slots, num_envs), np.bool_)
    slot = 0

    def step_on() -> float:
        nonlocal obs, slot
        start = perf_counter()
        for _ in range(STEPS):
            act = policy(obs)
            stored_obs[slot], actions[slot] = obs, act
            obs, rewards[slot], terminateds, truncateds, _ = env.step(act)
            next_obs[slot] = obs
            flags[0, slot], flags[1, slot], flags[2, slot] = terminateds, truncateds, terminateds | truncateds
            slot = (slot + 1) % slots
        return perf_counter() - start

    return step_on


def ours(lib: Any, data: tuple[int, str], *, buffer: bool = False, episodes: int | None = None) -> Callable[[], float]:
    """Collect with our collector."""
    from samplebatch import Collector, VectorReplayBuffer

    num_envs, _ = data
    env, counter = make_environments(*data)
    collector = Collector(policy, env, VectorReplayBuffer(20_000, num_envs) if buffer else None, seed=0)
    amount = {"n_episode": episodes} if episodes else {"n_step": STEPS * num_envs}

    def collect() -> float:
        before = counter.count
        start = perf_counter()
        collector.collect(**amount)
        return (perf_counter() - start) * STEPS / (counter.count - before)

    return collect


def ours_in_calls(lib: Any, num_envs: int, *, calls: int) -> Callable[[], float]:
    """Collect with our collector into a buffer, in several calls."""
    from samplebatch import Collector, ReplayBuffer, VectorReplayBuffer

    buffer = ReplayBuffer(20_000) if num_envs == 1 else VectorReplayBuffer(20_000, num_envs)
    collector = Collector(policy, vector_env(num_envs), buffer, seed=0)
    n_step = STEPS // calls * num_envs

    def collect() -> float:
        start = perf_counter()
        for _ in range(calls):
            collector.collect(n_step=n_step)
        return perf_counter() - start

    return collect


def agent_of_torch(num_envs: int, steps: int) -> tuple[Any, Any]:
    """Limit torch to one thread, and create an actor-critic and its environments."""
    import torch

    from benchmarks.loops import Agent

    torch.set_num_threads(1)
    torch.manual_seed(0)
    return Agent(), vector_env(num_envs)


def ours_with_agent(lib: Any, data: tuple[int, int]) -> Callable[[], float]:
    """Collect batches with an actor-critic policy."""
    from samplebatch import Collector

    agent, env = agent_of_torch(*data)
    collector = Collector(agent, env, seed=0)

    def collect() -> float:
        start = perf_counter()
        collector.collect(n_step=data[0] * data[1])
        return perf_counter() - start

    return collect


def bare_with_agent(lib: Any, data: tuple[int, int]) -> Callable[[], float]:
    """Step the environments with an actor-critic and write every column into preallocated arrays."""
    import torch

    agent, env = agent_of_torch(*data)
    num_envs, steps = data
    last_obs, _ = env.reset(seed=0)
    obs, new_obs = np.zeros((2, steps, *last_obs.shape), last_obs.dtype)
    actions, rewards = np.zeros((steps, num_envs), np.int64), np.zeros((steps, num_envs))
    logp, values = np.zeros((2, steps, num_envs), np.float32)
    terminateds, truncateds = np.zeros((2, steps, num_envs), np.bool_)

    def step_on() -> float:
        nonlocal last_obs
        start = perf_counter()
        for t in range(steps):
            obs[t] = last_obs
            with torch.no_grad():
                outputs = agent.act(torch.from_numpy(last_obs))
            actions[t], logp[t], values[t] = (column.numpy() for column in outputs)
            last_obs, rewards[t], terminateds[t], truncateds[t], infos = env.step(actions[t])
            new_obs[t] = last_obs
            for env_id in (terminateds[t] | truncateds[t]).nonzero()[0]:
                new_obs[t, env_id] = infos["final_obs"][env_id]
        return perf_counter() - start

    return step_on


def row_of_agent(num_envs: int, steps: int, bar: float) -> Row:
    """Declare the row for the collection of batches with an actor-critic policy."""
    return row(
        f"collect.agent.{num_envs}x{steps}",
        partial(tuple[int, int], (num_envs, steps)),
        ours=clocked(ours_with_agent),
        bare=clocked(bare_with_agent),
        view=None,
        bar=bar,
    )


def tianshou(lib: Any, data: tuple[int, str], *, episodes: int | None = None, calls: int = 1) -> Callable[[], float]:
    """Collect with Tianshou's collector, vector environment and buffer."""
    from tianshou.algorithm.algorithm_base import Policy
    from tianshou.data import Batch, Collector
    from tianshou.env import DummyVectorEnv

    class Push(Policy):  # type: ignore[misc]
        def forward(self, batch: Any, state: Any = None, **_: Any) -> Any:
            return Batch(act=policy(batch.obs))

    num_envs, _ = data
    spaces = cartpole()
    push = Push(action_space=spaces.action_space, observation_space=spaces.observation_space)
    collector = Collector(push, DummyVectorEnv([cartpole] * num_envs), lib.VectorReplayBuffer(20_000, num_envs))
    collector.reset()
    amount = {"n_episode": episodes} if episodes else {"n_step": STEPS // calls * num_envs}

    def collect() -> float:
        start = perf_counter()
        steps = sum([collector.collect(**amount).n_collected_steps for _ in range(calls)])
        return (perf_counter() - start) * STEPS * num_envs / steps

    return collect


def rllib(lib: Any, data: tuple[int, str]) -> Callable[[], float]:
    """Collect with RLlib's environment runner."""
    num_envs, _ = data
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        from ray.rllib.algorithms.ppo import PPOConfig
        from ray.rllib.env.single_agent_env_runner import SingleAgentEnvRunner

        logging.getLogger("ray").setLevel(logging.ERROR)
        config = PPOConfig().environment("CartPole-v1").env_runners(num_envs_per_env_runner=num_envs)
        runner = SingleAgentEnvRunner(config=config)

    def sample() -> float:
        start = perf_counter()
        episodes = runner.sample(num_timesteps=STEPS * num_envs, random_actions=True)
        return (perf_counter() - start) * STEPS * num_envs / sum(map(len, episodes))

    return sample


def clocked(setup: Callable[..., Any], **keywords: Any) -> Way:
    """Declare an implementation that times itself, because the number of steps varies between calls."""
    return Way(partial(setup, **keywords), clocked=True)


_INFIXES = {"NextStep": "", "SameStep": ".same_step", "List": ".list", "Derived": ".derived"}


def rows_of(num_envs: int, bar: float, *modes: str) -> list[Row]:
    """Declare the rows for `num_envs` environments."""
    rows = []
    for mode in modes:
        name = f"collect.cartpole{num_envs}" + _INFIXES[mode]
        data = partial(tuple[int, str], (num_envs, mode))
        peers = {"tianshou": clocked(tianshou)}
        rows += [
            row(f"{name}.steps", data, ours=clocked(ours), rllib=clocked(rllib), **peers, bare=clocked(bare),
                view=None, bar=bar),
            row(f"{name}.buffer", data, ours=clocked(ours, buffer=True), **peers, bare=clocked(bare), view=None,
                bar=bar),
            row(f"{name}.episodes", data, ours=clocked(ours, episodes=EPISODES),
                tianshou=clocked(tianshou, episodes=EPISODES), bare=clocked(bare), view=None, bar=bar),
        ]  # fmt: skip
    return rows


def tianshou_in_calls(lib: Any, num_envs: int, *, calls: int) -> Callable[[], float]:
    """Collect with Tianshou's collector in several calls."""
    return tianshou(lib, (num_envs, "SameStep"), calls=calls)


def row_of_calls(num_envs: int, calls: int, bar: float) -> Row:
    """Declare the row for collection into a buffer in several calls."""
    return row(
        f"collect.calls.{num_envs}x{STEPS // calls}",
        lambda: num_envs,
        ours=clocked(ours_in_calls, calls=calls),
        tianshou=clocked(tianshou_in_calls, calls=calls),
        bare=clocked(bare_stored),
        view=None,
        bar=bar,
    )


CALLS = [row_of_calls(1, STEPS, 1.8), row_of_calls(8, STEPS, 1.4), row_of_calls(16, 2, 1.1)]
AGENTS = [row_of_agent(8, 128, 1.1), row_of_agent(16, 128, 1.1), row_of_agent(4, 50, 1.2)]

ROWS = [*rows_of(16, 1.10, "NextStep", "SameStep", "List", "Derived"), *rows_of(1, 2.5, "SameStep"), *CALLS, *AGENTS]
