"""Where episodes end: boundaries from ids or from flags, without walking rows."""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt


def ends_by_change(ids: npt.NDArray[Any]) -> list[int]:
    """List the row after each episode's last, where an episode is a run of equal ids.

    >>> ends_by_change(np.array([7, 7, 3]))
    [2, 3]
    """
    if not len(ids):
        return []
    return [*(np.flatnonzero(ids[1:] != ids[:-1]) + 1).tolist(), len(ids)]


def ends_by_flag(flags: npt.NDArray[Any]) -> list[int]:
    """List the row after each episode's last, where a true flag ends one; an unfinished last one counts.

    >>> ends_by_flag(np.array([0, 0, 1, 0, 0]))
    [3, 5]
    """
    ends: list[int] = (np.flatnonzero(flags) + 1).tolist()
    if len(flags) and (not ends or ends[-1] < len(flags)):
        ends.append(len(flags))
    return ends
