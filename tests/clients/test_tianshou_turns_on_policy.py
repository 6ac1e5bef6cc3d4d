"""Agents that take turns in one environment, with on-policy algorithms: Tianshou's scripts with changed imports."""

from __future__ import annotations

import copy
import warnings
from typing import Any

import numpy as np
import pytest

from samplebatch import Batch, Collector, CollectStats, MultiAgentCollector, ReplayBuffer, VectorReplayBuffer
from samplebatch.errors import ArgumentError, EmptyBufferError, PolicyNotFoundError
from tests.clients.test_tianshou_turns import ACTIONS, AGENTS, Game
from tests.optional import torch

with warnings.catch_warnings():
    warnings.simplefilter("ignore")
    import tianshou.algorithm as peers
    from tianshou.algorithm.optim import AdamOptimizerFactory as PeerAdam
    from tianshou.env import DummyVectorEnv
    from tianshou.env.pettingzoo_env import PettingZooEnv

from samplebatch.learn import (
    PPO,
    AdamOptimizerFactory,
    DiscreteActor,
    DiscreteCritic,
    MultiAgentOnPolicyAlgorithm,
    Net,
    OnPolicyTrainerParams,
    ProbabilisticActorPolicy,
    Reinforce,
)


class CompleteGame(Game):
    """The game with PettingZoo's bookkeeping of accumulated rewards and dead agents."""

    def step(self, action: Any) -> None:
        agent = self.agent_selection
        if self.terminations[agent]:
            self._was_dead_step(action)
            return
        self._cumulative_rewards[agent] = 0.0
        super().step(action)
        self._accumulate_rewards()


def policy() -> Any:
    actor = DiscreteActor(preprocess_net=Net(2, hidden_sizes=[16]), action_shape=3)
    return ProbabilisticActorPolicy(actor=actor, dist_fn=torch.distributions.Categorical, action_space=ACTIONS)


def ppo(**options: Any) -> PPO:
    critic = DiscreteCritic(preprocess_net=Net(2, hidden_sizes=[16]))
    return PPO(policy=policy(), critic=critic, optim=AdamOptimizerFactory(lr=0.01), gamma=0.9, **options)


def random_turns(seed: int, rings: int, count: int) -> VectorReplayBuffer:
    """Fill rings with random turns of both agents; one ring has overwritten its oldest rows."""
    rng = np.random.default_rng(seed)
    buffer = VectorReplayBuffer(12 * rings, rings)
    for ring in range(rings):
        for t in range(count + 7 * ring):
            agent, after = (AGENTS[i] for i in rng.integers(0, 2, 2))
            buffer.add(
                Batch(
                    obs=Batch(agent_id=np.array([agent]), obs=np.array([[ring, t]], np.float32)),
                    act=rng.integers(0, 3, 1),
                    rew=rng.normal(size=(1, 2)),
                    terminated=rng.random(1) < 0.2,
                    truncated=rng.random(1) < 0.1,
                    obs_next=Batch(agent_id=np.array([after]), obs=np.array([[ring, t + 0.5]], np.float32)),
                ),
                buffer_ids=[ring],
            )
    return buffer


def expected_turns(buffer: VectorReplayBuffer, agent: str) -> list[tuple[Any, ...]]:
    """Return the turns of an agent: observation, reward, flags and next observation of each turn."""
    actual = []
    for ring in buffer.buffers:
        episode: list[Any] = []
        pending: list[Any] = []
        for index in ring.sample_indices(0):
            row = ring[index]
            if row.obs.agent_id == agent:
                pending.append([row.obs.obs.tolist(), 0.0, False, False, None])
                if len(pending) > 1:
                    pending[-2][4] = row.obs.obs.tolist()
            if pending:
                pending[-1][1] += row.rew[AGENTS.index(agent)]
            if row.done:
                if pending:
                    pending[-1][2:] = [bool(row.terminated), bool(row.truncated), row.obs_next.obs.tolist()]
                episode += pending
                pending = []
        if len(pending) > 1:
            pending[-2][3] = True
        actual += episode + pending[:-1]
    return [tuple(turn) for turn in actual]


@pytest.mark.parametrize("seed", range(8))
@pytest.mark.parametrize(("rings", "count"), [(1, 9), (3, 8)])
def test_a_turn_ends_at_the_next_turn_of_the_agent(seed: int, rings: int, count: int) -> None:
    buffer = random_turns(seed, rings, count)
    algorithm = MultiAgentOnPolicyAlgorithm({agent: ppo() for agent in AGENTS})
    for agent in AGENTS:
        turns = algorithm._turns_of(buffer, agent)
        columns = (turns.obs, turns.rew, turns.terminated, turns.truncated, turns.obs_next)
        actual = [tuple(np.asarray(column)[i].tolist() for column in columns) for i in range(len(turns.rew))]
        expected = expected_turns(buffer, agent)
        assert [turn[:1] + turn[2:] for turn in actual] == [turn[:1] + turn[2:] for turn in expected]
        assert [turn[1] for turn in actual] == pytest.approx([turn[1] for turn in expected])


