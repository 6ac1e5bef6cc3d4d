"""Hand-written training loops: one per algorithm as in single-file implementations, and one with our classes.

The two PPO loops draw the same random numbers and make the same updates: their final parameters are bit-identical.
"""

from __future__ import annotations

import copy
from typing import Any

import gymnasium
import numpy as np
import numpy.typing as npt
import torch
from gymnasium.vector import AutoresetMode
from torch import nn
from torch.distributions import Categorical

from samplebatch import GAE, Batch, Collector, ReplayBuffer, postprocess

NUM_ENVS, NUM_STEPS = 8, 128
EPOCHS, MINIBATCH = 4, 256
GAMMA, LAMBDA, CLIP, ENTROPY = 0.99, 0.95, 0.2, 0.01


class Agent(nn.Module):
    """Actor-critic: a policy and a value function with two hidden layers each."""

    def __init__(self) -> None:
        super().__init__()
        self.policy, self.value = (
            nn.Sequential(nn.Linear(4, 64), nn.Tanh(), nn.Linear(64, 64), nn.Tanh(), nn.Linear(64, size))
            for size in (2, 1)
        )

    def forward(self, obs: torch.Tensor) -> Batch:
        """Draw actions in the form that a collector requires."""
        actions, logp, values = self.act(obs)
        return Batch(act=actions, action_logp=logp, vf_preds=values)

    def act(self, obs: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """Draw actions; return actions, log-probabilities and values of the observations."""
        distribution = Categorical(logits=self.policy(obs), validate_args=False)
        actions = distribution.sample()
        return actions, distribution.log_prob(actions), self.value(obs).squeeze(-1)

    @torch.no_grad()
    def value_of(self, obs: npt.NDArray[np.float32]) -> torch.Tensor:
        """Estimate the values of observations."""
        return self.value(torch.from_numpy(obs)).squeeze(-1)  # type: ignore[no-any-return]


def make_envs(num_envs: int, name: str = "CartPole-v1") -> gymnasium.vector.VectorEnv[Any, Any, Any]:
    """Create a vector environment with same-step autoreset."""
    return gymnasium.make_vec(
        name,
        num_envs,
        vectorization_mode="sync",
        vector_kwargs={"autoreset_mode": AutoresetMode.SAME_STEP},
    )


def update(agent: Agent, optimizer: torch.optim.Optimizer, columns: tuple[torch.Tensor, ...]) -> None:
    """Make one gradient step on PPO's clipped loss."""
    obs, actions, logp, advantages, returns = columns
    distribution = Categorical(logits=agent.policy(obs), validate_args=False)
    ratio = (distribution.log_prob(actions) - logp).exp()
    advantages = (advantages - advantages.mean()) / (advantages.std() + 1e-8)
    gain = torch.minimum(ratio * advantages, ratio.clamp(1 - CLIP, 1 + CLIP) * advantages)
    value_loss = (agent.value(obs).squeeze(-1) - returns).square()
    loss = (0.5 * value_loss - gain - ENTROPY * distribution.entropy()).mean()
    optimizer.zero_grad()
    loss.backward()  # type: ignore[no-untyped-call]
    nn.utils.clip_grad_norm_(agent.parameters(), 0.5)
    optimizer.step()


def new_agent(seed: int) -> tuple[Agent, torch.optim.Optimizer, np.random.Generator]:
    """Create an agent, its optimizer and the random generator for minibatches."""
    torch.manual_seed(seed)
    agent = Agent()
    return agent, torch.optim.Adam(agent.parameters(), lr=2.5e-4, eps=1e-5), np.random.default_rng(seed)


def ppo_with_arrays(seed: int, iterations: int, env_seeds: list[int]) -> Agent:
    """Train PPO with preallocated arrays of shape (NUM_STEPS, NUM_ENVS), as in single-file implementations."""
    agent, optimizer, rng = new_agent(seed)
    envs = make_envs(NUM_ENVS)
    shape = NUM_STEPS, NUM_ENVS
    obs = np.zeros((*shape, 4), np.float32)
    actions = np.zeros(shape, np.int64)
    new_obs = np.zeros_like(obs)
    logp, values, rewards, advantages, returns = (np.zeros(shape, np.float32) for _ in range(5))
    terminated, truncated = (np.zeros(shape, bool) for _ in range(2))
    last_obs, _ = envs.reset(seed=env_seeds)
    for _ in range(iterations):
        for t in range(NUM_STEPS):
            obs[t] = last_obs
            with torch.no_grad():
                outputs = agent.act(torch.from_numpy(last_obs))
            actions[t], logp[t], values[t] = (column.numpy() for column in outputs)
            last_obs, rewards[t], terminated[t], truncated[t], infos = envs.step(actions[t])
            for env in np.flatnonzero(truncated[t]):
                new_obs[t, env] = infos["final_obs"][env]
        is_done = terminated | truncated
        # Truncated episodes and the last steps of unfinished episodes are bootstrapped.
        is_bootstrapped = truncated & ~terminated
        new_obs[-1, ~is_done[-1]] = last_obs[~is_done[-1]]
        is_bootstrapped[-1] |= ~is_done[-1]
        next_values = np.zeros_like(values)
        next_values[:-1] = values[1:]
        next_values[terminated] = 0.0
        next_values.T[is_bootstrapped.T] = agent.value_of(new_obs.swapaxes(0, 1)[is_bootstrapped.T])
        advantage = np.zeros(NUM_ENVS)
        for t in reversed(range(NUM_STEPS)):
            error = rewards[t] + GAMMA * next_values[t].astype(float) - values[t]
            advantage = error + np.where(is_done[t], 0.0, GAMMA * LAMBDA * advantage)
            advantages[t], returns[t] = advantage, advantage + values[t]
        columns = [
            torch.from_numpy(np.ascontiguousarray(column.swapaxes(0, 1)).reshape(-1, *column.shape[2:]))
            for column in (obs, actions, logp, advantages, returns)
        ]
        for _ in range(EPOCHS):
            for rows in torch.from_numpy(rng.permutation(NUM_ENVS * NUM_STEPS)).split(MINIBATCH):
                update(agent, optimizer, tuple(column[rows] for column in columns))
    envs.close()
    return agent


def ppo_with_collector(seed: int, iterations: int, env_seeds: list[int]) -> Agent:
    """Train PPO with a collector, `GAE` and `minibatches`."""
    agent, optimizer, rng = new_agent(seed)
    estimate = GAE(bootstrap=agent.value_of, gamma=GAMMA, lambda_=LAMBDA)
    with Collector(agent, make_envs(NUM_ENVS)) as collector:
        collector.reset(gym_reset_kwargs={"seed": env_seeds})
        for _ in range(iterations):
            batch = postprocess(collector.collect(n_step=NUM_ENVS * NUM_STEPS).batch, [estimate])
            columns = batch.select("obs", "actions", "action_logp", "advantages", "value_targets")
            for rows in columns.minibatches(MINIBATCH, epochs=EPOCHS, rng=rng):
                update(agent, optimizer, tuple(torch.as_tensor(column) for column in rows.values()))
    return agent


class QNetwork(nn.Module):
    """Q-network for two actions, with epsilon-greedy exploration."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.Sequential(nn.Linear(4, 120), nn.ReLU(), nn.Linear(120, 84), nn.ReLU(), nn.Linear(84, 2))
        self.eps = 1.0

    def forward(self, obs: torch.Tensor) -> torch.Tensor:
        """Estimate action values, shape (n, 2)."""
        return self.layers(obs)  # type: ignore[no-any-return]

    @torch.no_grad()
    def act(self, obs: npt.NDArray[np.float32], rng: np.random.Generator) -> npt.NDArray[np.int64]:
        """Choose actions for observations of shape (n, 4)."""
        if rng.random() < self.eps:
            return rng.integers(2, size=len(obs))
        return self(torch.from_numpy(obs)).argmax(1).numpy()  # type: ignore[no-any-return]


DQN_STARTS, DQN_EVERY, DQN_BATCH, DQN_TARGET_EVERY = 1000, 10, 128, 500


class DQNLearner:
    """Learner that minimizes the temporal-difference loss of a `QNetwork`."""

    def __init__(self, seed: int) -> None:
        torch.manual_seed(seed)
        self.online, self.target = QNetwork(), QNetwork()
        self.target.load_state_dict(self.online.state_dict())
        self.optimizer = torch.optim.Adam(self.online.parameters(), lr=2.5e-4)
        self.rng = np.random.default_rng(seed)

    def learn(
        self,
        step: int,
        obs: torch.Tensor,
        actions: torch.Tensor,
        rewards: torch.Tensor,
        terminated: torch.Tensor,
        next_obs: torch.Tensor,
    ) -> None:
        """Make a gradient step on transitions of shape (n, ...), and update the target network if it is due."""
        with torch.no_grad():
            targets = rewards + GAMMA * self.target(next_obs).amax(1) * (1 - terminated)
        values = self.online(obs).gather(1, actions[:, None]).squeeze(1)
        loss = nn.functional.mse_loss(targets, values)
        self.optimizer.zero_grad()
        loss.backward()  # type: ignore[no-untyped-call]
        self.optimizer.step()
        if step % DQN_TARGET_EVERY == 0:
            self.target.load_state_dict(self.online.state_dict())


def dqn_with_sb3(buffers: Any, seed: int, steps: int) -> QNetwork:
    """Train DQN with one environment and Stable-Baselines3's replay buffer, as single-file implementations do."""
    learner = DQNLearner(seed)
    envs = make_envs(1)
    space, actions_space = envs.single_observation_space, envs.single_action_space
    buffer = buffers.ReplayBuffer(10_000, space, actions_space, "cpu", handle_timeout_termination=False)
    obs, _ = envs.reset(seed=seed)
    for step in range(1, steps + 1):
        learner.online.eps = max(0.05, 1 - 0.95 * step / (0.5 * steps))
        actions = learner.online.act(obs, learner.rng)
        new_obs, rewards, terminated, truncated, infos = envs.step(actions)
        next_obs = new_obs
        if terminated[0] or truncated[0]:
            next_obs = new_obs.copy()
            next_obs[0] = infos["final_obs"][0]
        buffer.add(obs, next_obs, actions, rewards, terminated, [{}])
        obs = new_obs
        if step > DQN_STARTS and step % DQN_EVERY == 0:
            batch = buffer.sample(DQN_BATCH)
            learner.learn(
                step,
                batch.observations,
                batch.actions.squeeze(1),
                batch.rewards.squeeze(1),
                batch.dones.squeeze(1),
                batch.next_observations,
            )
    envs.close()
    return learner.online


def dqn_with_collector(seed: int, steps: int) -> QNetwork:
    """Train DQN with a collector that adds to our replay buffer."""
    learner = DQNLearner(seed)
    buffer = ReplayBuffer(10_000)
    envs = make_envs(1)
    with Collector(lambda obs: learner.online.act(obs, learner.rng), envs, buffer, seed=seed) as collector:
        for step in range(DQN_EVERY, steps + 1, DQN_EVERY):
            learner.online.eps = max(0.05, 1 - 0.95 * step / (0.5 * steps))
            collector.collect(n_step=DQN_EVERY)
            if step > DQN_STARTS:
                batch = buffer.sample(DQN_BATCH)[0].to_torch(floats=torch.float32)
                learner.learn(step, batch.obs, batch.act, batch.rew, batch.terminated.float(), batch.obs_next)
    return learner.online


SAC_STARTS, SAC_BATCH, SAC_POLICY_EVERY, SAC_TAU = 500, 256, 2, 0.005
TORQUE = 2.0
"""Largest torque in Pendulum: actions are in [-TORQUE, TORQUE]."""


def perceptron(inputs: int, outputs: int) -> nn.Sequential:
    """Create a network with two hidden layers of 256 units."""
    return nn.Sequential(nn.Linear(inputs, 256), nn.ReLU(), nn.Linear(256, 256), nn.ReLU(), nn.Linear(256, outputs))


class GaussianActor(nn.Module):
    """Gaussian policy squashed to the action bounds of Pendulum."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = perceptron(3, 2)

    def forward(self, obs: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Draw actions; return the actions and their log-probabilities, both of shape (n, 1)."""
        mean, log_std = self.layers(obs).chunk(2, dim=1)
        log_std = -5.0 + 3.5 * (torch.tanh(log_std) + 1)
        normal = torch.distributions.Normal(mean, log_std.exp(), validate_args=False)
        pre_squash = normal.rsample()
        squashed = torch.tanh(pre_squash)
        logp = normal.log_prob(pre_squash) - torch.log(TORQUE * (1 - squashed.square()) + 1e-6)
        return squashed * TORQUE, logp


class SACLearner:
    """Learner that minimizes the losses of soft actor-critic with an adaptive temperature."""

    def __init__(self, seed: int) -> None:
        torch.manual_seed(seed)
        self.actor, self.critics = GaussianActor(), nn.ModuleList([perceptron(4, 1), perceptron(4, 1)])
        self.targets = copy.deepcopy(self.critics)
        self.log_alpha = torch.zeros(1, requires_grad=True)
        self.actor_optimizer = torch.optim.Adam(self.actor.parameters(), lr=3e-4)
        self.critic_optimizer = torch.optim.Adam(self.critics.parameters(), lr=1e-3)
        self.alpha_optimizer = torch.optim.Adam([self.log_alpha], lr=1e-3)
        self.rng = np.random.default_rng(seed)

    @torch.no_grad()
    def act(self, obs: npt.NDArray[np.float32]) -> npt.NDArray[np.float32]:
        """Draw actions for observations of shape (n, 3)."""
        return self.actor(torch.from_numpy(obs))[0].numpy()  # type: ignore[no-any-return]

    def draw(self, obs: npt.NDArray[np.float32]) -> npt.NDArray[np.float32]:
        """Draw uniform actions for observations of shape (n, 3)."""
        return self.rng.uniform(-TORQUE, TORQUE, (len(obs), 1)).astype(np.float32)

    def learn(
        self,
        step: int,
        obs: torch.Tensor,
        actions: torch.Tensor,
        rewards: torch.Tensor,
        terminated: torch.Tensor,
        next_obs: torch.Tensor,
    ) -> None:
        """Make a gradient step of the critics on transitions of shape (n, ...), and actor steps if they are due."""
        alpha = self.log_alpha.exp().detach()
        with torch.no_grad():
            new_actions, logp = self.actor(next_obs)
            next_inputs = torch.cat([next_obs, new_actions], 1)
            values = torch.minimum(*(target(next_inputs) for target in self.targets)) - alpha * logp
            target_values = rewards + (1 - terminated) * GAMMA * values.squeeze(1)
        inputs = torch.cat([obs, actions], 1)
        loss = sum(nn.functional.mse_loss(critic(inputs).squeeze(1), target_values) for critic in self.critics)
        self.critic_optimizer.zero_grad()
        loss.backward()  # type: ignore[union-attr, no-untyped-call]
        self.critic_optimizer.step()
        for _ in range(SAC_POLICY_EVERY if step % SAC_POLICY_EVERY == 0 else 0):
            policy_actions, logp = self.actor(obs)
            policy_inputs = torch.cat([obs, policy_actions], 1)
            actor_loss = (alpha * logp - torch.minimum(*(critic(policy_inputs) for critic in self.critics))).mean()
            self.actor_optimizer.zero_grad()
            actor_loss.backward()
            self.actor_optimizer.step()
            with torch.no_grad():
                _, logp = self.actor(obs)
            alpha_loss = (-self.log_alpha.exp() * (logp - 1.0)).mean()
            self.alpha_optimizer.zero_grad()
            alpha_loss.backward()
            self.alpha_optimizer.step()
            alpha = self.log_alpha.exp().detach()
        for parameter, target in zip(self.critics.parameters(), self.targets.parameters(), strict=True):
            target.data.copy_(SAC_TAU * parameter.data + (1 - SAC_TAU) * target.data)


def sac_with_sb3(buffers: Any, seed: int, steps: int) -> SACLearner:
    """Train SAC with one environment and Stable-Baselines3's replay buffer, as single-file implementations do."""
    learner = SACLearner(seed)
    envs = make_envs(1, "Pendulum-v1")
    space, actions_space = envs.single_observation_space, envs.single_action_space
    buffer = buffers.ReplayBuffer(10_000, space, actions_space, "cpu", handle_timeout_termination=False)
    obs, _ = envs.reset(seed=seed)
    for step in range(1, steps + 1):
        actions = learner.act(obs) if step > SAC_STARTS else learner.draw(obs)
        new_obs, rewards, terminated, truncated, infos = envs.step(actions)
        next_obs = new_obs
        if terminated[0] or truncated[0]:
            next_obs = new_obs.copy()
            next_obs[0] = infos["final_obs"][0]
        buffer.add(obs, next_obs, actions, rewards, terminated, [{}])
        obs = new_obs
        if step > SAC_STARTS:
            batch = buffer.sample(SAC_BATCH)
            learner.learn(
                step,
                batch.observations,
                batch.actions,
                batch.rewards.squeeze(1),
                batch.dones.squeeze(1),
                batch.next_observations,
            )
    envs.close()
    return learner


def sac_with_collector(seed: int, steps: int) -> SACLearner:
    """Train SAC with a collector that adds to our replay buffer."""
    learner = SACLearner(seed)
    buffer = ReplayBuffer(10_000)
    with Collector(learner.act, make_envs(1, "Pendulum-v1"), buffer, seed=seed) as collector:
        collector.collect(n_step=SAC_STARTS, random=True)
        for step in range(SAC_STARTS + 1, steps + 1):
            collector.collect(n_step=1)
            batch = buffer.sample(SAC_BATCH)[0].to_torch(floats=torch.float32)
            learner.learn(step, batch.obs, batch.act, batch.rew, batch.terminated.float(), batch.obs_next)
    return learner
