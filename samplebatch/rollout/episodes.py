"""Episodes of vector environments: counted from their steps, and begun until there are enough."""

from __future__ import annotations

import os
from collections.abc import Mapping
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from samplebatch.batch.episodes import by_stream

Ints = npt.NDArray[np.int64]
Floats = npt.NDArray[np.float64]
Flags = npt.NDArray[np.bool_]
Rows = npt.NDArray[np.intp]
_count = np.count_nonzero


class CountedSteps(NamedTuple):
    """Steps with their episodes, which `EpisodeCount` returns to recorders.

    Attributes
    ----------
    eps_id, t
        The episode of each step, and the steps before it in it; shape (k,). Not to be written to.
    ended
        Environments whose episodes ended, in order of time, shape (e,); perhaps None for none.
    returns, lens
        Rewards and steps of each of these episodes, shape (e,).
    """

    eps_id: Ints
    t: Ints
    ended: Ints | None
    returns: Floats
    lens: Ints


_NO_RETURNS: Floats = np.empty(0)
_NO_LENS: Ints = np.empty(0, np.int64)


class EpisodeCount:
    """The episodes of n environments, counted from steps that come in chunks of any size.

    Parameters
    ----------
    num_envs
        How many environments there are.

    Examples
    --------
    >>> count = EpisodeCount(2)
    >>> done = np.array([False, True, False, False])
    >>> counted = count.add(np.array([0, 1, 0, 1]), done, np.array([1.0, 2.0, 4.0, 8.0]))
    >>> counted.t, counted.returns
    (array([0, 0, 1, 0]), array([2.]))
    >>> count.add_step(np.array([True, False]), np.array([16.0, 32.0])).returns
    array([21.])
    """

    def __init__(self, num_envs: int) -> None:
        self._t: Ints = np.zeros(num_envs, np.int64)
        self._returns: Floats = np.zeros(num_envs)
        self._eps_id = episode_ids(num_envs)

    def begin(self) -> None:
        """Start an episode in every environment."""
        count = len(self._t)
        self._t = np.zeros(count, np.int64)
        self._returns = np.zeros(count)
        self._eps_id = episode_ids(count)

    def state_dict(self) -> dict[str, Any]:
        """Return the episodes under way, for `load_state_dict`."""
        return {"t": self._t.copy(), "returns": self._returns.copy(), "eps_id": self._eps_id.copy()}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Go on with the episodes of another count of as many environments."""
        self._t, self._returns, self._eps_id = (state[name].copy() for name in ("t", "returns", "eps_id"))

    def add_step(self, done: Flags, rewards: Floats, envs: Rows | None = None) -> CountedSteps:
        """Count one step of every environment, in their order, or of k of them, none twice; see `add`."""
        # Arrays that were returned stay as they are.
        if envs is None:
            eps_id, t = self._eps_id, self._t
            self._t, self._returns = t + 1, self._returns + rewards
        else:
            eps_id, t = self._eps_id[envs], self._t[envs]
            self._t, self._returns = self._t.copy(), self._returns.copy()
            self._t[envs] = t + 1
            self._returns[envs] += rewards
        if not _count(done):
            return CountedSteps(eps_id, t, None, _NO_RETURNS, _NO_LENS)
        ended = done.nonzero()[0] if envs is None else envs[done]
        counted = CountedSteps(eps_id, t, ended, self._returns[ended], self._t[ended])
        self._t[ended] = 0
        self._returns[ended] = 0.0
        self._eps_id = self._eps_id.copy()
        self._eps_id[ended] = episode_ids(len(ended))
        return counted

    def add(self, env_id: Ints, done: Flags, rewards: Floats) -> CountedSteps:
        """Count steps, which are given in order of time.

        Parameters
        ----------
        env_id
            The environment that made each step, shape (k,).
        done
            Whether its episode ended with it, shape (k,).
        rewards
            Its reward, shape (k,).
        """
        if not len(env_id):
            return CountedSteps(env_id, env_id, None, _NO_RETURNS, _NO_LENS)
        order = by_stream(env_id)
        count = len(order)
        env_id, done = env_id[order], done[order]
        # A run is the steps of one environment in one episode.
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
        # Arrays that were returned stay as they are.
        self._t, self._returns, self._eps_id = self._t.copy(), self._returns.copy(), self._eps_id.copy()
        self._t[env_newest] = lens[newest] * goes_on
        self._returns[env_newest] = np.where(goes_on, returns[newest], 0.0)
        self._eps_id[env_newest] = np.where(goes_on, ids[newest], episode_ids(len(env_newest)))

        eps_id, t = np.empty(count, np.int64), np.empty(count, np.int64)
        eps_id[order] = ids.repeat(lengths)
        t[order] = np.arange(count) - (starts - before).repeat(lengths)
        by_time = order[stops[over] - 1].argsort()
        return CountedSteps(eps_id, t, env_of[over][by_time], returns[over][by_time], lens[over][by_time])


def episode_ids(count: int) -> Ints:
    """Draw ids that no other process and no other run has: 63 random bits each, from the system, shape (count,).

    >>> ids = episode_ids(1000)
    >>> len(set(ids.tolist())), (ids >= 0).all().item()
    (1000, True)
    """
    return np.frombuffer(os.urandom(8 * count), np.int64) & np.int64((1 << 63) - 1)


class EpisodeQuota:
    """The episodes that a collection begins: as many as wanted, each kept to its end.

    To count the episodes that end first would prefer short ones.

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
        self._seen_ends = 0

    @property
    def left(self) -> int:
        """How many episodes have yet to end."""
        return self._to_begin + int(np.count_nonzero(self.running))

    def is_spent_by(self, terminateds: Flags, truncateds: Flags) -> bool:
        """Tell whether no episode may be left to end, counting the ends of raw steps since the last `spend`.

        Autoreset steps that say so, too, are counted along: then there may be some left.
        """
        if _count(terminateds) or _count(truncateds):
            self._seen_ends += int(_count((terminateds | truncateds) & self.running))
        return self._seen_ends >= self.left

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
        self._seen_ends = 0
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
