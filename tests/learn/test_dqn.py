"""DQN updates as Tianshou's does, explores by its schedule, keeps to masks, and learns."""

from __future__ import annotations

import copy
from typing import Any

import gymnasium
import numpy as np
import pytest
import torch
from gymnasium import spaces
from torch import nn

from samplebatch import Batch, Collector, VectorReplayBuffer
from samplebatch.errors import ArgumentError, PolicySpecError
from samplebatch.learn import (
    DQN,
    AdamOptimizerFactory,
    DiscreteCritic,
    DiscreteQLearningPolicy,
    DuelingCritic,
    LinearSchedule,
    Net,
    TorchOptimizerFactory,
    policy_within_training_step,
)
from tests.learn.learning import CHOICES, OBS, assert_equal_parameters, assert_goes_on, filled, seeded
from tests.learn.oracle import Asked, their_buffer, update_theirs
from tests.learn.tasks import Masked, Match


def make(net: nn.Module, **options: Any) -> DQN:
    policy = DiscreteQLearningPolicy(model=net, action_space=CHOICES, observation_space=OBS)
    return DQN(policy=policy, optim=options.pop("optim", AdamOptimizerFactory(lr=0.01)), **options)


def make_theirs(net: nn.Module, **options: Any) -> Any:
    dqn = pytest.importorskip("tianshou.algorithm.modelfree.dqn")
    factory = pytest.importorskip("tianshou.algorithm.optim").AdamOptimizerFactory(lr=0.01)
    policy = dqn.DiscreteQLearningPolicy(model=Asked(net), action_space=CHOICES)
    return dqn.DQN(policy=policy, optim=factory, **options)


@pytest.mark.parametrize(
    "options",
    [
        {},
        {"n_step_return_horizon": 3, "gamma": 0.9},
        {"target_update_freq": 2},
        {"target_update_freq": 2, "is_double": False, "n_step_return_horizon": 3},
        {"target_update_freq": 3, "huber_loss_delta": 0.5},
    ],
)
def test_updates_agree_with_tianshou(options: dict[str, Any]) -> None:
    net = seeded(0, 3, 16, 4)
    theirs = make_theirs(net, **options)
    ours = make(net, **options)
    steps: dict[str, Any] = {"seed": 1, "steps": 40, "envs": 2, "actions": CHOICES}
    buffer = filled(**steps)
    expected = update_theirs(theirs, 5, buffer=their_buffer("VectorReplayBuffer", **steps), sample_size=0)
    assert [ours.update(buffer, 0).loss for _ in range(5)] == pytest.approx(expected, rel=1e-5)  # type: ignore[attr-defined]
    assert_equal_parameters(ours.policy.model, theirs.policy.model.net, atol=1e-6)
    if ours.model_old is not None:
        assert_equal_parameters(ours.model_old, theirs.model_old, atol=1e-6)


def test_priorities_agree_with_tianshou() -> None:
    net = seeded(0, 3, 16, 4)
    theirs = make_theirs(net, n_step_return_horizon=2)
    ours = make(net, n_step_return_horizon=2)
    steps: dict[str, Any] = {"seed": 1, "steps": 40, "envs": 2, "actions": CHOICES, "alpha": 0.6, "beta": 0.4}
    buffer, their = filled(**steps), their_buffer("PrioritizedVectorReplayBuffer", **steps)
    update_theirs(theirs, 4, buffer=their, sample_size=0)
    for _ in range(4):
        ours.update(buffer, 0)
    assert_equal_parameters(ours.policy.model, theirs.policy.model.net, atol=1e-6)
    np.testing.assert_allclose(buffer.weight[:], their.weight[np.arange(80)], rtol=1e-4)


def test_absolute_errors_of_the_huber_loss_are_weighted() -> None:
    steps: dict[str, Any] = {"alpha": 0.6, "beta": 1.0, "weight_norm": True}
    buffer = filled(**steps)
    buffer.update_weight(np.arange(80), np.linspace(0.1, 4.0, 80))
    algorithm = make(seeded(0, 3, 4), huber_loss_delta=0.5, gamma=0.0)
    batch, _ = buffer.sample(0)
    values = algorithm.policy(batch).logits[np.arange(80), batch.act]
    losses = nn.functional.huber_loss(values, torch.from_numpy(batch.rew).float(), reduction="none", delta=0.5)
    expected = (losses * torch.from_numpy(batch.weight).float()).mean().item()
    assert algorithm.update(buffer, 0).loss == pytest.approx(expected, rel=1e-5)  # type: ignore[attr-defined]


