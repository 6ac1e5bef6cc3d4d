"""PPO on CartPole: collect, estimate advantages, learn from minibatches.

    python docs/examples/ppo_cartpole.py

prints the mean return of the episodes that ended in each iteration, and at the end of
20 episodes with the best actions. `--steps` sets the number of environment steps,
`--seed` the seed.
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
    """Stack linear layers with tanh between them."""
    parts: list[nn.Module] = []
    for before, after in itertools.pairwise(sizes):
        parts += [nn.Linear(before, after), nn.Tanh()]
    return nn.Sequential(*parts[:-1])


class Agent(nn.Module):
    """A policy and a value function. With `explore`, actions are sampled."""

    def __init__(self) -> None:
        super().__init__()
        self.policy, self.value = layers(4, 64, 64, 2), layers(4, 64, 64, 1)
        self.explore = True

    def forward(self, obs: torch.Tensor) -> Batch:
        """Choose actions, and keep what learning from them takes."""
        logits, values = self.policy(obs), self.value(obs).squeeze(-1)
        chances = Categorical(logits=logits)
        actions = chances.sample() if self.explore else logits.argmax(-1)
        return Batch(
            act=actions, action_logp=chances.log_prob(actions), vf_preds=values
        )

    @torch.no_grad()
    def value_of(self, obs: np.ndarray) -> torch.Tensor:
        """Estimate what comes after the observations that steps led to."""
        return self.value(torch.from_numpy(obs)).squeeze(-1)


def learn(
    agent: Agent,
    optimizer: torch.optim.Optimizer,
    batch: SampleBatch,
    rng: np.random.Generator,
) -> None:
    """Take some epochs of steps on shuffled minibatches."""
    wanted = batch.select(
        "obs", "actions", "action_logp", "advantages", "value_targets"
    )
    wanted["advantages"] = (batch["advantages"] - batch["advantages"].mean()) / (
        batch["advantages"].std() + 1e-8
    )
    for rows in wanted.minibatches(MINIBATCH, epochs=EPOCHS, rng=rng):
        obs, actions, logp, advantages, targets = (
            torch.as_tensor(column) for column in rows.values()
        )
        chances = Categorical(logits=agent.policy(obs))
        ratio = (chances.log_prob(actions) - logp).exp()
        gain = torch.minimum(
            ratio * advantages, ratio.clamp(1 - CLIP, 1 + CLIP) * advantages
        )
        value_loss = (agent.value(obs).squeeze(-1) - targets).square()
        loss = (0.5 * value_loss - gain - ENTROPY * chances.entropy()).mean()
        optimizer.zero_grad()
        loss.backward()
        nn.utils.clip_grad_norm_(agent.parameters(), 0.5)
        optimizer.step()


def evaluate(agent: Agent, episodes: int, seed: int) -> np.ndarray:
    """Play episodes with the best actions, and return what each of them brought."""
    agent.explore = False
    with Collector(agent, gymnasium.make("CartPole-v1"), seed=seed) as collector:
        returns = collector.collect(n_episode=episodes).returns
    agent.explore = True
    return returns


def main(steps: int, seed: int) -> float:
    """Learn, and return the mean return of 20 episodes."""
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
