"""A training resumed from its checkpoint learns bit for bit as one that never stopped, with rows of any kind."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from samplebatch import (
    Collector,
    HERVectorReplayBuffer,
    MultiAgentCollector,
    MultiAgentReplayBuffer,
    PrioritizedReplayBuffer,
    PrioritizedVectorReplayBuffer,
    ReplayBuffer,
)
from samplebatch.learn import (
    A2C,
    C51,
    CQL,
    DDPG,
    DQN,
    IQL,
    MAPPO,
    PPO,
    QRDQN,
    TD3,
    AutoAlpha,
    BehaviourCloning,
    C51Policy,
    ContinuousActorDeterministic,
    ContinuousActorProbabilistic,
    ContinuousCritic,
    ContinuousDeterministicPolicy,
    DiscreteActor,
    DiscreteActorPolicy,
    DiscreteBCQ,
    DiscreteBCQPolicy,
    DiscreteCritic,
    DiscreteQLearningPolicy,
    DiscreteSAC,
    DuelingCritic,
    ImitationPolicy,
    LinearSchedule,
    MultiAgentOffPolicyAlgorithm,
    MultiAgentOnPolicyAlgorithm,
    Net,
    NoisyLinear,
    OfflineTrainerParams,
    OffPolicyTrainerParams,
    OnPolicyTrainerParams,
    OUNoise,
    ProbabilisticActorPolicy,
    QRDQNPolicy,
    SACPolicy,
    ValueCritic,
    load_checkpoint,
)
from tests.learn.goals import PointReaching, point_reward
from tests.learn.learning import assert_equal_parameters
from tests.learn.tasks import Aim, Match
from tests.learn.teams import SPREAD, actor, adam, joint_critic, spaces_of

ONLINE: dict[str, Any] = {"epoch_num_steps": 40, "collection_step_num_env_steps": 20, "batch_size": 10}


def critics(env: Any) -> dict[str, Any]:
    first, other = (ContinuousCritic.for_space(env.observation_space, env.action_space, [8]) for _ in range(2))
    return {"policy_optim": adam(), "critic": first, "critic2": other, "critic_optim": adam()}


def q_policy(obs: Any, act: Any) -> DiscreteQLearningPolicy:
    explore = LinearSchedule(1.0, 0.1, 60)
    return DiscreteQLearningPolicy(
        model=DiscreteCritic.for_space(Net.for_space(obs, [8]), act), action_space=act, eps_training=explore
    )


def prioritized_dqn() -> Any:
    policy = q_policy(Match.observation_space, Match.action_space)
    algorithm = DQN(policy=policy, optim=adam(), n_step_return_horizon=3, target_update_freq=3)
    buffer = PrioritizedVectorReplayBuffer(60, 2, alpha=0.6, beta=0.4, random_seed=2)
    collector = Collector(policy, [Match] * 2, buffer, seed=1, exploration_noise=True)
    return algorithm, buffer, OffPolicyTrainerParams(training_collector=collector, **ONLINE)


def hindsight_td3() -> Any:
    policy = ContinuousDeterministicPolicy(
        actor=ContinuousActorDeterministic.for_space(
            Net.for_space(PointReaching.observation_space, [8]), PointReaching.action_space
        ),
        action_space=PointReaching.action_space,
        exploration_noise=OUNoise(),
    )
    buffer = HERVectorReplayBuffer(100, 2, point_reward, horizon=12, future_k=4.0, random_seed=2)
    collector = Collector(policy, [PointReaching] * 2, buffer, seed=1, exploration_noise=True)
    algorithm = TD3(policy=policy, **critics(PointReaching))
    return algorithm, buffer, OffPolicyTrainerParams(training_collector=collector, **ONLINE)


def ddpg() -> Any:
    policy = ContinuousDeterministicPolicy(
        actor=ContinuousActorDeterministic.for_space(Net.for_space(Aim.observation_space, [8]), Aim.action_space),
        action_space=Aim.action_space,
        exploration_noise=OUNoise(),
    )
    one_critic = {name: part for name, part in critics(Aim).items() if name != "critic2"}
    buffer = PrioritizedVectorReplayBuffer(60, 2, alpha=0.6, beta=0.4, random_seed=2)
    collector = Collector(policy, [Aim] * 2, buffer, seed=1, exploration_noise=True)
    return DDPG(policy=policy, **one_critic), buffer, OffPolicyTrainerParams(training_collector=collector, **ONLINE)


def discrete_sac() -> Any:
    networks = [
        head.for_space(Net.for_space(Match.observation_space, [8]), Match.action_space)
        for head in (DiscreteActor, DiscreteCritic)
    ]
    policy = DiscreteActorPolicy(actor=networks[0], action_space=Match.action_space)
    algorithm = DiscreteSAC(
        policy=policy,
        policy_optim=adam(),
        critic=networks[1],
        critic_optim=adam(),
        alpha=AutoAlpha(0.5, 0.0, adam()),
    )
    buffer = PrioritizedVectorReplayBuffer(60, 2, alpha=0.6, beta=0.4, random_seed=2)
    collector = Collector(policy, [Match] * 2, buffer, seed=1)
    return algorithm, buffer, OffPolicyTrainerParams(training_collector=collector, **ONLINE)


def rainbow() -> Any:
    obs, act = Match.observation_space, Match.action_space
    body = Net.for_space(obs, [8], linear_layer=NoisyLinear)
    model = DuelingCritic.for_space(body, act, num_atoms=5, linear_layer=NoisyLinear)
    policy = C51Policy(model=model, action_space=act, num_atoms=5, v_min=0.0, v_max=8.0)
    algorithm = C51(policy=policy, optim=adam(), n_step_return_horizon=3, target_update_freq=3)
    buffer = PrioritizedVectorReplayBuffer(60, 2, alpha=0.6, beta=0.4, random_seed=2)
    collector = Collector(policy, [Match] * 2, buffer, seed=1, exploration_noise=True)
    return algorithm, buffer, OffPolicyTrainerParams(training_collector=collector, **ONLINE)


def qrdqn() -> Any:
    model = Net(3, 3, [8], num_atoms=4)
    policy = QRDQNPolicy(model=model, action_space=Match.action_space, eps_training=0.2)
    algorithm = QRDQN(policy=policy, optim=adam(), target_update_freq=3)
    buffer = PrioritizedVectorReplayBuffer(60, 2, alpha=0.6, beta=0.4, random_seed=2)
    collector = Collector(policy, [Match] * 2, buffer, seed=1, exploration_noise=True)
    return algorithm, buffer, OffPolicyTrainerParams(training_collector=collector, **ONLINE)


def independent_dqn() -> Any:
    (obs, *_), (act, *_) = spaces_of(SPREAD)
    learners = {"agent": DQN(policy=q_policy(obs, act), optim=adam(), target_update_freq=5)}
    algorithm = MultiAgentOffPolicyAlgorithm(learners)
    buffer = MultiAgentReplayBuffer(200, kind=PrioritizedReplayBuffer, alpha=0.6, beta=0.4, seed=2)
    collector = MultiAgentCollector(algorithm.policy, SPREAD, buffer, num_envs=2, seed=1, exploration_noise=True)
    return algorithm, buffer, OffPolicyTrainerParams(training_collector=collector, **ONLINE)


def independent_ppo() -> Any:
    (obs, *_), (act, *_) = spaces_of(SPREAD)
    learner = PPO(policy=actor(obs, act), critic=ValueCritic(Net.for_space(obs, [8])), optim=adam())
    return on_policy(MultiAgentOnPolicyAlgorithm({"agent": learner}))


def independent_a2c() -> Any:
    (obs, *_), (act, *_) = spaces_of(SPREAD)
    learner = A2C(
        policy=actor(obs, act), critic=ValueCritic(Net.for_space(obs, [8])), optim=adam(), return_scaling=True
    )
    return on_policy(MultiAgentOnPolicyAlgorithm({"agent": learner}))


def mappo() -> Any:
    (obs, *_), (act, *_) = spaces_of(SPREAD)
    return on_policy(MAPPO(policies={"agent": actor(obs, act)}, critic=joint_critic(SPREAD), optim=adam()))


def on_policy(algorithm: Any) -> Any:
    """Return a team's algorithm, its buffer and its training parameters."""
    buffer = MultiAgentReplayBuffer(200)
    collector = MultiAgentCollector(algorithm.policy, SPREAD, buffer, num_envs=2, seed=1)
    params = OnPolicyTrainerParams(training_collector=collector, update_step_num_repetitions=2, **ONLINE)
    return algorithm, buffer, params


