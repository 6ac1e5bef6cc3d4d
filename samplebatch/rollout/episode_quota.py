"""EpisodeQuota: which steps count where so many episodes are wanted, and no more."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

Flags = npt.NDArray[np.bool_]
Rows = npt.NDArray[np.intp]


class EpisodeQuota:
    """Lets environments begin episodes until as many have been begun as are wanted; each of those is kept to its end.

    Whoever counts the episodes that end first prefers short ones.

    Parameters
    ----------
    num_envs
        How many environments there are, each of them in an episode or at the beginning of one.
    wanted
        How many episodes are wanted.

    Attributes
    ----------
    running
        Environments in an episode that counts, shape (num_envs,).

    Examples
    --------
    >>> quota = EpisodeQuota(2, wanted=3)
    >>> quota.spend(np.array([[True, False], [True, False], [False, False]]))
    array([4])
    >>> quota.running, quota.left
    (array([False,  True]), 1)
    """

    def __init__(self, num_envs: int, wanted: int) -> None:
        self.running: Flags = np.arange(num_envs) < wanted
        self._to_begin = wanted - int(self.running.sum())

    @property
    def left(self) -> int:
        """How many episodes have yet to end."""
        return self._to_begin + int(np.count_nonzero(self.running))

    def spend(self, ends: Flags) -> Rows | None:
        """Take notice of steps of all environments.

        Parameters
        ----------
        ends
            Whether an episode ended with each, shape (steps, num_envs).

        Returns
        -------
        Rows of all steps, one after the other, that do not count; None for none.
        """
        steps = len(ends)
        # The first step of each environment that does not count.
        first = np.where(self.running, steps, 0)
        for step, env in np.argwhere(ends).tolist():
            if not self.running[env]:
                continue
            if self._to_begin:
                self._to_begin -= 1
            else:
                self.running[env] = False
                first[env] = step + 1
        beyond = (np.arange(steps)[:, None] >= first).ravel().nonzero()[0]
        return beyond if len(beyond) else None
