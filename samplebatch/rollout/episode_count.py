"""EpisodeCount: which episode each step belongs to, how far it is in it, and how episodes ended."""

from __future__ import annotations

import os
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from samplebatch.batch.episodes import by_stream

Ints = npt.NDArray[np.int64]
Floats = npt.NDArray[np.float64]
Flags = npt.NDArray[np.bool_]
Rows = npt.NDArray[np.intp]


class Counted(NamedTuple):
    """What is known of k steps, those of an environment together and in order of time.

    Attributes
    ----------
    rows
        Which of the given steps each is, shape (k,).
    env_id, eps_id, t
        The environment and the episode of each step, and the steps before it in it; shape (k,).
    ended
        Environments whose episodes ended, in order of time, shape (e,).
    returns, lens
        Rewards and steps of each of these episodes, shape (e,).
    """

    rows: Rows
    env_id: Ints
    eps_id: Ints
    t: Ints
    ended: Ints
    returns: Floats
    lens: Ints


class EpisodeCount:
    """Counts the episodes of n environments, whose steps come in whatever portions.

    Parameters
    ----------
    num_envs
        How many environments there are.

    Examples
    --------
    >>> count = EpisodeCount(2)
    >>> done = np.array([False, True, False, False])
    >>> counted = count.add(np.array([0, 1, 0, 1]), done, np.array([1.0, 2.0, 4.0, 8.0]))
    >>> counted.rows, counted.t, counted.returns
    (array([0, 2, 1, 3]), array([0, 1, 0, 0]), array([2.]))
    >>> count.add(np.array([0]), np.array([True]), np.array([16.0])).returns
    array([21.])
    """

    def __init__(self, num_envs: int) -> None:
        self._t = np.zeros(num_envs, np.int64)
        self._returns = np.zeros(num_envs)
        self._eps_id = episode_ids(num_envs)

    def begin(self) -> None:
        """Start an episode in every environment."""
        self._t[:] = 0
        self._returns[:] = 0.0
        self._eps_id = episode_ids(len(self._t))

    def add(self, env_id: Ints, done: Flags, rewards: Floats, rows: Rows | None = None) -> Counted:
        """Count steps, which are given in order of time.

        Parameters
        ----------
        env_id
            The environment that made each step, shape (m,).
        done
            Whether its episode ended with it, shape (m,).
        rewards
            What it brought, shape (m,).
        rows
            Those that count, shape (k,), ascending; None for all.
        """
        order = by_stream(env_id if rows is None else env_id[rows])
        if rows is not None:
            order = rows[order]
        count = len(order)
        env_id, done = env_id[order], done[order]
        if not count:
            return Counted(order, env_id, env_id, env_id, env_id, np.empty(0), env_id)
        # A run is what one environment did of one episode.
        new_env = np.empty(count, np.bool_)
        new_env[0] = True
        np.not_equal(env_id[1:], env_id[:-1], out=new_env[1:])
        begins = new_env.copy()
        begins[1:] |= done[:-1]
        starts = begins.nonzero()[0]
        stops = np.append(starts[1:], count)
        lengths = stops - starts
        env_of, first = env_id[starts], new_env[starts]
        before = np.where(first, self._t[env_of], 0)
        lens = before + lengths
        returns = np.add.reduceat(rewards[order], starts) + np.where(first, self._returns[env_of], 0.0)
        ids = np.where(first, self._eps_id[env_of], episode_ids(len(starts)))

        over = done[stops - 1]
        newest = np.append(first[1:], True)
        env_newest, goes_on = env_of[newest], ~over[newest]
        self._t[env_newest] = lens[newest] * goes_on
        self._returns[env_newest] = np.where(goes_on, returns[newest], 0.0)
        self._eps_id[env_newest] = np.where(goes_on, ids[newest], episode_ids(len(env_newest)))

        by_time = order[stops[over] - 1].argsort()
        return Counted(
            order,
            env_id,
            ids.repeat(lengths),
            np.arange(count) - (starts - before).repeat(lengths),
            env_of[over][by_time],
            returns[over][by_time],
            lens[over][by_time],
        )


def episode_ids(count: int) -> Ints:
    """Draw ids that no other process and no other run has: 63 random bits each, from the system, shape (count,).

    >>> ids = episode_ids(1000)
    >>> len(set(ids.tolist())), (ids >= 0).all().item()
    (1000, True)
    """
    return np.frombuffer(os.urandom(8 * count), np.int64) & np.int64((1 << 63) - 1)
