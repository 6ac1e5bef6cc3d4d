"""SharedObservations: shared memory that environments in processes of their own write observations to."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Self

import numpy as np

from samplebatch.env.infos import Rows
from samplebatch.env.spaces import Leaf, SpaceLayout
from samplebatch.transport.region import Region

NEW_OBS, FIRST_OBS = range(2)
"""The places that each environment has: for the observation of a step, and for that of a reset."""

_ALIGNMENT = 64

Left = list[Any] | None
"""Leaves of an observation that do not fit into the memory, None in place of the others; None if all fit."""


class SharedObservations:
    """Two places in shared memory for the observations of each environment, for both ends of a pipe.

    A process writes an observation before it sends its message, and the parent reads it before it asks for the next
    step, so nothing is locked. Leaves that are no numbers, and values of a wider dtype than their space, go by pipe.

    Parameters
    ----------
    layout
        The layout of the observations.
    num_envs
        How many environments there are.
    region
        Memory of `nbytes` bytes; None where no leaf is numeric.

    Examples
    --------
    >>> from gymnasium import spaces
    >>> layout = SpaceLayout(spaces.Dict(eye=spaces.Box(-1, 1, (2,)), mouth=spaces.Text(9)))
    >>> memory = SharedObservations.create(layout, 3)
    >>> left = memory.write(1, NEW_OBS, [np.ones((1, 2), np.float32), np.array(["hello"], object)])
    >>> left
    [None, array(['hello'], dtype=object)]
    >>> memory.read(np.array([1]), NEW_OBS, [left])
    [array([[1., 1.]], dtype=float32), array(['hello'], dtype=object)]
    """

    def __init__(self, layout: SpaceLayout, num_envs: int, region: Region | None) -> None:
        self.region = region
        self._leaves: list[Leaf | None] = []
        start = 0
        for space in layout.spaces:
            if region is None or not layout.is_numeric(space):
                self._leaves.append(None)
                continue
            shape = (num_envs, 2, *space.shape)
            count = space.dtype.itemsize * int(np.prod(shape))
            self._leaves.append(region.array[start : start + count].view(space.dtype).reshape(shape))
            start += -(-count // _ALIGNMENT) * _ALIGNMENT

    @classmethod
    def create(cls, layout: SpaceLayout, num_envs: int) -> Self:
        """Make the memory that observations of a layout need.

        Raises
        ------
        SharedMemoryError
            If so much memory is not free.
        """
        nbytes = cls.nbytes(layout, num_envs)
        return cls(layout, num_envs, Region.create(nbytes) if nbytes else None)

    @staticmethod
    def nbytes(layout: SpaceLayout, num_envs: int) -> int:
        """Count the bytes that observations of a layout need."""
        leaves = [space for space in layout.spaces if layout.is_numeric(space)]
        counts = [2 * num_envs * space.dtype.itemsize * int(np.prod(space.shape)) for space in leaves]
        return sum(-(-count // _ALIGNMENT) * _ALIGNMENT for count in counts)

    def write(self, env: int, place: int, leaves: Sequence[Leaf]) -> Left:
        """Write the observation of an environment, and return the leaves that have to be sent.

        Parameters
        ----------
        env
            The environment.
        place
            `NEW_OBS` or `FIRST_OBS`.
        leaves
            The leaves, each of shape (1, ...).
        """
        left: list[Any] = [None] * len(leaves)
        fits = True
        for number, (own, leaf) in enumerate(zip(self._leaves, leaves, strict=True)):
            if own is not None and own.dtype == leaf.dtype:
                own[env, place] = leaf[0]
            else:
                left[number], fits = leaf, False
        return None if fits else left

    def read(self, envs: Rows, place: int, sent: Sequence[Left]) -> list[Leaf]:
        """Return observations of environments, leaf by leaf, in memory of their own.

        Parameters
        ----------
        envs
            The environments, shape (k,), k at least 1.
        place
            `NEW_OBS` or `FIRST_OBS`.
        sent
            By environment, the leaves that `write` returned.
        """
        found: list[Leaf] = []
        for number, own in enumerate(self._leaves):
            parts = [None if left is None else left[number] for left in sent]
            if own is not None and all(part is None for part in parts):
                found.append(own[envs, place])
                continue
            held: Any = own
            found.append(
                np.concatenate(
                    [held[env, place][None] if part is None else part for env, part in zip(envs, parts, strict=True)]
                )
            )
        return found

    def close(self) -> None:
        """Let go of the memory."""
        self._leaves = []
        if self.region is not None:
            self.region.close()
