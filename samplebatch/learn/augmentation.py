"""Augmentation of image observations: random shifts (Yarats et al., arXiv:2107.09645)."""

from __future__ import annotations

from typing import Any

import torch

from samplebatch.arguments import whole
from samplebatch.errors import ArgumentError


class RandomShift:
    """Random horizontal and vertical shift of each image; border pixels are repeated.

    Assign the shift to the attribute `augment` of an algorithm that samples from a buffer. Observations and next
    observations are then shifted independently in each update (DrQ-v2, Yarats et al., arXiv:2107.09645, section 3.1,
    without interpolation). Shifts are drawn from torch's default generator.

    Parameters
    ----------
    pixels
        Maximum shift.

    Raises
    ------
    ArgumentError
        If `pixels` is not a whole number of at least 1.

    Examples
    --------
    >>> _ = torch.manual_seed(0)
    >>> images = torch.arange(16, dtype=torch.uint8).view(1, 1, 4, 4)
    >>> RandomShift(1)(images)[0, 0]
    tensor([[ 4,  4,  5,  6],
            [ 8,  8,  9, 10],
            [12, 12, 13, 14],
            [12, 12, 13, 14]], dtype=torch.uint8)
    """

    def __init__(self, pixels: int = 4) -> None:
        self.pixels = whole("pixels", pixels, 1)

    def __call__(self, images: Any) -> torch.Tensor:
        """Return the shifted images, with the dtype and shape of `images`.

        Parameters
        ----------
        images
            Tensor of shape (n, channels, height, width) or (n, height, width, channels); the shorter of the second and
            the last axis is the channel axis.

        Raises
        ------
        ArgumentError
            If `images` is not a tensor with four axes.
        """
        if not isinstance(images, torch.Tensor) or images.ndim != 4:
            shape = tuple(images.shape) if hasattr(images, "shape") else type(images).__name__
            raise ArgumentError(f"observations must be images with three axes to be shifted, got {shape}")
        is_channels_last = images.shape[3] < images.shape[1]
        rows = images if is_channels_last else images.movedim(1, -1)
        count, height, width = rows.shape[:3]
        down, right = torch.randint(-self.pixels, self.pixels + 1, (2, count, 1), device=images.device)
        y = (torch.arange(height, device=images.device) + down).clamp(0, height - 1)
        x = (torch.arange(width, device=images.device) + right).clamp(0, width - 1)
        row = torch.arange(count, device=images.device)[:, None, None]
        shifted = rows[row, y[:, :, None], x[:, None, :]]
        return shifted if is_channels_last else shifted.movedim(-1, 1)
