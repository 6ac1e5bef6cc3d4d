"""CQL lowers the values of unknown actions, as in its papers and in Tianshou."""

from __future__ import annotations

import warnings
from copy import deepcopy
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from scipy.special import logsumexp

from samplebatch import Dataset, ReplayBuffer, SampleBatch
from samplebatch.errors import ArgumentError, ColumnNotFoundError
from samplebatch.learn import (
    CQL,
    AdamOptimizerFactory,
    ContinuousActorProbabilistic,
    ContinuousCritic,
    Net,
    SACPolicy,
    policy_within_training_step,
)
from tests.learn.learning import MEASURES, OBS, assert_goes_on, filled

NETWORKS = ["policy.actor", "critic", "critic2", "critic_old.module", "critic2_old.module"]


def make(seed: int = 0, **options: Any) -> CQL:
    torch.manual_seed(seed)
    return CQL(
        policy=SACPolicy(
            actor=ContinuousActorProbabilistic.for_space(Net.for_space(OBS, [16]), MEASURES, conditioned_sigma=True),
            action_space=MEASURES,
        ),
        policy_optim=AdamOptimizerFactory(),
        critic=ContinuousCritic.for_space(OBS, MEASURES, [16]),
        critic_optim=AdamOptimizerFactory(),
        **options,
    )


def update(algorithm: Any) -> Any:
    return algorithm.update(filled(actions=MEASURES), 0)


@pytest.mark.parametrize("with_lagrange", [True, False])
def test_learns_the_same_as_tianshou(with_lagrange: bool) -> None:
    """Tianshou sums over one sampled action of each kind and draws uniform actions from `-min_action`."""
    from tests.learn import peers

    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        from tianshou.algorithm.imitation.cql import CQL as TheirCQL
        from tianshou.algorithm.modelfree.sac import SACPolicy as TheirPolicy
    actor = peers.gaussian_actor()
    options = {
        "num_repeat_actions": 1,
        "with_lagrange": with_lagrange,
        "lagrange_threshold": 5.0,
        "calibrated": False,
        "cql_weight": 2.0,
        "temperature": 0.5,
        "cql_alpha_lr": 0.01,
    }
    ours = CQL(
        policy=SACPolicy(actor=deepcopy(actor), action_space=MEASURES), **options, **peers.of_two_critics(peers.OURS)
    )
    theirs = TheirCQL(
        policy=TheirPolicy(actor=actor, action_space=MEASURES),
        min_action=1.0,
        **options,
        **peers.of_two_critics(peers.THEIRS),
    )
    # Where a step is truncated, Tianshou's targets are of no value after it.
    peers.assert_learn_the_same(ours, theirs, *peers.buffers(MEASURES, truncates=False), NETWORKS)


def test_the_soft_maximum_is_over_all_actions_of_a_row() -> None:
    algorithm = make(num_repeat_actions=4, temperature=0.5, calibrated=False, min_action=-2.0, max_action=1.0)
    batch, _ = algorithm._sample_batch(filled(actions=MEASURES), 6)
    with torch.no_grad(), policy_within_training_step(algorithm.policy):
        penalty_actions = algorithm._sample_penalty_actions(batch)
        actual = algorithm._soft_maximum(algorithm.critic, batch, penalty_actions)
        scores = []
        for actions, log_density, _ in penalty_actions:
            assert actions.shape == (24, 2)
            for row in range(6):
                for item in range(4):
                    value = algorithm.critic(batch.obs[row : row + 1], actions[[4 * row + item]]).item()
                    scores.append((value - log_density[row, item].item()) / 0.5)
    by_row = np.array(scores).reshape(3, 6, 4).transpose(1, 0, 2).reshape(6, 12)
    np.testing.assert_allclose(actual.numpy(), 0.5 * logsumexp(by_row, 1), rtol=1e-5)
    uniform, density, of_policy = penalty_actions[0]
    assert not of_policy
    assert ((uniform >= -2.0) & (uniform <= 1.0)).all()
    torch.testing.assert_close(density, torch.full((6, 4), -2 * np.log(3.0), dtype=torch.float32))


def test_values_of_the_policys_actions_are_bounded_by_the_returns_of_the_data() -> None:
    algorithm = make(num_repeat_actions=3)
    buffer = algorithm.process_buffer(filled(actions=MEASURES))
    batch, _ = algorithm._sample_batch(buffer, 5)
    batch.calibration_returns = torch.full((5,), 100.0)
    with torch.no_grad(), policy_within_training_step(algorithm.policy):
        penalty_actions = algorithm._sample_penalty_actions(batch)
        actual = algorithm._soft_maximum(algorithm.critic, batch, penalty_actions)
    densities = torch.cat([density for _, density, _ in penalty_actions[1:]], 1)
    torch.testing.assert_close(actual, 100.0 + torch.logsumexp(-densities, 1), rtol=1e-5, atol=1e-4)


