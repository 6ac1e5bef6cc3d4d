"""What environments did: one step of all of them, or several that are looked at together."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from samplebatch.env.infos import Infos, Rows
from samplebatch.env.spaces import Leaf

Floats = npt.NDArray[np.float64]
Flags = npt.NDArray[np.bool_]


class Transition(NamedTuple):
    """One step of n environments.

    Attributes
    ----------
    new_obs
        What each step led to, a leaf of the observations at a time; where an episode ended, its last observation.
    rewards, terminateds, truncateds, infos
        As the environments gave them: float64, bool, bool, each of shape (n,).
    ended
        Environments whose episode ended; None if none did.
    void
        Environments that were reset instead of stepped: no transition of theirs is in it; None for none.
    obs
        What to act on next: `new_obs`, but the first observation of the new episode where one has begun.
    obs_infos
        What was said with `obs`.
    """

    new_obs: Sequence[Leaf]
    rewards: Floats
    terminateds: Flags
    truncateds: Flags
    infos: Infos
    ended: Rows | None
    void: Rows | None
    obs: Sequence[Leaf]
    obs_infos: Infos


Outcome = tuple[Sequence[Leaf], Floats, Flags, Flags, Any]
"""The first five of a `Transition`: what a step led to."""


class Outcomes(NamedTuple):
    """What several steps of n environments led to, each as a list with an entry a step.

    Attributes
    ----------
    new_obs
        By leaf, arrays of shape (n, ...); not yet the last observations of episodes, where these are `finals`.
    rewards, terminateds, truncateds
        Arrays of shape (n,).
    infos
        What the environments said, by step; silent ones may be missing.
    void
        Rows of all steps, one after the other, that are no transitions; None for none.
    finals
        Rows, shape (e,), and by leaf what is there instead, shape (e, ...); None for none.
    """

    new_obs: Sequence[Sequence[Leaf]]
    rewards: Sequence[Floats]
    terminateds: Sequence[Flags]
    truncateds: Sequence[Flags]
    infos: dict[int, Any]
    void: Rows | None
    finals: tuple[Rows, Sequence[Leaf]] | None

    def ends(self) -> Flags:
        """Tell of each transition whether its episode ended with it, shape (steps, n)."""
        ends = ends_of(self.terminateds, self.truncateds)
        if self.void is not None:
            ends[self.void] = False
        return ends.reshape(len(self.rewards), -1)


def ends_of(terminateds: Sequence[Flags], truncateds: Sequence[Flags]) -> Flags:
    """Tell of each step whether an episode ended with it, void ones included; shape (steps * n,)."""
    ends: Flags = np.concatenate(terminateds) | np.concatenate(truncateds)
    return ends
