"""Random shifts of images, and algorithms that learn from shifted samples."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

from samplebatch import Batch, ReplayBuffer
from samplebatch.errors import ArgumentError
from samplebatch.learn import DQN, AdamOptimizerFactory, DiscreteQLearningPolicy, RandomShift
from tests.learn.learning import CHOICES


class Floats(nn.Module):
    """Module that converts bytes to floats."""

    def forward(self, images: torch.Tensor) -> torch.Tensor:
        return images.float() / 255.0


@pytest.mark.parametrize("is_last", [False, True])
@pytest.mark.parametrize("dtype", [torch.uint8, torch.float32])
def test_every_shifted_image_is_a_window_of_the_padded_image(is_last: bool, dtype: torch.dtype) -> None:
    torch.manual_seed(0)
    images = torch.randint(0, 255, (40, 3, 9, 7)).to(dtype)
    original = images.movedim(1, -1) if is_last else images
    shifted = RandomShift(2)(original)
    assert shifted.dtype == dtype
    assert shifted.shape == original.shape
    rows = (shifted.movedim(-1, 1) if is_last else shifted).numpy()
    padded = np.pad(images.numpy(), ((0, 0), (0, 0), (2, 2), (2, 2)), mode="edge")
    shifts = set()
    for image, wider in zip(rows, padded, strict=True):
        windows = [(y, x) for y in range(5) for x in range(5) if np.array_equal(image, wider[:, y : y + 9, x : x + 7])]
        assert windows
        shifts.add(windows[0])
    assert len(shifts) > 10


@pytest.mark.parametrize("images", [torch.zeros(4, 3), torch.zeros(4, 84, 84), np.zeros((4, 3, 8, 8)), Batch(x=1)])
def test_other_observations_are_rejected(images: Any) -> None:
    with pytest.raises(ArgumentError, match="observations must be images with three axes to be shifted, got"):
        RandomShift()(images)


def test_shifts_of_no_pixels_are_rejected() -> None:
    with pytest.raises(ArgumentError, match="pixels"):
        RandomShift(0)


def test_samples_are_shifted_and_the_buffer_is_unchanged() -> None:
    rng = np.random.default_rng(0)
    buffer = ReplayBuffer(20, random_seed=0)
    images = rng.integers(0, 255, (21, 2, 6, 6), dtype=np.uint8)
    for row in range(20):
        done = {"terminated": False, "truncated": row == 19}
        buffer.add(Batch(obs=images[row], act=row % 4, rew=1.0, obs_next=images[row + 1], info=Batch(), **done))
    model = nn.Sequential(Floats(), nn.Flatten(), nn.Linear(72, 4))
    policy = DiscreteQLearningPolicy(model=model, action_space=CHOICES)
    algorithm = DQN(policy=policy, optim=AdamOptimizerFactory())
    plain, _ = algorithm._sample_batch(buffer, 0)
    algorithm.augment = RandomShift(2)
    torch.manual_seed(0)
    batch, _ = algorithm._sample_batch(buffer, 0)
    for name in ("obs", "obs_next"):
        assert batch[name].dtype == torch.uint8
        assert (batch[name] != plain[name]).any()
    # Consecutive images differ in their shifts, and all other columns are those of the buffer.
    assert (batch.obs[1:] != batch.obs_next[:-1]).any()
    torch.testing.assert_close(batch.rew, plain.rew)
    np.testing.assert_array_equal(buffer.obs[:20], images[:20])
    assert np.isfinite(algorithm.update(buffer, 8).loss)  # type: ignore[attr-defined]
