"""A plain PPO loop in the learning benchmark, with the algorithm of CleanRL's `ppo_continuous_action`.

Observations, rewards and actions are processed by Gymnasium's wrappers, and arrays hold the steps. Source of the
algorithm: https://docs.cleanrl.dev/rl-algorithms/ppo/ and Huang et al., "The 37 Implementation Details of Proximal
Policy Optimization" (2022).
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import gymnasium
import numpy as np
import torch
from torch import nn
from torch.distributions import Normal

from benchmarks.training.tasks import Act, Curve, Task

Run = Callable[[], Act]


def _layer(width: int, out: int, gain: float = 2**0.5) -> nn.Linear:
    layer = nn.Linear(width, out)
    nn.init.orthogonal_(layer.weight, gain)
    nn.init.zeros_(layer.bias)
    return layer


def _network(width: int, hidden: tuple[int, ...], out: int, head_gain: float) -> nn.Sequential:
    layers: list[nn.Module] = []
    for size in hidden:
        layers += [_layer(width, size), nn.Tanh()]
        width = size
    return nn.Sequential(*layers, _layer(width, out, head_gain))


class Agent(nn.Module):
    """Gaussian actor with a standard deviation per action, and a critic."""

    def __init__(self, width: int, actions: int, hidden: tuple[int, ...]) -> None:
        super().__init__()
        self.critic = _network(width, hidden, 1, 1.0)
        self.mean = _network(width, hidden, actions, 0.01)
        self.log_std = nn.Parameter(torch.zeros(1, actions))

    def distribution(self, obs: torch.Tensor) -> Normal:
        """Return the distribution of the actions."""
        mean = self.mean(obs)
        return Normal(mean, self.log_std.expand_as(mean).exp())


def _wrap(env: Any, gamma: float) -> tuple[Any, Any]:
    """Return the environment in its wrappers, and the wrapper with the statistics of observations."""
    env = gymnasium.wrappers.ClipAction(env)
    normalized = gymnasium.wrappers.NormalizeObservation(env)
    env = gymnasium.wrappers.TransformObservation(normalized, lambda obs: obs.clip(-10, 10), env.observation_space)
    env = gymnasium.wrappers.NormalizeReward(env, gamma=gamma)
    return gymnasium.wrappers.TransformReward(env, lambda reward: float(np.clip(reward, -10, 10))), normalized


def cheetah(task: Task, curve: Curve, seed: int) -> Run:
    env, normalized = _wrap(curve.watch(task.make)(), task.gamma)
    width, actions = env.observation_space.shape[0], env.action_space.shape[0]
    agent = Agent(width, actions, task.hidden)
    optimizer = torch.optim.Adam(agent.parameters(), lr=task.lr, eps=1e-5)
    n_steps = task.options["n_steps"]
    columns = {"obs": (width,), "act": (actions,), "logp": (), "rew": (), "done": (), "value": ()}
    steps = {name: torch.zeros(n_steps, *shape) for name, shape in columns.items()}

    def run() -> Act:
        obs, _ = env.reset(seed=seed)
        next_obs, next_done = torch.as_tensor(obs, dtype=torch.float32), 0.0
        updates = task.steps // n_steps
        for update in range(updates):
            optimizer.param_groups[0]["lr"] = task.lr * (1.0 - update / updates)
            next_obs, next_done = _collect(env, agent, steps, next_obs, next_done)
            advantages = _advantages(agent, steps, next_obs, next_done, task.gamma, task.options["lambda"])
            _update(agent, optimizer, steps, advantages, task.options)
        stats = normalized.obs_rms

        def act(obs: Any, state: Any) -> Any:
            rows = np.clip((obs - stats.mean) / np.sqrt(stats.var + normalized.epsilon), -10, 10)
            with torch.no_grad():
                action = agent.mean(torch.as_tensor(rows, dtype=torch.float32)[None])[0].numpy()
            return action.clip(env.action_space.low, env.action_space.high), None

        return act

    return run


def _collect(env: Any, agent: Agent, steps: Any, obs: torch.Tensor, done: float) -> tuple[torch.Tensor, float]:
    """Fill the arrays with steps; return the next observation and whether it starts an episode."""
    for step in range(len(steps["rew"])):
        with torch.no_grad():
            dist = agent.distribution(obs[None])
            action = dist.sample()
            steps["value"][step] = agent.critic(obs[None])[0, 0]
        steps["obs"][step], steps["done"][step], steps["act"][step] = obs, done, action[0]
        steps["logp"][step] = dist.log_prob(action).sum()
        next_obs, reward, terminated, truncated, _ = env.step(action[0].numpy())
        steps["rew"][step], done = reward, float(terminated or truncated)
        if done:
            next_obs, _ = env.reset()
        obs = torch.as_tensor(next_obs, dtype=torch.float32)
    return obs, done


@torch.no_grad()
def _advantages(
    agent: Agent, steps: Any, next_obs: torch.Tensor, next_done: float, gamma: float, decay: float
) -> torch.Tensor:
    """Return generalized advantage estimates; an episode that was cut off counts as terminated."""
    next_value = agent.critic(next_obs[None])[0, 0]
    advantages, last = torch.zeros_like(steps["rew"]), torch.zeros(())
    for step in reversed(range(len(advantages))):
        goes_on = 1.0 - next_done
        delta = steps["rew"][step] + gamma * next_value * goes_on - steps["value"][step]
        last = advantages[step] = delta + gamma * decay * goes_on * last
        next_value, next_done = steps["value"][step], float(steps["done"][step])
    return advantages


def _update(agent: Agent, optimizer: Any, steps: Any, advantages: torch.Tensor, options: Any) -> None:
    returns, clip = advantages + steps["value"], options["clip"]
    order = np.arange(len(returns))
    for _ in range(options["epochs"]):
        np.random.shuffle(order)
        for start in range(0, len(order), options["batch"]):
            rows = order[start : start + options["batch"]]
            dist = agent.distribution(steps["obs"][rows])
            ratio = (dist.log_prob(steps["act"][rows]).sum(1) - steps["logp"][rows]).exp()
            gain = advantages[rows]
            gain = (gain - gain.mean()) / (gain.std() + 1e-8)
            actor_loss = torch.max(-gain * ratio, -gain * ratio.clamp(1 - clip, 1 + clip)).mean()
            values, old = agent.critic(steps["obs"][rows])[:, 0], steps["value"][rows]
            clipped = old + (values - old).clamp(-clip, clip)
            errors = torch.max((values - returns[rows]).square(), (clipped - returns[rows]).square())
            loss = actor_loss - options["entropy"] * dist.entropy().sum(1).mean() + 0.5 * 0.5 * errors.mean()
            optimizer.zero_grad()
            loss.backward()
            nn.utils.clip_grad_norm_(agent.parameters(), options["norm"])
            optimizer.step()


RUNS = {"cheetah": cheetah}
