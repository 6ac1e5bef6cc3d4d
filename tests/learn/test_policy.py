"""Policies map actions, read masks, and know whether they are trained."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from gymnasium import spaces
from torch import nn

from samplebatch import Batch, Collector
from samplebatch.errors import PolicySpecError
from samplebatch.learn import Policy, policy_within_training_step, torch_train_mode


class Fixed(Policy):
    """Network that returns the same action for every row."""

    def __init__(self, act: Any, *arguments: Any, **options: Any) -> None:
        super().__init__(*arguments, **options)
        self.act = torch.as_tensor(act)
        self.asked: list[Batch] = []
        self.given_states: list[Any] = []

    def forward(self, batch: Batch, state: Any = None) -> Batch:
        self.asked.append(batch)
        self.given_states.append(state)
        rows = len(batch.obs)
        return Batch(act=self.act.expand(rows, *self.act.shape).clone())


BOX = spaces.Box(np.array([-2.0, 0.0], np.float32), np.array([2.0, 10.0], np.float32))


@pytest.mark.parametrize(
    ("method", "scaling", "expected"),
    [
        ("clip", False, [[1.0, -0.5]]),
        ("clip", True, [[2.0, 2.5]]),
        ("tanh", False, [np.tanh([3.0, -0.5])]),
        ("tanh", True, [[2 * np.tanh(3.0), 5 + 5 * np.tanh(-0.5)]]),
        (None, False, [[3.0, -0.5]]),
    ],
)
def test_actions_are_bounded_before_they_are_scaled(method: Any, scaling: bool, expected: Any) -> None:
    policy = Fixed([0.0, 0.0], BOX, action_scaling=scaling, action_bound_method=method)
    np.testing.assert_allclose(policy.map_action(torch.tensor([[3.0, -0.5]])), expected, rtol=1e-6)


@pytest.mark.parametrize("scaling", [False, True])
@pytest.mark.parametrize("method", ["clip", "tanh", None])
def test_the_inverse_map_undoes_the_map(method: Any, scaling: bool) -> None:
    policy = Fixed([0.0, 0.0], BOX, action_scaling=scaling, action_bound_method=method)
    act = np.array([[0.3, -0.5], [-0.9, 0.0]], np.float32)
    np.testing.assert_allclose(policy.map_action_inverse(policy.map_action(act)), act, atol=1e-5)


@pytest.mark.parametrize("scaling", [False, True])
@pytest.mark.parametrize("method", ["clip", "tanh", None])
def test_actions_are_mapped_like_tianshou(method: Any, scaling: bool) -> None:
    theirs_base = pytest.importorskip("tianshou.algorithm.algorithm_base").Policy
    kind: Any = type("Theirs", (theirs_base,), {"forward": lambda self, batch, state=None: None})
    ours, theirs = (make(BOX, None, scaling, method) for make in (lambda *a: Fixed([0.0, 0.0], *a), kind))
    act = np.linspace(-0.99, 0.99, 20, dtype=np.float32).reshape(10, 2)
    np.testing.assert_allclose(ours.map_action(act), theirs.map_action(act), rtol=1e-6)
    mapped = ours.map_action(act)
    np.testing.assert_allclose(ours.map_action_inverse(mapped), theirs.map_action_inverse(mapped), rtol=1e-4, atol=1e-5)


def test_the_inverse_of_tanh_is_finite_at_the_bounds() -> None:
    policy = Fixed([0.0, 0.0], BOX, action_scaling=True, action_bound_method="tanh")
    assert np.isfinite(policy.map_action_inverse(np.array([BOX.low, BOX.high]))).all()


def test_actions_to_be_scaled_must_be_bounded() -> None:
    policy = Fixed([0.0, 0.0], BOX, action_scaling=True, action_bound_method=None)
    with pytest.raises(PolicySpecError, match=r"must be in \[-1, 1\]"):
        policy.map_action(np.array([[1.5, 0.0]]))


def test_discrete_actions_start_at_the_start_of_their_space() -> None:
    policy = Fixed(1, spaces.Discrete(3, start=5))
    assert policy.compute_action(np.zeros(2)) == 6
    assert policy.map_action_inverse(np.array([5, 7])).tolist() == [0, 2]


@pytest.mark.parametrize("space", [spaces.MultiDiscrete([2, 3]), spaces.MultiBinary(2)])
def test_other_actions_are_unchanged(space: Any) -> None:
    policy = Fixed([1, 1], space)
    assert policy.compute_action(np.zeros(2)).tolist() == [1, 1]  # type: ignore[union-attr]
    assert policy.map_action_inverse(np.array([[1, 0]])).tolist() == [[1, 0]]
    assert policy.action_type == "discrete"


def test_compute_action_passes_one_observation_as_a_row() -> None:
    policy = Fixed([0.5, 0.5], BOX, action_scaling=True)
    act = policy.compute_action({"x": np.ones(3)}, {"lives": 2}, state="given")
    np.testing.assert_allclose(act, [1.0, 7.5])
    (requested,) = policy.asked
    assert requested.obs.x.shape == (1, 3)
    assert requested.info.lives.tolist() == [2]
    assert policy.given_states == ["given"]


def test_actions_for_one_environment_need_no_gradients() -> None:
    class Grad(Fixed):
        def forward(self, batch: Batch, state: Any = None) -> Batch:
            assert not torch.is_grad_enabled()
            return super().forward(batch, state)

    assert Grad(1, spaces.Discrete(2)).compute_action([0.0]) == 1


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ((spaces.Text(3),), "must be a Discrete, MultiDiscrete, MultiBinary or Box, got a Text"),
        ((spaces.Discrete(2), None, True), "action_space must be a Box with finite bounds for action_scaling, got"),
        (
            (spaces.Box(0, np.inf, (1,)), None, True),
            "action_space must be a Box with finite bounds for action_scaling, got",
        ),
        ((BOX, None, False, "squash"), "'clip', 'tanh' or None, got 'squash'"),
    ],
)
def test_incompatible_spaces_are_rejected(arguments: Any, message: str) -> None:
    with pytest.raises(PolicySpecError, match=message):
        Fixed(0, *arguments)


@pytest.mark.parametrize("names", [("obs", "mask"), ("observation", "action_mask")])
def test_masks_are_separated_from_observations(names: tuple[str, str]) -> None:
    inner, mask = names
    obs, allowed = Fixed(0, CHOICE).observations(Batch(obs={inner: np.ones((1, 2)), mask: np.array([[0, 1]])}))
    assert obs.dtype == torch.float32
    assert allowed is not None
    assert allowed.tolist() == [[False, True]]


CHOICE = spaces.Discrete(2)


def test_nested_observations_get_the_dtype_of_the_parameters() -> None:
    policy = Fixed(0, CHOICE)
    policy.layer = nn.Linear(1, 1, dtype=torch.float64)
    original = Batch(obs={"camera": np.zeros((1, 4, 4), np.uint8), "joints": np.ones((1, 2), np.float32)})
    obs, mask = policy.observations(original)
    assert mask is None
    assert obs.camera.dtype == torch.uint8
    assert obs.joints.dtype == torch.float64


def test_training_modes_are_restored_after_their_blocks() -> None:
    policy = Fixed(0, CHOICE)

    def fail() -> None:
        with policy_within_training_step(policy), torch_train_mode(policy, False):
            assert policy.is_within_training_step
            assert not policy.training
            with policy_within_training_step(policy, False):
                assert not policy.is_within_training_step
            raise RuntimeError

    with pytest.raises(RuntimeError):
        fail()
    assert not policy.is_within_training_step
    assert policy.training


def test_collectors_map_actions_and_store_the_unmapped_ones() -> None:
    import gymnasium

    env = gymnasium.make("Pendulum-v1")
    policy = Fixed([0.5], env.action_space, action_scaling=True)
    recorded = []
    step = env.unwrapped.step
    env.unwrapped.step = lambda act: recorded.append(float(act[0])) or step(act)  # type: ignore[method-assign, func-returns-value]
    with Collector(policy, env, seed=0) as collector:
        batch = collector.collect(n_step=2).batch
    assert recorded == [1.0, 1.0]
    assert batch["actions"].tolist() == [[0.5], [0.5]]