def test_a_dueling_head_centres_its_advantages() -> None:
    torch.manual_seed(0)
    net = DuelingCritic.for_space(Net.for_space(OBS, [8]), CHOICES)
    obs = torch.randn(5, 3)
    values, _ = net(obs)
    expected = net.value(net.preprocess(obs)[0])[:, 0]
    torch.testing.assert_close(values.mean(-1), expected)


def test_values_of_masked_actions_are_below_all_others() -> None:
    policy = DiscreteQLearningPolicy(model=nn.Identity(), action_space=CHOICES)
    mask = np.array([[1, 0, 0, 1], [1, 1, 1, 0]])
    result = policy(Batch(obs={"obs": np.array([[-9.0, 5.0, 1.0, -8.0], [0.0, 1.0, 2.0, 3.0]]), "mask": mask}))
    assert result.act.tolist() == [3, 2]
    assert (result.logits[torch.from_numpy(mask) == 0] < -9.0).all()


@pytest.mark.parametrize("scale", [1e7, 1e9, 1e30])
def test_large_values_do_not_hide_the_mask(scale: float) -> None:
    policy = DiscreteQLearningPolicy(model=nn.Identity(), action_space=CHOICES)
    obs = {"obs": scale * np.array([[-1.0, -1.0, -1.0, -1.0], [4.0, 3.0, 2.0, 1.0]]), "mask": [[0, 0, 0, 1]] * 2}
    result = policy(Batch(obs={name: np.array(values) for name, values in obs.items()}))
    assert result.act.tolist() == [3, 3]
    assert result.logits.isfinite().all()


def test_a_mask_without_actions_is_rejected_by_exploration() -> None:
    policy = DiscreteQLearningPolicy(model=nn.Identity(), action_space=CHOICES, eps_inference=1.0)
    batch = Batch(obs={"obs": np.zeros((2, 4)), "mask": np.array([[1, 0, 0, 0], [0, 0, 0, 0]])})
    with pytest.raises(ArgumentError, match="a mask must allow an action, got none in row 1"):
        policy.add_exploration_noise(np.zeros(2, np.int64), batch)


@pytest.mark.parametrize(("within", "share"), [(True, 0.5), (False, 0.1)])
def test_random_actions_replace_some(within: bool, share: float) -> None:
    torch.manual_seed(0)
    policy = DiscreteQLearningPolicy(model=nn.Identity(), action_space=CHOICES, eps_training=0.5, eps_inference=0.1)
    batch = Batch(obs=np.zeros((8000, 4), np.float32))
    with policy_within_training_step(policy, within):
        acts = policy.add_exploration_noise(np.zeros(8000, np.int64), batch)
    # A quarter of the random ones is the best action again.
    assert (acts != 0).mean() == pytest.approx(share * 0.75, abs=0.02)


def test_the_seed_document_steps_an_environment_with_the_action() -> None:
    env = gymnasium.make("CartPole-v1")
    policy = DiscreteQLearningPolicy(model=seeded(0, 4, 2), action_space=env.action_space)
    obs, _ = env.reset(seed=1)
    steps, done = 0, False
    while not done:
        batch = Batch(obs=[obs])
        act = policy(batch).act[0]
        obs, _, terminated, truncated, _ = env.step(act)
        steps, done = steps + 1, terminated or truncated
    assert isinstance(act, np.integer)
    assert steps > 1


def test_random_actions_respect_the_mask() -> None:
    policy = DiscreteQLearningPolicy(model=nn.Identity(), action_space=CHOICES, eps_inference=1.0)
    mask = np.tile([[0, 1, 0, 1]], (500, 1))
    acts = policy.add_exploration_noise(np.ones(500, np.int64), Batch(obs={"obs": np.zeros((500, 4)), "mask": mask}))
    assert set(acts.tolist()) == {1, 3}


