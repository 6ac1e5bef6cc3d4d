"""Agents as CleanRL's scripts have them, unmodified, act in our collectors: they are asked as the scripts ask them."""

from __future__ import annotations

from typing import Any

import gymnasium
import numpy as np
import pytest
import torch
from torch import nn
from torch.distributions import Categorical, Normal

from samplebatch import GAE, Batch, Collector, MultiAgentCollector, SampleBatch, as_policy
from samplebatch.errors import PolicySpecError

pytestmark = pytest.mark.usefixtures("seeded")


def layers(inputs: int, outputs: int) -> nn.Sequential:
    return nn.Sequential(nn.Linear(inputs, 64), nn.Tanh(), nn.Linear(64, 64), nn.Tanh(), nn.Linear(64, outputs))


class Agent(nn.Module):
    """Agent of `ppo.py`."""

    def __init__(self, inputs: int = 4, actions: int = 2) -> None:
        super().__init__()
        self.critic, self.actor = layers(inputs, 1), layers(inputs, actions)

    def get_value(self, x: torch.Tensor) -> torch.Tensor:
        return self.critic(x)  # type: ignore[no-any-return]

    def get_action_and_value(self, x: torch.Tensor, action: torch.Tensor | None = None) -> Any:
        probs = Categorical(logits=self.actor(x))
        if action is None:
            action = probs.sample()
        return action, probs.log_prob(action), probs.entropy(), self.critic(x)


class RecurrentAgent(nn.Module):
    """Agent of `ppo_atari_lstm.py`: the first axis of states is layers, and states are zero where `done` is 1."""

    def __init__(self, inputs: int = 4) -> None:
        super().__init__()
        self.network = nn.Sequential(nn.Linear(inputs, 32), nn.Tanh())
        self.lstm = nn.LSTM(32, 16)
        self.actor, self.critic = nn.Linear(16, 2), nn.Linear(16, 1)

    def get_states(self, x: torch.Tensor, lstm_state: Any, done: torch.Tensor) -> Any:
        hidden = self.network(x)
        batch_size = lstm_state[0].shape[1]
        hidden = hidden.reshape((-1, batch_size, self.lstm.input_size))
        done = done.reshape((-1, batch_size))
        new_hidden = []
        for h, d in zip(hidden, done, strict=True):
            retained = (1.0 - d).view(1, -1, 1)
            h, lstm_state = self.lstm(h.unsqueeze(0), (retained * lstm_state[0], retained * lstm_state[1]))
            new_hidden += [h]
        return torch.flatten(torch.cat(new_hidden), 0, 1), lstm_state

    def get_value(self, x: torch.Tensor, lstm_state: Any, done: torch.Tensor) -> torch.Tensor:
        hidden, _ = self.get_states(x, lstm_state, done)
        return self.critic(hidden)  # type: ignore[no-any-return]

    def get_action_and_value(
        self, x: torch.Tensor, lstm_state: Any, done: torch.Tensor, action: torch.Tensor | None = None
    ) -> Any:
        hidden, lstm_state = self.get_states(x, lstm_state, done)
        probs = Categorical(logits=self.actor(hidden))
        if action is None:
            action = probs.sample()
        return action, probs.log_prob(action), probs.entropy(), self.critic(hidden), lstm_state


class SoftActor(nn.Module):
    """Actor of `sac_continuous_action.py`; it also has a `forward`, which collectors must not call."""

    def __init__(self) -> None:
        super().__init__()
        self.mean, self.deviation = nn.Linear(3, 1), nn.Linear(3, 1)

    def forward(self, x: torch.Tensor) -> Any:
        return self.mean(x), self.deviation(x)

    def get_action(self, x: torch.Tensor) -> Any:
        mean, log_std = self(x)
        normal = Normal(mean, log_std.tanh().exp())
        sampled = normal.rsample()
        action = torch.tanh(sampled)
        logp = (normal.log_prob(sampled) - torch.log(1 - action.pow(2) + 1e-6)).sum(1, keepdim=True)
        return action * 2.0, logp, torch.tanh(mean) * 2.0


class Network(nn.Module):
    """Network of `dqn.py`: action values."""

    def __init__(self) -> None:
        super().__init__()
        self.network = layers(4, 2)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.network(x)  # type: ignore[no-any-return]


