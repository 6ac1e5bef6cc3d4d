"""Agents that take turns in one environment: Tianshou's scripts of several agents with changed imports."""

from __future__ import annotations

import warnings
from typing import Any, ClassVar

import numpy as np
import pytest
from gymnasium import spaces

from samplebatch import Batch, Collector, CollectStats, ReplayBuffer, VectorReplayBuffer
from samplebatch.errors import ArgumentError, PolicyNotFoundError, PolicySpecError
from tests.optional import torch

pytest.importorskip("tianshou.data")
pytest.importorskip("pettingzoo")

with warnings.catch_warnings():
    warnings.simplefilter("ignore")
    import tianshou.algorithm as peers
    import tianshou.data
    from pettingzoo.utils.env import AECEnv
    from tianshou.algorithm.modelfree.dqn import DiscreteQLearningPolicy as PeerPolicy
    from tianshou.algorithm.optim import AdamOptimizerFactory as PeerAdam
    from tianshou.env import DummyVectorEnv
    from tianshou.env.pettingzoo_env import PettingZooEnv
    from tianshou.utils.net.common import Net as PeerNet
    from tianshou.utils.torch_utils import policy_within_training_step

from samplebatch.learn import (
    DQN,
    AdamOptimizerFactory,
    DiscreteQLearningPolicy,
    MultiAgentOffPolicyAlgorithm,
    MultiAgentPolicy,
    Net,
    OffPolicyTrainerParams,
)

AGENTS = ["north", "south"]
ACTIONS = spaces.Discrete(3)


class Game(AECEnv):  # type: ignore[misc]
    """Two agents alternate for six moves; the last observation number counts moves, and action 2 scores."""

    metadata: ClassVar[dict[str, Any]] = {"name": "game"}

    def __init__(self, masked: bool = True) -> None:
        super().__init__()
        self.possible_agents = AGENTS
        self.masked = masked
        self.render_mode = None

    def observation_space(self, agent: str) -> spaces.Space[Any]:
        box = spaces.Box(-1, 10, (2,))
        mask = spaces.Box(0, 1, (3,), np.int8)
        return spaces.Dict(observation=box, action_mask=mask) if self.masked else box

    def action_space(self, agent: str) -> spaces.Space[Any]:
        return ACTIONS

    def reset(self, seed: int | None = None, options: Any = None) -> None:
        self.agents = list(AGENTS)
        self.moves = 0
        self.agent_selection = AGENTS[0]
        for name, value in {"rewards": 0.0, "_cumulative_rewards": 0.0, "terminations": False}.items():
            setattr(self, name, dict.fromkeys(AGENTS, value))
        self.truncations, self.infos = dict.fromkeys(AGENTS, False), {agent: {} for agent in AGENTS}

    def observe(self, agent: str) -> Any:
        obs = np.array([AGENTS.index(agent), self.moves], np.float32)
        # An agent may not repeat its move of the number of moves so far.
        mask = np.array([self.moves % 3 != action for action in range(3)], np.int8)
        return {"observation": obs, "action_mask": mask} if self.masked else obs

    def step(self, action: int) -> None:
        assert not self.masked or action != self.moves % 3
        score = float(action == 2)
        self.rewards = {agent: score if agent == self.agent_selection else -score for agent in AGENTS}
        self.moves += 1
        self.terminations = dict.fromkeys(AGENTS, self.moves == 6)
        self.agent_selection = AGENTS[self.moves % 2]


def q_policy(net: Any, kind: Any = DiscreteQLearningPolicy) -> Any:
    return kind(model=net, action_space=ACTIONS, eps_training=0.5, eps_inference=0.0)


def dqn(**options: Any) -> DQN:
    return DQN(policy=q_policy(Net(2, 3, [8])), optim=AdamOptimizerFactory(lr=0.01), gamma=0.9, **options)


def steps(count: int, form: Any, mask: bool) -> list[Any]:
    """Return random steps of two alternating agents in a library's batches."""
    rng = np.random.default_rng(0)
    rows = []
    for t in range(count):
        obs, after = ({"agent_id": AGENTS[(t + move) % 2], "obs": rng.normal(size=2)} for move in (0, 1))
        if mask:
            obs["mask"], after["mask"] = rng.random((2, 3)) < 0.8
            obs["mask"][0] = after["mask"][0] = True
        end = t % 5 == 4
        flags = {"terminated": end, "truncated": False, "done": end}
        rows.append(form(obs=form(obs), act=0, rew=rng.normal(size=2), obs_next=form(after), info=form(), **flags))
    return rows


@pytest.mark.parametrize("mask", [True, False], ids=["mask", "no mask"])
@pytest.mark.parametrize("n_step", [1, 3])
def test_an_update_agrees_with_tianshou(n_step: int, mask: bool) -> None:
    torch.manual_seed(0)
    env = PettingZooEnv(Game(mask))
    ours = [dqn(n_step_return_horizon=n_step) for _ in AGENTS]
    theirs = []
    for learner in ours:
        net = PeerNet(state_shape=2, action_shape=3, hidden_sizes=[8])
        net.load_state_dict(learner.policy.model.state_dict())
        policy = q_policy(net, PeerPolicy)
        options: Any = {"optim": PeerAdam(lr=0.01), "gamma": 0.9, "n_step_return_horizon": n_step}
        theirs.append(peers.DQN(policy=policy, **options))
    buffer, peer_buffer = ReplayBuffer(40), tianshou.data.ReplayBuffer(40)
    for row, peer_row in zip(steps(23, Batch, mask), steps(23, tianshou.data.Batch, mask), strict=True):
        buffer.add(row)
        peer_buffer.add(peer_row)
    several = MultiAgentOffPolicyAlgorithm(algorithms=ours, env=env)
    peer_several = peers.MultiAgentOffPolicyAlgorithm(algorithms=theirs, env=env)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        losses = [several.update(buffer, 0).get_loss_stats_dict() for _ in range(3)]
        with policy_within_training_step(peer_several.policy):
            peer_losses = [
                peer_several.update(buffer=peer_buffer, sample_size=0).get_loss_stats_dict() for _ in range(3)
            ]
    for actual, expected in zip(losses, peer_losses, strict=True):
        assert actual.keys() == expected.keys() == {"north/loss", "south/loss"}
        assert list(actual.values()) == pytest.approx(list(expected.values()), rel=1e-5)
    for learner, peer in zip(ours, theirs, strict=True):
        for actual, expected in zip(learner.policy.parameters(), peer.policy.parameters(), strict=True):
            torch.testing.assert_close(actual, expected)


