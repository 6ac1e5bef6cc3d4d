"""Noise is drawn from torch's generator, and schedules reach their final value."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from samplebatch.errors import ArgumentError
from samplebatch.learn import BaseNoise, ExponentialSchedule, GaussianNoise, LinearSchedule, OUNoise


def test_gaussian_noise_has_the_given_mean_and_standard_deviation() -> None:
    torch.manual_seed(0)
    sampled = GaussianNoise(mu=2.0, sigma=0.5)((20_000, 2))
    assert sampled.mean() == pytest.approx(2.0, abs=0.02)
    assert sampled.std() == pytest.approx(0.5, abs=0.02)


def test_ornstein_uhlenbeck_noise_has_its_stationary_deviation() -> None:
    torch.manual_seed(0)
    noise = OUNoise(mu=1.0, sigma=0.3, theta=0.5, dt=0.1)
    sampled = np.array([noise((2000,)) for _ in range(200)])[-1]
    # sigma / sqrt(2 theta), for steps that are short enough
    assert sampled.std() == pytest.approx(0.3 / np.sqrt(2 * 0.5), rel=0.1)
    assert sampled.mean() == pytest.approx(1.0, abs=0.03)


def test_ornstein_uhlenbeck_noise_drifts_until_it_is_reset() -> None:
    noise = OUNoise(sigma=0.0, theta=1.0, dt=0.5, mu=4.0, x0=2.0)
    assert [noise((1,)).item() for _ in range(2)] == [3.0, 3.5]
    noise.reset()
    assert noise((1,)).item() == 3.0
    assert noise((3,)).tolist() == [3.0] * 3


@pytest.mark.parametrize("make", [GaussianNoise, OUNoise])
def test_noise_resumes_from_its_state(make: type[BaseNoise]) -> None:
    noise, again = make(), make()
    noise((3,))
    again.load_state_dict(noise.state_dict())
    torch.manual_seed(1)
    expected = noise((3,))
    torch.manual_seed(1)
    assert again((3,)).tolist() == expected.tolist()


@pytest.mark.parametrize("make", [GaussianNoise, OUNoise])
def test_negative_standard_deviations_are_rejected(make: type[BaseNoise]) -> None:
    with pytest.raises(ArgumentError, match=r"sigma must be a number from 0, got -1\.0"):
        make(sigma=-1.0)  # type: ignore[call-arg]


def test_a_linear_schedule_is_constant_outside_its_range() -> None:
    schedule = LinearSchedule(1.0, 0.0, 10, begin=5)
    assert [schedule(step) for step in (0, 5, 10, 15, 100)] == [1.0, 1.0, 0.5, 0.0, 0.0]


def test_an_exponential_schedule_approaches_its_end() -> None:
    schedule = ExponentialSchedule(1.0, 0.2, 0.5)
    assert [schedule(step) for step in (0, 1)] == pytest.approx([1.0, 0.6])
    assert schedule(200) == 0.2


def test_schedules_reject_values_without_a_limit() -> None:
    with pytest.raises(ArgumentError, match="steps"):
        LinearSchedule(1.0, 0.0, 0)
    with pytest.raises(ArgumentError, match="decay"):
        ExponentialSchedule(1.0, 0.0, 1.5)