def learn(agent: Agent, optimizer: torch.optim.Optimizer, batch: SampleBatch, rng: np.random.Generator) -> None:
    """Run the update epochs of `ppo.py`."""
    expected = batch.select("obs", "actions", "action_logp", "advantages", "value_targets")
    for rows in expected.minibatches(128, epochs=6, rng=rng):
        obs, actions, logp, advantages, targets = (torch.as_tensor(column) for column in rows.values())
        _, new, entropy, values = agent.get_action_and_value(obs, actions)
        advantages = (advantages - advantages.mean()) / (advantages.std() + 1e-8)
        ratio = (new - logp).exp()
        gain = torch.min(ratio * advantages, ratio.clamp(0.8, 1.2) * advantages)
        loss = (0.5 * (values.flatten() - targets) ** 2 - gain - 0.003 * entropy).mean()
        optimizer.zero_grad()
        loss.backward()
        nn.utils.clip_grad_norm_(agent.parameters(), 0.5)
        optimizer.step()


def test_an_agent_learns_from_what_a_collector_returns() -> None:
    agent, rng = Agent(), np.random.default_rng(0)
    optimizer = torch.optim.Adam(agent.parameters(), lr=1e-3)
    values = torch.no_grad()(lambda obs: agent.get_value(torch.as_tensor(obs)).flatten())
    with Collector(agent, "CartPole-v1", num_envs=8, seed=1, hooks=[GAE(bootstrap=values)]) as collector:
        for _ in range(9):
            stats = collector.collect(n_step=1024)
            learn(agent, optimizer, stats.batch, rng)
    assert stats.returns.mean() > 60


def test_log_probabilities_and_values_of_an_agent_are_recorded() -> None:
    agent = Agent()
    with Collector(agent, "CartPole-v1", num_envs=3) as collector:
        batch = collector.collect(n_step=30).batch
    with torch.no_grad():
        _, logp, _, values = agent.get_action_and_value(
            torch.as_tensor(batch["obs"]), torch.as_tensor(batch["actions"])
        )
    np.testing.assert_allclose(batch["action_logp"], logp, rtol=1e-5, atol=1e-6)
    np.testing.assert_allclose(batch["vf_preds"], values.flatten(), rtol=1e-5, atol=1e-6)


def test_a_recurrent_agent_resumes_from_its_state_and_starts_at_zero() -> None:
    agent = RecurrentAgent()
    with Collector(agent, "CartPole-v1", seed=2) as collector:
        batch = collector.collect(n_episode=3).batch
    state = (torch.zeros(1, 1, 16), torch.zeros(1, 1, 16))
    # One pass of the script over all steps, which knows by `done` where episodes begin.
    done = torch.as_tensor(batch["t"] == 0, dtype=torch.float32)
    obs, actions = torch.as_tensor(batch["obs"]), torch.as_tensor(batch["actions"])
    with torch.no_grad():
        _, logp, _, values, _ = agent.get_action_and_value(obs, state, done, actions)
    np.testing.assert_allclose(batch["action_logp"], logp, rtol=1e-4, atol=1e-5)
    np.testing.assert_allclose(batch["vf_preds"], values.flatten(), rtol=1e-4, atol=1e-5)
    assert batch["state_in_0"].shape == (batch.count, 1, 16)
    assert not batch["state_in_0"][batch["t"] == 0].any()


def test_an_actor_without_values_draws_actions() -> None:
    with Collector(SoftActor(), "Pendulum-v1", num_envs=3) as collector:
        batch = collector.collect(n_step=30).batch
    assert batch["actions"].shape == (30, 1)
    assert batch["action_logp"].shape == (30,)
    assert "vf_preds" not in batch


def test_a_network_of_action_values_selects_the_best_action() -> None:
    network, obs = Network(), np.random.default_rng(0).normal(size=(9, 4)).astype(np.float32)
    decided = as_policy(network, gymnasium.spaces.Discrete(2))(Batch(obs=obs, info=Batch()))
    with torch.no_grad():
        assert decided["act"].tolist() == network(torch.as_tensor(obs)).argmax(1).tolist()


def test_agents_of_several_policies_act_in_one_environment() -> None:
    agents = {"adversary": Agent(16, 5), "agent": Agent(14, 5)}
    collector = MultiAgentCollector(agents, "mpe2/simple_tag_v3", seed=1)
    batch = collector.collect(n_step=20).batch
    assert {policy: len(rows["vf_preds"]) for policy, rows in batch.items()} == {"adversary": 60, "agent": 20}


def test_a_module_with_an_obs_argument_is_called_by_forward() -> None:
    class Own(nn.Module):
        def forward(self, obs: torch.Tensor) -> Batch:
            return Batch(act=torch.ones(len(obs), dtype=torch.int64))

        def get_action(self, x: torch.Tensor) -> torch.Tensor:
            raise AssertionError

    assert as_policy(Own())(Batch(obs=np.zeros((2, 4), np.float32), info=Batch()))["act"].tolist() == [1, 1]


def test_a_sampling_agent_rejects_requests_for_the_best_action() -> None:
    with pytest.raises(PolicySpecError, match="deterministic must be False for an agent that samples"):
        as_policy(Agent(), deterministic=True)