def test_turns_agree_with_a_multi_agent_collector() -> None:
    torch.manual_seed(0)
    policies = {agent: policy() for agent in AGENTS}
    for part in policies.values():
        part.deterministic_eval = True
        part.eval()
    algorithm = MultiAgentOnPolicyAlgorithm(
        {agent: Reinforce(policy=item, optim=AdamOptimizerFactory()) for agent, item in policies.items()}
    )
    envs = DummyVectorEnv([lambda: PettingZooEnv(CompleteGame(False))])
    with Collector(algorithm.policy, envs, ReplayBuffer(100)) as collector:
        collector.collect(n_step=18)
        buffer = collector.buffer
    with MultiAgentCollector(policies, [lambda: CompleteGame(False)]) as collector:
        steps = collector.collect(n_episode=3).batch
    for agent in AGENTS:
        turns, part = algorithm._turns_of(buffer, agent), steps[agent]
        assert turns.obs.obs.tolist() == part["obs"].tolist()
        assert turns.act.tolist() == part["actions"].tolist()
        assert turns.rew.tolist() == part["rewards"].tolist()
        assert turns.terminated.tolist() == part["terminateds"].tolist()


def test_an_update_equals_separate_updates_of_each_algorithm() -> None:
    torch.manual_seed(0)
    buffer = random_turns(1, 3, 10)
    algorithm = MultiAgentOnPolicyAlgorithm(algorithms=[ppo(), ppo()], env=PettingZooEnv(Game(False)))
    alone = copy.deepcopy(algorithm)
    torch.manual_seed(1)
    losses = algorithm.update(buffer, 4, 2).get_loss_stats_dict()
    torch.manual_seed(1)
    for agent in AGENTS:
        turns = alone._turns_of(buffer, agent)
        rows = ReplayBuffer(len(turns.rew))
        rows.extend(turns)
        expected = alone.get_algorithm(agent).update(rows, 4, 2).get_loss_stats_dict()
        assert {name: losses[f"{agent}/{name}"] for name in expected} == expected
    for actual, reference in zip(algorithm.parameters(), alone.parameters(), strict=True):
        assert torch.equal(actual, reference)


@pytest.mark.parametrize("theirs", [False, True], ids=["ours", "an opponent of Tianshou"])
def test_a_script_of_two_agents_trains(theirs: bool) -> None:
    torch.manual_seed(0)
    learner = ppo(max_grad_norm=0.5)
    if theirs:
        opponent: Any = peers.Reinforce(policy=policy(), optim=PeerAdam(lr=1e-3))
    else:
        opponent = ppo()
    env = PettingZooEnv(Game(False))
    algorithm = MultiAgentOnPolicyAlgorithm(algorithms=[opponent, learner], env=env)
    assert algorithm.get_algorithm("south") is learner
    envs = [DummyVectorEnv([lambda: PettingZooEnv(Game(False)) for _ in range(4)]) for _ in range(2)]
    train = Collector[CollectStats](algorithm, envs[0], VectorReplayBuffer(400, 4))
    test = Collector[CollectStats](algorithm, envs[1])
    train.collect(n_step=8, reset_before_collect=True)
    train.reset_buffer()
    result = algorithm.run_training(
        OnPolicyTrainerParams(
            training_collector=train,
            test_collector=test,
            max_epochs=2,
            epoch_num_steps=1000,
            collection_step_num_env_steps=100,
            test_step_num_episodes=8,
            batch_size=32,
            update_step_num_repetitions=4,
            multi_agent_return_reduction=lambda returns: returns[:, 1],
            verbose=False,
        )
    )
    assert learner.updates == 20
    with Collector(algorithm, envs[1]) as collector:
        moves = collector.collect(n_episode=8).batch
        scored = np.asarray(moves["actions"])[np.asarray(moves["obs"]["agent_id"]) == "south"] == 2
    assert scored.mean() > 0.7
    assert result.best_reward > -3.0


def test_mistakes_are_reported() -> None:
    env = PettingZooEnv(Game(False))
    with pytest.raises(ArgumentError, match=r"env must have one agent per algorithm, .* got 2 agents and 1 algorithms"):
        MultiAgentOnPolicyAlgorithm(algorithms=[ppo()], env=env)
    algorithm = MultiAgentOnPolicyAlgorithm(algorithms=[ppo(), ppo()], env=env)
    with pytest.raises(EmptyBufferError):
        algorithm.update(ReplayBuffer(10), 4)
    plain = ReplayBuffer(10)
    plain.add(Batch(obs=np.zeros(2), act=0, rew=0.0, terminated=False, truncated=False, obs_next=np.zeros(2)))
    with pytest.raises(ArgumentError, match=r"observations must have 'agent_id', .* got one array; otherwise use Mu"):
        algorithm.update(plain, 4)
    with pytest.raises(PolicyNotFoundError, match="no policy 'south'"):
        MultiAgentOnPolicyAlgorithm({"north": ppo()}).update(random_turns(0, 1, 10), 4)
    three = MultiAgentOnPolicyAlgorithm({agent: ppo() for agent in (*AGENTS, "west")})
    with pytest.raises(ArgumentError, match="column 'rew' must have a number for each of 3 agents, got rows of shape"):
        three.update(random_turns(0, 1, 10), 4)
