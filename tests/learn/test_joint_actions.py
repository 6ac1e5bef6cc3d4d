"""MultiDiscrete, MultiBinary, Dict and Tuple actions: distributions, masks, rollouts, learning, files, checkpoints."""

from __future__ import annotations

import io
from typing import Any

import gymnasium
import numpy as np
import pytest
import torch
from gymnasium import spaces

from samplebatch import Batch, Collector, VectorReplayBuffer
from samplebatch.errors import PolicySpecError
from samplebatch.learn import (
    A2C,
    IMPALA,
    PPO,
    AdamOptimizerFactory,
    DiscreteActor,
    Net,
    ProbabilisticActorPolicy,
    Reinforce,
    ValueCritic,
    policy_within_training_step,
)
from samplebatch.learn.joint_actions import JointActions
from samplebatch.learn.policy import log_probability
from tests.learn.learning import assert_goes_on

SPACES = {
    "multi-discrete": spaces.MultiDiscrete([3, 2]),
    "multi-discrete from 5": spaces.MultiDiscrete([3, 2], start=[5, -1]),
    "multi-binary": spaces.MultiBinary(3),
    "matrix of bits": spaces.MultiBinary((2, 2)),
    "dict": spaces.Dict(gear=spaces.Discrete(3, start=1), steer=spaces.Box(-1.0, 1.0, (2,), np.float32)),
    "tuple": spaces.Tuple([spaces.Discrete(2), spaces.Dict(bits=spaces.MultiBinary(2))]),
}
OBS = spaces.Box(-1.0, 1.0, (4,), np.float32)


class Fit(gymnasium.Env[Any, Any]):
    """Environment that rewards the fraction of an action that equals a target; actions must be valid."""

    observation_space = OBS

    def __init__(self, space: Any, *, masked: bool = False) -> None:
        self.action_space, self._masked = space, masked
        self._target = _target(space)
        self._joint = JointActions(space)
        if masked:
            mask = spaces.MultiBinary(self._joint.mask_dim)
            self.observation_space = spaces.Dict(obs=OBS, mask=mask)  # type: ignore[assignment]

    def _show(self) -> Any:
        obs = np.eye(4, dtype=np.float32)[self._t % 4]
        if not self._masked:
            return obs
        mask = np.ones(self._joint.mask_dim, np.int8)
        mask[0] = 0
        return {"obs": obs, "mask": mask}

    def reset(self, *, seed: int | None = None, options: Any = None) -> Any:
        super().reset(seed=seed)
        self._t = 0
        return self._show(), {}

    def step(self, action: Any) -> Any:
        assert self.action_space.contains(action), action
        self._t += 1
        return self._show(), _closeness(self.action_space, action, self._target), False, self._t == 8, {}


def _target(space: Any) -> Any:
    if isinstance(space, spaces.Dict):
        return {name: _target(part) for name, part in space.spaces.items()}
    if isinstance(space, spaces.Tuple):
        return tuple(_target(part) for part in space.spaces)
    if isinstance(space, spaces.Discrete):
        return space.start + space.n - 1
    if isinstance(space, spaces.MultiDiscrete):
        return space.start + space.nvec - 1
    return np.ones(space.shape) * (1.0 if isinstance(space, spaces.MultiBinary) else 0.5)


def _closeness(space: Any, action: Any, target: Any) -> float:
    if isinstance(space, spaces.Dict):
        return float(np.mean([_closeness(part, action[name], target[name]) for name, part in space.spaces.items()]))
    if isinstance(space, spaces.Tuple):
        return float(np.mean([_closeness(*part) for part in zip(space.spaces, action, target, strict=True)]))
    if isinstance(space, spaces.Box):
        return float(1.0 - np.abs(action - target).mean())
    return float(np.mean(np.asarray(action) == target))


def make(kind: Any, space: Any, **options: Any) -> Any:
    torch.manual_seed(0)
    actor = DiscreteActor.for_space(Net.for_space(OBS, [32]), space)
    policy = ProbabilisticActorPolicy(actor=actor, action_space=space, deterministic_eval=True)
    if kind is not Reinforce:
        options["critic"] = ValueCritic(Net.for_space(OBS, [32]))
    return kind(policy=policy, optim=AdamOptimizerFactory(lr=0.01), gamma=0.5, **options)


def collect(algorithm: Any, space: Any, buffer: Any, steps: int, *, masked: bool = False) -> Collector:
    collector = Collector(algorithm.policy, [lambda: Fit(space, masked=masked)] * 4, buffer, seed=1)
    with policy_within_training_step(algorithm.policy):
        collector.collect(n_step=steps)
    return collector


@pytest.mark.parametrize("name", SPACES)
def test_samples_and_modes_are_actions_of_the_space(name: str) -> None:
    joint = JointActions(SPACES[name])
    torch.manual_seed(1)
    dist = joint(torch.randn(50, joint.output_dim))
    for action in (dist.sample(), dist.mode):
        mapped = joint.clip(action)
        assert all(SPACES[name].contains(joint.row(mapped, row)) for row in range(50))
    assert dist.log_prob(dist.sample()).shape == dist.entropy().shape == (50,)