def cql() -> Any:
    body = Net.for_space(Aim.observation_space, [8])
    policy = SACPolicy(
        actor=ContinuousActorProbabilistic.for_space(body, Aim.action_space, conditioned_sigma=True),
        action_space=Aim.action_space,
    )
    algorithm = CQL(policy=policy, alpha=AutoAlpha(-1.0, 0.0, adam()), num_repeat_actions=2, **critics(Aim))
    return offline(algorithm, Aim)


def iql() -> Any:
    body, value = (Net.for_space(Aim.observation_space, [8]) for _ in range(2))
    policy = ProbabilisticActorPolicy(
        actor=ContinuousActorProbabilistic.for_space(body, Aim.action_space, max_action=1.0),
        action_space=Aim.action_space,
    )
    return offline(IQL(policy=policy, value=ValueCritic(value), **critics(Aim)), Aim)


def discrete_bcq() -> Any:
    heads = [
        head.for_space(Net.for_space(Match.observation_space, [8]), Match.action_space)
        for head in (DiscreteCritic, DiscreteActor)
    ]
    policy = DiscreteBCQPolicy(model=heads[0], imitator=heads[1], action_space=Match.action_space)
    return offline(DiscreteBCQ(policy=policy, optim=adam(), target_update_freq=3), Match)


