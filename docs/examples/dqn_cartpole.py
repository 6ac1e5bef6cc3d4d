"""DQN on CartPole, with double Q-learning and prioritized three-step replay.

python docs/examples/dqn_cartpole.py

prints the mean return of the episodes that ended since the last line, and that of 20 episodes played without chance at
the end. `--steps` sets how many environment steps to make, `--seed` where chance begins.
"""

from __future__ import annotations

import argparse
import copy

import gymnasium
import numpy as np
import torch
from torch import nn

from samplebatch import Batch, Collector, PrioritizedVectorReplayBuffer

ENVS, CAPACITY, WARM_UP, BATCH = 8, 50_000, 1_000, 64
GAMMA, N_STEP, LEARNING_RATE, TAU = 0.99, 3, 1e-3, 0.01
ALPHA, BETA = 0.5, 0.4


class Agent(nn.Module):
    """A Q-function, and the actions that follow from it: the best ones, or any with probability `epsilon`."""

    def __init__(self) -> None:
        super().__init__()
        self.q = nn.Sequential(nn.Linear(4, 128), nn.ReLU(), nn.Linear(128, 128), nn.ReLU(), nn.Linear(128, 2))
        self.epsilon = 1.0

    def forward(self, obs: torch.Tensor) -> Batch:
        """Choose actions."""
        best = self.q(obs).argmax(-1)
        anything = torch.randint(2, best.shape)
        return Batch(act=torch.where(torch.rand(best.shape) < self.epsilon, anything, best))


def learn(
    agent: Agent, target: nn.Module, optimizer: torch.optim.Optimizer, buffer: PrioritizedVectorReplayBuffer
) -> None:
    """Take one step on rows drawn by priority, and give them their new ones."""
    batch, indices = buffer.sample(BATCH, n_step=N_STEP, gamma=GAMMA)
    obs, obs_next = torch.from_numpy(batch.obs), torch.from_numpy(batch.obs_next)
    returns, discount, weight = (torch.from_numpy(v).float() for v in (batch.returns, batch.discount, batch.weight))
    with torch.no_grad():
        best = agent.q(obs_next).argmax(-1, keepdim=True)
        targets = returns + discount * target(obs_next).gather(-1, best).squeeze(-1)
    values = agent.q(obs).gather(-1, torch.from_numpy(batch.act)[:, None]).squeeze(-1)
    loss = (weight * nn.functional.smooth_l1_loss(values, targets, reduction="none")).mean()
    optimizer.zero_grad()
    loss.backward()
    nn.utils.clip_grad_norm_(agent.parameters(), 10.0)
    optimizer.step()
    buffer.update_weight(indices, (targets - values).abs().detach().numpy(), generation=batch.generation)


def evaluate(agent: Agent, episodes: int, seed: int) -> np.ndarray:
    """Play episodes with the best actions, and return what each of them brought."""
    agent.epsilon = 0.0
    with Collector(agent, gymnasium.make("CartPole-v1"), seed=seed) as collector:
        return collector.collect(n_episode=episodes).returns


def main(steps: int, seed: int) -> float:
    """Learn, and return the mean return of 20 episodes."""
    torch.set_num_threads(1)  # for networks as small as these, threads cost more than they save
    torch.manual_seed(seed)
    agent = Agent()
    target = copy.deepcopy(agent.q)
    optimizer = torch.optim.Adam(agent.parameters(), lr=LEARNING_RATE)
    buffer = PrioritizedVectorReplayBuffer(CAPACITY, ENVS, alpha=ALPHA, beta=BETA, random_seed=seed)
    envs = gymnasium.make_vec("CartPole-v1", num_envs=ENVS, vectorization_mode="sync")
    recent: list[float] = []
    updates = 0
    with Collector(agent, envs, buffer, seed=seed) as collector:
        collector.collect(n_step=WARM_UP, random=True)
        while collector.collect_step < steps:
            done = collector.collect_step / steps
            agent.epsilon = max(0.02, 1.0 - done / 0.2)
            buffer.set_beta(BETA + (1.0 - BETA) * done)
            for group in optimizer.param_groups:
                group["lr"] = LEARNING_RATE * (1.0 - done)
            recent += collector.collect(n_step=ENVS).returns.tolist()
            for _ in range(ENVS // 2):
                learn(agent, target, optimizer, buffer)
                updates += 1
                for slow, fast in zip(target.parameters(), agent.q.parameters(), strict=True):
                    slow.data.lerp_(fast.data, TAU)
            if updates % 2000 == 0 and recent:
                print(
                    f"{collector.collect_step:6d} steps, {len(recent):3d} episodes, mean return {np.mean(recent):6.1f}"
                )
                recent = []
    returns = evaluate(agent, 20, seed + 1)
    print(f"20 episodes without chance: mean return {returns.mean():.1f}, worst {returns.min():.0f}")
    return float(returns.mean())


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--steps", type=int, default=60_000, help="environment steps to learn from")
    parser.add_argument("--seed", type=int, default=0)
    options = parser.parse_args()
    main(options.steps, options.seed)