def test_a_schedule_follows_the_steps_collected_and_is_part_of_the_state() -> None:
    policy = DiscreteQLearningPolicy(
        model=nn.Linear(4, 4), action_space=CHOICES, eps_training=LinearSchedule(1.0, 0.0, 200)
    )
    batch = Batch(obs=np.zeros((100, 4), np.float32))
    with policy_within_training_step(policy):
        shares = [(policy.add_exploration_noise(np.full(100, 9), batch) != 9).mean() for _ in range(3)]
    assert shares[0] == 1.0
    assert 0.2 < shares[1] < 0.8
    assert shares[2] == 0.0
    again = copy.deepcopy(policy)
    again._steps.zero_()
    again.load_state_dict(policy.state_dict())
    with policy_within_training_step(again):
        assert (again.add_exploration_noise(np.full(100, 9), batch) == 9).all()


def test_dqn_resumes_bit_for_bit() -> None:
    buffer = filled(alpha=0.6, beta=0.4)

    def fresh(seed: int) -> DQN:
        return make(seeded(seed, 3, 8, 4), target_update_freq=2, n_step_return_horizon=2)

    def update(algorithm: DQN) -> None:
        # Priorities are the buffer's: both must begin with the same.
        buffer.update_weight(np.arange(80), 1.0)
        for _ in range(3):
            algorithm.update(buffer, 0)

    assert_goes_on(fresh(0), fresh(1), update)


@pytest.mark.parametrize(
    ("options", "name"),
    [
        ({"gamma": 1.5}, "gamma"),
        ({"n_step_return_horizon": 0}, "n_step_return_horizon"),
        ({"target_update_freq": -1}, "target_update_freq"),
        ({"huber_loss_delta": 0.0}, "huber_loss_delta"),
        ({"max_grad_norm": -1.0}, "max_grad_norm"),
    ],
)
def test_arguments_out_of_range_are_rejected(options: dict[str, Any], name: str) -> None:
    with pytest.raises(ArgumentError, match=name):
        make(seeded(0, 3, 4), **options)


def test_actions_must_be_discrete() -> None:
    with pytest.raises(PolicySpecError, match="must be a Discrete space, got a Box"):
        DiscreteQLearningPolicy(model=nn.Identity(), action_space=spaces.Box(0, 1, (1,)))


def test_gradients_are_bounded() -> None:
    net = seeded(0, 3, 4)
    before = copy.deepcopy(net)
    algorithm = make(net, optim=TorchOptimizerFactory(torch.optim.SGD, lr=1.0), max_grad_norm=0.01)
    algorithm.update(filled(), 0)
    moved = [
        (first - second).square().sum() for first, second in zip(net.parameters(), before.parameters(), strict=True)
    ]
    assert torch.stack(moved).sum().sqrt().item() == pytest.approx(0.01, rel=1e-3)


@pytest.mark.parametrize(("task", "head"), [(Match, DiscreteCritic), (Masked, DuelingCritic)])
def test_dqn_learns_small_tasks(task: type[gymnasium.Env[Any, Any]], head: Any) -> None:
    torch.manual_seed(0)
    envs = [task() for _ in range(4)]
    space = envs[0].observation_space
    body = Net.for_space(space["obs"] if isinstance(space, spaces.Dict) else space, [32])
    policy = DiscreteQLearningPolicy(
        model=head.for_space(body, envs[0].action_space),
        action_space=envs[0].action_space,
        eps_training=LinearSchedule(1.0, 0.05, 400),
    )
    algorithm = DQN(policy=policy, optim=AdamOptimizerFactory(lr=5e-3), gamma=0.5, target_update_freq=20)
    buffer = VectorReplayBuffer(2000, 4)
    with Collector(policy, envs, buffer, seed=0, exploration_noise=True) as collector:
        for _ in range(150):
            with policy_within_training_step(policy):
                collector.collect(n_step=4)
            algorithm.update(buffer, 32)
    with Collector(policy, [task()], seed=1) as collector:
        assert collector.collect(n_episode=10).returns.mean() >= 7.5