@pytest.mark.parametrize("masked", [True, False], ids=["mask", "no mask"])
def test_a_script_of_two_agents_trains(masked: bool) -> None:
    torch.manual_seed(0)
    learner = dqn(n_step_return_horizon=2, target_update_freq=10)
    env = PettingZooEnv(Game(masked))
    if masked:
        opponent: Any = peers.MARLRandomDiscreteMaskedOffPolicyAlgorithm(action_space=env.action_space)
    else:
        opponent = dqn()
    algorithm = MultiAgentOffPolicyAlgorithm(algorithms=[opponent, learner], env=env)
    assert algorithm.get_algorithm("south") is learner
    envs = [DummyVectorEnv([lambda: PettingZooEnv(Game(masked)) for _ in range(3)]) for _ in range(2)]
    train = Collector[CollectStats](algorithm, envs[0], VectorReplayBuffer(300, 3), exploration_noise=True)
    test = Collector[CollectStats](algorithm, envs[1], exploration_noise=True)
    stats = train.collect(n_step=30, reset_before_collect=True)
    assert stats.returns.shape == (stats.n_collected_episodes, 2)
    rows = train.buffer[train.buffer.sample_indices(0)]
    assert rows.rew.shape == (30, 2)
    assert (rows.obs.agent_id == np.array(AGENTS)[(rows.obs.obs[:, 1] % 2).astype(int)]).all()
    # The score of a move belongs to the agent that moves.
    moved = rows.rew[np.arange(30), (rows.obs.obs[:, 1] % 2).astype(int)]
    assert (moved == (rows.act == 2)).all()
    result = algorithm.run_training(
        OffPolicyTrainerParams(
            training_collector=train,
            test_collector=test,
            max_epochs=1,
            epoch_num_steps=120,
            collection_step_num_env_steps=12,
            test_step_num_episodes=4,
            batch_size=16,
            update_step_num_gradient_steps_per_sample=0.25,
            multi_agent_return_reduction=lambda returns: returns[:, 1],
            verbose=False,
        )
    )
    assert learner.updates == 30
    # South moves three times: at most three times a point, none for three scores of north.
    assert -3.0 <= result.best_reward <= 3.0


def test_several_numbers_per_reward_add_up_over_chunks() -> None:
    policies = MultiAgentPolicy({agent: q_policy(Net(2, 3)) for agent in AGENTS})
    envs = DummyVectorEnv([lambda: PettingZooEnv(Game()) for _ in range(2)])
    with Collector(policies, envs, VectorReplayBuffer(100, 2), exploration_noise=True, seed=1) as collector:
        returns = [collector.collect(n_step=4).returns for _ in range(6)]
        buffer = collector.buffer
        actual = np.concatenate([part for part in returns if len(part)])
        rewards = [part[part.sample_indices(0)].rew for part in buffer.buffers]
    assert actual.shape == (4, 2)
    by_episode = np.concatenate([part.reshape(2, 6, 2).sum(1) for part in rewards])
    assert sorted(map(tuple, actual)) == sorted(map(tuple, by_episode))


def test_mistakes_with_agents_that_take_turns_are_reported() -> None:
    env = PettingZooEnv(Game())
    with pytest.raises(ArgumentError, match=r"env must have one agent per algorithm, .* got 2 agents and 1 algorithms"):
        MultiAgentOffPolicyAlgorithm(algorithms=[dqn()], env=env)
    with pytest.raises(ArgumentError, match="got NoneType; pass algorithms by policy id"):
        MultiAgentOffPolicyAlgorithm(algorithms=[dqn()])
    algorithm = MultiAgentOffPolicyAlgorithm({"north": dqn()})
    plain = ReplayBuffer(10)
    plain.add(Batch(obs=np.zeros(2), act=0, rew=0.0, terminated=False, truncated=False, obs_next=np.zeros(2)))
    with pytest.raises(ArgumentError, match=r"observations must have 'agent_id', .* got one array; otherwise use Mu"):
        algorithm.update(plain, 4)
    turns = ReplayBuffer(10)
    for row in steps(4, Batch, False):
        turns.add(row)
    with pytest.raises(PolicyNotFoundError, match="no policy 'south'"):
        algorithm.update(turns, 0)
    both = MultiAgentOffPolicyAlgorithm(dict.fromkeys(AGENTS, dqn()) | {"west": dqn()})
    with pytest.raises(ArgumentError, match="column 'rew' must have a number for each of 3 agents, got rows of shape"):
        both.update(turns, 0)

    def recurrent(batch: Any) -> Batch:
        return Batch(act=np.zeros(len(batch)), state=Batch(h=np.zeros(len(batch))))

    remembers: Any = MultiAgentPolicy(dict.fromkeys(AGENTS, recurrent))  # type: ignore[arg-type]
    with pytest.raises(PolicySpecError, match="agents that take turns must have no state, got a state of 'north'"):
        remembers(Batch.stack(steps(2, Batch, False)))
