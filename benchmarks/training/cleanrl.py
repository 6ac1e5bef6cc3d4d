"""Plain loops in the learning benchmark, with CleanRL's algorithms `ppo_continuous_action`, `dqn` and `sac`.

PPO processes observations, rewards and actions with Gymnasium's wrappers, and stores steps in arrays. DQN and SAC
store steps in the replay buffer of Stable-Baselines3, as CleanRL does. Sources of the algorithms:
https://docs.cleanrl.dev/rl-algorithms/ppo/ (also `dqn`, `sac`) and Huang et al., "The 37 Implementation Details of
Proximal Policy Optimization" (2022).
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator
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
    """Gaussian actor with one standard deviation per action component, and a critic."""

    def __init__(self, width: int, actions: int, hidden: tuple[int, ...]) -> None:
        super().__init__()
        self.critic = _network(width, hidden, 1, 1.0)
        self.mean = _network(width, hidden, actions, 0.01)
        self.log_std = nn.Parameter(torch.zeros(1, actions))

    def distribution(self, obs: torch.Tensor) -> Normal:
        """Return the action distribution for observations."""
        mean = self.mean(obs)
        return Normal(mean, self.log_std.expand_as(mean).exp())


def _wrap(env: Any, gamma: float) -> tuple[Any, Any]:
    """Return the wrapped environment, and the wrapper that contains the observation statistics."""
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
    """Fill the arrays with steps; return the next observation and whether the observation starts an episode."""
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
    """Return generalized advantage estimates; a truncated episode counts as terminated."""
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


def _perceptron(width: int, hidden: tuple[int, ...], out: int) -> nn.Sequential:
    layers: list[nn.Module] = []
    for size in hidden:
        layers += [nn.Linear(width, size), nn.ReLU()]
        width = size
    return nn.Sequential(*layers, nn.Linear(width, out))


def _stored(task: Task, curve: Curve, seed: int, choose: Callable[[Any, int], Any]) -> Iterator[tuple[int, Any]]:
    """Step one environment into a buffer; yield the step number and the buffer when an update is due."""
    from stable_baselines3.common.buffers import ReplayBuffer

    options = task.options
    envs = gymnasium.vector.SyncVectorEnv(
        [curve.watch(task.make)], autoreset_mode=gymnasium.vector.AutoresetMode.SAME_STEP
    )
    buffer = ReplayBuffer(
        options["size"], envs.single_observation_space, envs.single_action_space, "cpu",
        handle_timeout_termination=False,
    )  # fmt: skip
    obs, _ = envs.reset(seed=seed)
    for step in range(1, task.steps + 1):
        actions = choose(obs, step)
        next_obs, rewards, terminations, truncations, infos = envs.step(actions)
        real_next_obs = next_obs.copy()
        for env in np.flatnonzero(terminations | truncations):
            real_next_obs[env] = infos["final_obs"][env]
        buffer.add(obs, real_next_obs, actions, rewards, terminations, [infos])
        obs = next_obs
        if step > options["start"] and step % options["every"] == 0:
            yield step, buffer
    envs.close()


def dqn(task: Task, curve: Curve, seed: int) -> Run:
    options = task.options
    with_spaces = task.make()
    width, actions = with_spaces.observation_space.shape[0], int(with_spaces.action_space.n)
    online = _perceptron(width, task.hidden, actions)
    target = copy.deepcopy(online)
    optimizer, rng = torch.optim.Adam(online.parameters(), lr=task.lr), np.random.default_rng(seed)

    def choose(obs: Any, step: int) -> Any:
        epsilon = max(options["epsilon"], 1.0 - (1.0 - options["epsilon"]) * step / (options["fraction"] * task.steps))
        if rng.random() < epsilon:
            return rng.integers(actions, size=len(obs))
        with torch.no_grad():
            return online(torch.from_numpy(obs)).argmax(1).numpy()

    def run() -> Act:
        synced = 0
        for step, buffer in _stored(task, curve, seed, choose):
            for _ in range(options["updates"]):
                rows = buffer.sample(options["batch"])
                with torch.no_grad():
                    best = target(rows.next_observations).amax(1)
                    target_values = rows.rewards.flatten() + task.gamma * best * (1 - rows.dones.flatten())
                values = online(rows.observations).gather(1, rows.actions).squeeze()
                loss = nn.functional.mse_loss(target_values, values)
                optimizer.zero_grad()
                loss.backward()
                optimizer.step()
            if step - synced >= options["target"]:
                target.load_state_dict(online.state_dict())
                synced = step

        def act(obs: Any, state: Any) -> Any:
            with torch.no_grad():
                return int(online(torch.as_tensor(obs, dtype=torch.float32)[None]).argmax(1)), None

        return act

    return run


class _Squashed(nn.Module):
    """Gaussian actor whose actions are squashed to the bounds of the action space."""

    def __init__(self, width: int, hidden: tuple[int, ...], space: Any) -> None:
        super().__init__()
        self.layers = _perceptron(width, hidden, 2 * space.shape[0])
        self.scale = torch.as_tensor((space.high - space.low) / 2)
        self.bias = torch.as_tensor((space.high + space.low) / 2)

    def forward(self, obs: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """Return drawn actions, their log-probabilities of shape (n, 1), and the most likely actions."""
        mean, log_std = self.layers(obs).chunk(2, 1)
        normal = Normal(mean, (-5.0 + 3.5 * (log_std.tanh() + 1.0)).exp())
        sampled = normal.rsample()
        squashed = sampled.tanh()
        logp = normal.log_prob(sampled) - (self.scale * (1 - squashed.square()) + 1e-6).log()
        return squashed * self.scale + self.bias, logp.sum(1, keepdim=True), mean.tanh() * self.scale + self.bias


def sac(task: Task, curve: Curve, seed: int) -> Run:
    options = task.options
    with_spaces = task.make()
    width, space = with_spaces.observation_space.shape[0], with_spaces.action_space
    actor = _Squashed(width, task.hidden, space)
    critics = nn.ModuleList([_perceptron(width + space.shape[0], task.hidden, 1) for _ in range(2)])
    targets = copy.deepcopy(critics)
    log_alpha = torch.zeros(1, requires_grad=True)
    optimizers = [
        torch.optim.Adam(parameters, lr=task.lr)
        for parameters in (critics.parameters(), actor.parameters(), [log_alpha])
    ]
    space.seed(seed)

    def choose(obs: Any, step: int) -> Any:
        if step <= options["start"]:
            return np.array([space.sample() for _ in obs])
        with torch.no_grad():
            return actor(torch.from_numpy(obs))[0].numpy()

    def descend(optimizer: Any, loss: Any) -> None:
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()

    def lower(networks: Any, obs: torch.Tensor, act: torch.Tensor) -> torch.Tensor:
        joined = torch.cat([obs, act], 1)
        return torch.min(*(network(joined) for network in networks))

    def update(rows: Any) -> None:
        alpha = log_alpha.exp().detach()
        with torch.no_grad():
            act, logp, _ = actor(rows.next_observations)
            next_inputs = lower(targets, rows.next_observations, act) - alpha * logp
            target_values = rows.rewards + (1 - rows.dones) * task.gamma * next_inputs
        joined = torch.cat([rows.observations, rows.actions], 1)
        descend(optimizers[0], sum(nn.functional.mse_loss(critic(joined), target_values) for critic in critics))
        act, logp, _ = actor(rows.observations)
        descend(optimizers[1], (alpha * logp - lower(critics, rows.observations, act)).mean())
        descend(optimizers[2], (-log_alpha.exp() * (logp.detach() - space.shape[0])).mean())
        for parameter, slow in zip(critics.parameters(), targets.parameters(), strict=True):
            slow.data.copy_(options["tau"] * parameter.data + (1 - options["tau"]) * slow.data)

    def run() -> Act:
        for _, buffer in _stored(task, curve, seed, choose):
            for _ in range(options["updates"]):
                update(buffer.sample(options["batch"]))

        def act(obs: Any, state: Any) -> Any:
            with torch.no_grad():
                return actor(torch.as_tensor(obs, dtype=torch.float32)[None])[2][0].numpy(), None

        return act

    return run


RUNS = {"cheetah": cheetah, "dqn": dqn, "sac": sac}