def behaviour_cloning() -> Any:
    head = DiscreteActor.for_space(Net.for_space(Match.observation_space, [8]), Match.action_space)
    policy = ImitationPolicy(actor=head, action_space=Match.action_space)
    return offline(BehaviourCloning(policy=policy, optim=adam()), Match)


def offline(algorithm: Any, env: Any) -> Any:
    """Return an algorithm, random rows of an environment, and the parameters of offline training."""
    buffer = ReplayBuffer(50, random_seed=2)
    with Collector("random", env, buffer, seed=1) as collector:
        collector.collect(n_step=50)
    return algorithm, buffer, OfflineTrainerParams(buffer=buffer, epoch_num_steps=4, batch_size=10)


ONLINE_RUNS = [
    prioritized_dqn,
    hindsight_td3,
    ddpg,
    discrete_sac,
    rainbow,
    qrdqn,
    independent_dqn,
    independent_ppo,
    independent_a2c,
    mappo,
]
OFFLINE_RUNS = [cql, iql, discrete_bcq, behaviour_cloning]


@pytest.mark.parametrize("make", [*ONLINE_RUNS, *OFFLINE_RUNS])
def test_a_resumed_training_equals_an_uninterrupted_one(make: Any, tmp_path: Path) -> None:
    def trainer(max_epochs: int, folder: Path | None = None) -> tuple[Any, Any]:
        torch.manual_seed(0)
        algorithm, buffer, params = make()
        params.max_epochs, params.checkpoint_dir = max_epochs, folder
        params.verbose = params.show_progress = False
        return algorithm.create_trainer(params), buffer

    uninterrupted, rows = trainer(2)
    uninterrupted.run()
    sampled = torch.rand(3)
    trainer(1, tmp_path)[0].run()
    resumed, own_rows = trainer(2)
    assert load_checkpoint(resumed, tmp_path, allow_pickle=True) is None
    before = [tensor.clone() for tensor in resumed.algorithm.parameters()]
    resumed.run()
    assert torch.equal(torch.rand(3), sampled)
    assert any(not torch.equal(*pair) for pair in zip(before, resumed.algorithm.parameters(), strict=True))
    assert_equal_parameters(resumed.algorithm, uninterrupted.algorithm)
    if len(rows):
        for first, other in zip(indices_of(rows), indices_of(own_rows), strict=True):
            np.testing.assert_array_equal(first, other)


def indices_of(buffer: Any) -> list[Any]:
    """Sample slots of a buffer, or of each policy's buffer."""
    parts = buffer.buffers.values() if isinstance(buffer, MultiAgentReplayBuffer) else [buffer]
    return [part.sample_indices(20) for part in parts]