def test_returns_for_calibration_are_discounted_to_the_end_of_each_episode() -> None:
    buffer = ReplayBuffer(8)
    for i in range(6):
        buffer.add(
            {"obs": np.zeros(3), "act": np.zeros(2), "rew": 1.0, "terminated": i == 2, "truncated": i == 4}
            | {"obs_next": np.zeros(3)}
        )
    actual = make(gamma=0.5).process_buffer(buffer)
    assert actual is buffer
    np.testing.assert_allclose(buffer[:].calibration_returns, [1.75, 1.5, 1.0, 1.5, 1.0, 1.0])


def test_values_of_actions_outside_the_data_are_penalized() -> None:
    """The first action value of the data is always 0.5; a penalized critic ranks it above others."""
    buffer = filled(actions=MEASURES)
    buffer.act[:] = [0.5, 0.0]
    margins = []
    for weight in (0.0, 5.0):
        algorithm = make(cql_weight=weight, with_lagrange=False, calibrated=False, num_repeat_actions=4)
        torch.manual_seed(2)
        for _ in range(150):
            algorithm.update(buffer, 0)
        rows = torch.as_tensor(buffer.obs[:40])
        with torch.no_grad():
            inside, unknown = (
                algorithm.critic(rows, torch.tensor([[a, 0.0]]).expand(40, 2)).mean().item() for a in (0.5, -0.9)
            )
        margins.append(inside - unknown)
    assert margins[1] > margins[0] + 0.5


def dataset_of_episodes(folder: Path) -> Dataset:
    """Write interleaved episodes of two environments into two files; the last episode is running."""
    dataset = Dataset(folder, seed=1)
    rewards = np.arange(1.0, 7.0)
    steps: Any = {
        "eps_id": [0, 1, 0, 1, 0, 2],
        "t": [0, 0, 1, 1, 2, 0],
        "rewards": rewards,
        "terminateds": [False, False, False, False, True, False],
        "truncateds": [False, False, False, True, False, False],
        "actions": np.zeros((6, *MEASURES.shape), np.float32),
    }
    steps |= {name: np.ones((6, *OBS.shape), np.float32) for name in ("obs", "new_obs")}
    for part in (slice(0, 3), slice(3, 6)):
        dataset.extend(SampleBatch({name: np.asarray(value)[part] for name, value in steps.items()}))
    return dataset


@pytest.mark.parametrize("is_processed", [True, False])
def test_rows_of_a_dataset_have_their_returns(is_processed: bool, tmp_path: Path) -> None:
    algorithm, dataset = make(gamma=0.5), dataset_of_episodes(tmp_path / "rows")
    if is_processed:
        assert algorithm.process_buffer(dataset) is dataset
    recorded: list[Any] = []
    algorithm._update_with_batch, learn = (
        lambda batch: (recorded.append(batch), learn(batch))[1],
        algorithm._update_with_batch,
    )
    assert np.isfinite(algorithm.update(dataset, 0).critic1_loss)
    expected = [1 + 3 / 2 + 5 / 4, 2 + 4 / 2, 3 + 5 / 2, 4.0, 5.0, 6.0]
    np.testing.assert_allclose(recorded[0].calibration_returns, expected)
    algorithm.update(dataset, 4)
    assert set(recorded[1].calibration_returns.tolist()) <= set(expected)
    dataset.extend(SampleBatch({name: dataset.read()[name][:1] for name in dataset.schema.names}))
    algorithm.update(dataset, 0)
    assert len(recorded[2].calibration_returns) == 7


def test_rows_without_returns_are_rejected_for_calibration() -> None:
    with pytest.raises(ColumnNotFoundError, match="must have column 'calibration_returns', which process_buffer"):
        update(make())


def test_continues_from_its_state_with_the_multiplier_and_its_optimizer() -> None:
    options = {"calibrated": False, "num_repeat_actions": 2, "cql_alpha_lr": 0.1}
    algorithm, fresh = make(**options), make(seed=1, **options)
    update(algorithm)
    assert_goes_on(algorithm, fresh, update)
    assert algorithm.multiplier is not None
    assert algorithm.multiplier().item() != 1.0


def test_the_multiplier_stays_within_its_bounds() -> None:
    algorithm = make(calibrated=False, cql_alpha_lr=10.0, alpha_max=3.0, lagrange_threshold=-1e3)
    update(algorithm)
    assert update(algorithm).cql_alpha == 3.0


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"temperature": 0.0}, "temperature"),
        ({"num_repeat_actions": 0}, "num_repeat_actions"),
        ({"min_action": 1.0}, "min_action must be below max_action, got 1.0 and 1.0"),
    ],
)
def test_numbers_out_of_range_are_rejected(options: dict[str, Any], message: str) -> None:
    with pytest.raises(ArgumentError, match=message):
        make(**options)