def test_probabilities_of_all_actions_add_up_to_one() -> None:
    for space, actions in (
        (SPACES["multi-discrete from 5"], [[a, b] for a in (5, 6, 7) for b in (-1, 0)]),
        (SPACES["multi-binary"], [[a, b, c] for a in (0, 1) for b in (0, 1) for c in (0, 1)]),
    ):
        joint = JointActions(space)
        torch.manual_seed(2)
        row = torch.randn(1, joint.output_dim)
        dist = joint(row.expand(len(actions), -1))
        actual = dist.log_prob(torch.tensor(actions))
        assert actual.exp().sum().item() == pytest.approx(1.0, abs=1e-5)
        assert -(actual.exp() * actual).sum().item() == pytest.approx(dist.entropy()[0].item(), abs=1e-5)
        assert dist.mode[0].tolist() == actions[int(actual.argmax())]


def test_masked_choices_and_bits_are_never_drawn() -> None:
    space = spaces.Dict(a=spaces.MultiDiscrete([2, 3]), b=spaces.MultiBinary(2), c=spaces.Box(-1, 1, (1,)))
    joint = JointActions(space)
    assert (joint.mask_dim, joint.output_dim) == (7, 9)
    mask = torch.tensor([[True, False, True, False, True, False, True]]).expand(500, -1)
    torch.manual_seed(0)
    dist = joint(joint.mask(torch.randn(500, 9), mask))
    action = dist.sample()
    assert set(action.a[:, 0].tolist()) == {0}
    assert set(action.a[:, 1].tolist()) == {0, 2}
    assert set(action.b[:, 0].tolist()) == {0}
    assert set(action.b[:, 1].tolist()) == {0, 1}
    assert dist.log_prob(action).isfinite().all()
    assert dist.entropy().isfinite().all()
    with pytest.raises(PolicySpecError, match="mask must have 7 flags"):
        joint.mask(torch.randn(5, 9), mask[:5, :3])


@pytest.mark.parametrize("name", SPACES)
@pytest.mark.parametrize("kind", [PPO, A2C, IMPALA, Reinforce])
def test_algorithms_learn_actions_with_several_parts(name: str, kind: Any) -> None:
    space = SPACES[name]
    option = {
        A2C: "advantage_normalization",
        IMPALA: "advantage_normalization",
        Reinforce: "return_standardization",
    }.get(kind)
    algorithm = make(kind, space, max_grad_norm=0.5, **({} if option is None else {option: True}))
    buffer = VectorReplayBuffer(400, 4)
    with collect(algorithm, space, buffer, 128) as collector:
        # Several steps on one collection without PPO's clipping let a normal distribution collapse.
        size, rounds = (128, 90) if name == "dict" and kind in (A2C, IMPALA) else (32, 60 if name == "dict" else 25)
        for _ in range(rounds):
            algorithm.update(buffer, size, 4 if kind is PPO else 1)
            buffer.reset(keep_statistics=True)
            with policy_within_training_step(algorithm.policy):
                if collector.collect(n_step=128).returns.mean() >= 7.5:
                    break
    with Collector(algorithm.policy, [lambda: Fit(space)], seed=3) as collector:
        score = collector.collect(n_episode=4).returns.mean()
    with Collector("random", [lambda: Fit(space)], seed=3) as collector:
        random = collector.collect(n_episode=4).returns.mean()
    assert score >= 7.0
    assert score > random


@pytest.mark.parametrize("name", SPACES)
def test_recorded_log_probabilities_belong_to_the_stored_actions(name: str) -> None:
    algorithm = make(IMPALA, SPACES[name])
    buffer = VectorReplayBuffer(100, 4)
    collect(algorithm, SPACES[name], buffer, 40).close()
    batch, _ = buffer.sample(0, device="cpu")
    with torch.no_grad():
        actual = log_probability(algorithm.policy.distribution(batch)[0], batch.act)
    torch.testing.assert_close(actual, batch.action_logp, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("name", ["multi-discrete", "multi-binary", "dict"])
def test_masks_of_observations_apply_to_actions_of_environments(name: str) -> None:
    algorithm = make(PPO, SPACES[name])
    buffer = VectorReplayBuffer(100, 4)
    collect(algorithm, SPACES[name], buffer, 40, masked=True).close()
    batch, _ = buffer.sample(0)
    act = batch.act.gear - 1 if name == "dict" else batch.act[:, 0]
    assert (act != (1 if name == "multi-binary" else 0)).all()
    assert 1 in (batch.act[:, 1] if name == "multi-binary" else act)


@pytest.mark.parametrize("name", SPACES)
def test_algorithms_resume_and_policies_are_saved(name: str) -> None:
    algorithm, fresh = make(PPO, SPACES[name]), make(PPO, SPACES[name])
    buffer = VectorReplayBuffer(100, 4)
    collect(algorithm, SPACES[name], buffer, 40).close()
    assert_goes_on(algorithm, fresh, lambda trained: trained.update(buffer, 16, 1))
    file = io.BytesIO()
    torch.save(algorithm.policy, file)
    file.seek(0)
    loaded = torch.load(file, weights_only=False)
    obs = np.eye(4, dtype=np.float32)[0]
    action, again = algorithm.policy.compute_action(obs), loaded.compute_action(obs)
    assert SPACES[name].contains(action)
    assert repr(action) == repr(again)


def test_other_leaves_and_widths_are_rejected() -> None:
    with pytest.raises(PolicySpecError, match=r"part 'word' of action_space must be .*, got a Text"):
        JointActions(spaces.Dict(word=spaces.Text(3)))
    policy = ProbabilisticActorPolicy(actor=torch.nn.Linear(4, 4), action_space=SPACES["multi-discrete"])
    with pytest.raises(PolicySpecError, match="actor must have 5 outputs"):
        policy(Batch(obs=torch.zeros(2, 4)))
