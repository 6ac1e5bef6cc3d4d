"""PPO on CartPole: collect, estimate advantages, learn from minibatches.

    python docs/examples/ppo_cartpole.py

prints the mean return of the episodes that ended in each iteration, and then the mean
return of 20 episodes with the best actions. `--steps` sets the number of environment
steps, and `--seed` sets the seed.
"""

from __future__ import annotations

import argparse
import itertools

import gymnasium
import numpy as np
import torch
from torch import nn
from torch.distributions import Categorical

from samplebatch import GAE, Batch, Collector, SampleBatch, postprocess

ENVS, STEPS_PER_ENV = 16, 128
EPOCHS, MINIBATCH = 6, 256
GAMMA, LAMBDA, CLIP, ENTROPY, LEARNING_RATE = 0.99, 0.95, 0.2, 0.003, 1e-3


def layers(*sizes: int) -> nn.Sequential:
    """Create linear layers with tanh activations between them."""
    parts: list[nn.Module] = []
    for before, after in itertools.pairwise(sizes):
        parts += [nn.Linear(before, after), nn.Tanh()]
    return nn.Sequential(*parts[:-1])


class Agent(nn.Module):
    """Policy and value function; actions are sampled if `explore` is true."""

    def __init__(self) -> None:
        super().__init__()
        self.policy, self.value = layers(4, 64, 64, 2), layers(4, 64, 64, 1)
        self.explore = True

    def forward(self, obs: torch.Tensor) -> Batch:
        """Select actions; return them with their log-probabilities and values."""
        logits, values = self.policy(obs), self.value(obs).squeeze(-1)
        distribution = Categorical(logits=logits)
        actions = distribution.sample() if self.explore else logits.argmax(-1)
        return Batch(
            act=actions, action_logp=distribution.log_prob(actions), vf_preds=values
        )

    @torch.no_grad()
    def value_of(self, obs: np.ndarray) -> torch.Tensor:
        """Estimate the values of observations."""
        return self.value(torch.from_numpy(obs)).squeeze(-1)


def learn(
    agent: Agent,
    optimizer: torch.optim.Optimizer,
    batch: SampleBatch,
    rng: np.random.Generator,
) -> None:
    """Perform gradient steps on shuffled minibatches for several epochs."""
    training_rows = batch.select(
        "obs", "actions", "action_logp", "advantages", "value_targets"
    )
    training_rows["advantages"] = (batch["advantages"] - batch["advantages"].mean()) / (
        batch["advantages"].std() + 1e-8
    )
    for rows in training_rows.minibatches(MINIBATCH, epochs=EPOCHS, rng=rng):
        obs, actions, logp, advantages, targets = (
            torch.as_tensor(column) for column in rows.values()
        )
        distribution = Categorical(logits=agent.policy(obs))
        ratio = (distribution.log_prob(actions) - logp).exp()
        gain = torch.minimum(
            ratio * advantages, ratio.clamp(1 - CLIP, 1 + CLIP) * advantages
        )
        value_loss = (agent.value(obs).squeeze(-1) - targets).square()
        loss = (0.5 * value_loss - gain - ENTROPY * distribution.entropy()).mean()
        optimizer.zero_grad()
        loss.backward()
        nn.utils.clip_grad_norm_(agent.parameters(), 0.5)
        optimizer.step()


def evaluate(agent: Agent, episodes: int, seed: int) -> np.ndarray:
    """Run episodes with the most probable actions and return their returns."""
    agent.explore = False
    with Collector(agent, gymnasium.make("CartPole-v1"), seed=seed) as collector:
        returns = collector.collect(n_episode=episodes).returns
    agent.explore = True
    return returns


def main(steps: int, seed: int) -> float:
    """Train the agent and return the mean return of 20 evaluation episodes."""
    torch.set_num_threads(
        1
    )  # for networks as small as these, threads cost more than they save
    torch.manual_seed(seed)
    rng = np.random.default_rng(seed)
    agent = Agent()
    optimizer = torch.optim.Adam(agent.parameters(), lr=LEARNING_RATE)
    advantages = GAE(bootstrap=agent.value_of, gamma=GAMMA, lambda_=LAMBDA)
    iterations = -(-steps // (ENVS * STEPS_PER_ENV))
    envs = gymnasium.make_vec("CartPole-v1", num_envs=ENVS, vectorization_mode="sync")
    with Collector(agent, envs, seed=seed) as collector:
        for iteration in range(iterations):
            for group in optimizer.param_groups:
                group["lr"] = LEARNING_RATE * (1 - iteration / iterations)
            stats = collector.collect(n_step=ENVS * STEPS_PER_ENV)
            learn(agent, optimizer, postprocess(stats.batch, [advantages]), rng)
            mean = stats.returns_stat.mean if stats.returns_stat else float("nan")
            print(
                f"{collector.collect_step:7d} steps, "
                f"{stats.n_collected_episodes:3d} episodes, mean return {mean:6.1f}"
            )
    returns = evaluate(agent, 20, seed + 1)
    print(
        f"20 episodes with the best actions: mean return {returns.mean():.1f}, "
        f"worst {returns.min():.0f}"
    )
    return float(returns.mean())


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument(
        "--steps", type=int, default=120_000, help="environment steps to learn from"
    )
    parser.add_argument("--seed", type=int, default=0)
    options = parser.parse_args()
    main(options.steps, options.seed)
