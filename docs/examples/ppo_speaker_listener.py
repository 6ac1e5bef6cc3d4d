"""PPO with two policies: a speaker that sees the goal and cannot move, a listener that moves and cannot see it.

python docs/examples/ppo_speaker_listener.py

prints the mean return of each iteration's episodes, then that of 100 episodes of the trained pair beside that of 100 at
random. `--steps` sets how many environment steps to learn from, `--seed` where chance begins.
"""

from __future__ import annotations

import argparse

import numpy as np
import torch
from torch import nn
from torch.distributions import Categorical

from samplebatch import GAE, Batch, MultiAgentBatch, MultiAgentCollector, SampleBatch
from samplebatch.rollout import episode_statistics

ENVIRONMENT = "mpe2/simple_speaker_listener_v4"
SIZES = {"speaker": (3, 3), "listener": (11, 5)}
"""Numbers in an observation, and actions, of each policy."""

ENVS, STEPS = 16, 3200
EPOCHS, MINIBATCH = 8, 400
GAMMA, LAMBDA, CLIP, ENTROPY, LEARNING_RATE = 0.95, 0.95, 0.2, 0.01, 1e-3


class Agent(nn.Module):
    """A policy and a value function, over one trunk each."""

    def __init__(self, numbers: int, actions: int) -> None:
        super().__init__()
        self.policy, self.value = (
            nn.Sequential(nn.Linear(numbers, 64), nn.Tanh(), nn.Linear(64, 64), nn.Tanh(), nn.Linear(64, outputs))
            for outputs in (actions, 1)
        )

    def forward(self, obs: torch.Tensor) -> Batch:
        """Draw actions, and keep what learning from them takes."""
        chances = Categorical(logits=self.policy(obs))
        actions = chances.sample()
        return Batch(act=actions, action_logp=chances.log_prob(actions), vf_preds=self.value(obs).squeeze(-1))

    @torch.no_grad()
    def value_of(self, obs: np.ndarray) -> torch.Tensor:
        """Estimate what comes after the observations that steps led to."""
        return self.value(torch.from_numpy(obs)).squeeze(-1)


def learn(agent: Agent, optimizer: torch.optim.Optimizer, batch: SampleBatch, rng: np.random.Generator) -> None:
    """Take some epochs of steps on shuffled minibatches of one policy."""
    wanted = batch.select("obs", "actions", "action_logp", "advantages", "value_targets")
    wanted["advantages"] = (batch["advantages"] - batch["advantages"].mean()) / (batch["advantages"].std() + 1e-8)
    for rows in wanted.minibatches(MINIBATCH, epochs=EPOCHS, rng=rng):
        obs, actions, logp, advantages, targets = (torch.as_tensor(column) for column in rows.values())
        chances = Categorical(logits=agent.policy(obs))
        ratio = (chances.log_prob(actions) - logp).exp()
        gain = torch.minimum(ratio * advantages, ratio.clamp(1 - CLIP, 1 + CLIP) * advantages)
        value_loss = nn.functional.smooth_l1_loss(agent.value(obs).squeeze(-1), targets, reduction="none")
        loss = (0.5 * value_loss - gain - ENTROPY * chances.entropy()).mean()
        optimizer.zero_grad()
        loss.backward()
        nn.utils.clip_grad_norm_(agent.parameters(), 0.5)
        optimizer.step()


def mean_return(batch: MultiAgentBatch) -> float:
    """Average the returns of the episodes that ended; both agents get the same rewards."""
    return episode_statistics(batch).policies["listener"].mean_return


def main(steps: int, seed: int) -> tuple[float, float]:
    """Learn, and return the mean returns of 100 episodes of the trained pair, and of 100 at random."""
    torch.set_num_threads(1)  # for networks as small as these, threads cost more than they save
    torch.manual_seed(seed)
    rng = np.random.default_rng(seed)
    agents = {policy: Agent(*sizes) for policy, sizes in SIZES.items()}
    optimizers = {policy: torch.optim.Adam(agent.parameters(), lr=LEARNING_RATE) for policy, agent in agents.items()}
    advantages = GAE(bootstrap={p: agent.value_of for p, agent in agents.items()}, gamma=GAMMA, lambda_=LAMBDA)
    collector = MultiAgentCollector(ENVIRONMENT, policy=agents, num_envs=ENVS, seed=seed, hooks=[advantages])
    iterations = -(-steps // STEPS)
    for iteration in range(iterations):
        batch = collector.collect(n_step=STEPS).batch
        for policy, agent in agents.items():
            for group in optimizers[policy].param_groups:
                group["lr"] = LEARNING_RATE * (1 - iteration / iterations)
            learn(agent, optimizers[policy], batch[policy], rng)
        if iteration % 5 == 0:
            print(f"{(iteration + 1) * STEPS:7d} steps, mean return {mean_return(batch):6.1f}")
    trained, random = (
        mean_return(MultiAgentCollector(ENVIRONMENT, policy, num_envs=ENVS, seed=seed + 1).collect(n_episode=100).batch)
        for policy in (agents, "random")
    )
    print(f"100 episodes: mean return {trained:.1f}, at random {random:.1f}")
    return trained, random


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--steps", type=int, default=300_000, help="environment steps to learn from")
    parser.add_argument("--seed", type=int, default=0)
    options = parser.parse_args()
    main(options.steps, options.seed)
