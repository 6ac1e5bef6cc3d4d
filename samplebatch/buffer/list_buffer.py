"""Growing replay buffer for scripts of early versions of Tianshou."""

from __future__ import annotations

from typing import Any

from samplebatch.buffer.replay import ReplayBuffer


class ListReplayBuffer(ReplayBuffer):
    """Replay buffer for Tianshou's oldest scripts, which did not pass a size.

    Early Tianshou appended steps to lists without a limit. This buffer stores up to `size` steps, then overwrites the
    oldest ones. Memory is allocated with the first step; the operating system provides it as rows are written.

    Parameters
    ----------
    size
        Capacity in steps.
    **options
        See `ReplayBuffer`.

    Raises
    ------
    ArgumentError
        As in `ReplayBuffer`.

    Examples
    --------
    >>> buf = ListReplayBuffer()
    >>> for i in range(3):
    ...     _ = buf.add(obs=i, act=i, rew=i, done=i == 2, obs_next=i + 1, info={})
    >>> len(buf), buf.obs[:3]
    (3, array([0, 1, 2]))
    """

    def __init__(self, size: int = 1_000_000, **options: Any) -> None:
        super().__init__(size, **options)
