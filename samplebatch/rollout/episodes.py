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
    """Steps counted by episode, which `EpisodeCount` returns to recorders.

    Attributes
    ----------
    ended
        Environments whose episodes ended, in order of time, shape (e,); None for none.
    returns, lens
        Rewards and steps of each of these episodes, shape (e,).
    eps_id, t
        The episode of each run of steps, and the steps before its first in it; shape (r,). A run is the steps of one
        environment in one episode.
    lengths, order
        The length of each run, shape (r,), and the steps in order of runs, shape (k,); None if each step is a run.
    """

    ended: Rows | None
    returns: Floats
    lens: Ints
    eps_id: Ints
    t: Ints
    lengths: Ints | None = None
    order: Rows | None = None

    def number(self) -> tuple[Ints, Ints]:
        """Return the episode of each step, and the steps before it in it, shape (k,) each; not to be written to."""
        if self.lengths is None or self.order is None:
            return self.eps_id, self.t
        eps_id, t = np.empty((2, len(self.order)), np.int64)
        eps_id[self.order] = self.eps_id.repeat(self.lengths)
        starts = self.lengths.cumsum() - self.lengths
        t[self.order] = np.arange(len(t)) - (starts - self.t).repeat(self.lengths)
        return eps_id, t


_NO_RETURNS: Floats = np.empty(0)
_NO_LENS: Ints = np.empty(0, np.int64)


class EpisodeCount:
    """The episodes of n environments, counted from steps that come in chunks of any size.

    Parameters
    ----------
    num_envs
        How many environments there are.

    Attributes
    ----------
    ended
        Returns and lengths of the episodes that ended; recorders empty it.

    Examples
    --------
    >>> count = EpisodeCount(2)
    >>> done = np.array([False, True, False, False])
    >>> counted = count.add(done, np.array([1.0, 2.0, 4.0, 8.0]), np.array([0, 1, 0, 1]), steps=2)
    >>> counted.returns, counted.number()[1]
    (array([2.]), array([0, 0, 1, 0]))
    >>> count.add(np.array([True, False]), np.array([16.0, 32.0])).returns
    array([21.])
    """

    def __init__(self, num_envs: int) -> None:
        self.ended: list[tuple[Floats, Ints]] = []
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
        """Return the episodes under way and those that ended, for `load_state_dict`."""
        under_way = {"t": self._t.copy(), "returns": self._returns.copy(), "eps_id": self._eps_id.copy()}
        return {**under_way, "ended": list(self.ended)}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Go on with the episodes of another count of as many environments."""
        self._t, self._returns, self._eps_id = (state[name].copy() for name in ("t", "returns", "eps_id"))
        self.ended = list(state["ended"])

    def add(self, done: Flags, rewards: Floats, envs: Rows | None = None, steps: int = 1) -> CountedSteps:
        """Count steps, which are given in order of time.

        Parameters
        ----------
        done
            Whether an episode ended with each, shape (k,).
        rewards
            The rewards, shape (k,).
        envs
            The environment that made each step, shape (k,); None for all of them in their order.
        steps
            The most steps of one environment; more than one are given with their `envs`.
        """
        if envs is not None and steps > 1:
            return self._add_runs(done, rewards, envs)
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
            return CountedSteps(None, _NO_RETURNS, _NO_LENS, eps_id, t)
        ended = done.nonzero()[0] if envs is None else envs[done]
        counted = CountedSteps(ended, self._returns[ended], self._t[ended], eps_id, t)
        self.ended.append((counted.returns, counted.lens))
        self._t[ended] = 0
        self._returns[ended] = 0.0
        self._eps_id = self._eps_id.copy()
        self._eps_id[ended] = episode_ids(len(ended))
        return counted

    def _add_runs(self, done: Flags, rewards: Floats, envs: Rows) -> CountedSteps:
        """Count several steps of an environment, run by run."""
        order = by_stream(envs)
        count = len(order)
        envs, done = envs[order], done[order]
        new_env = np.empty(count, np.bool_)
        new_env[0] = True
        np.not_equal(envs[1:], envs[:-1], out=new_env[1:])
        begins = new_env.copy()
        begins[1:] |= done[:-1]
        starts = begins.nonzero()[0]
        stops = np.append(starts[1:], count)
        lengths = stops - starts
        env_of, first = envs[starts], new_env[starts]
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
        if not _count(over):
            return CountedSteps(None, _NO_RETURNS, _NO_LENS, ids, before, lengths, order)
        ended = over.nonzero()[0]
        # In order of time.
        ended = ended[order[stops[ended] - 1].argsort()]
        self.ended.append((returns[ended], lens[ended]))
        return CountedSteps(env_of[ended], returns[ended], lens[ended], ids, before, lengths, order)


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
        if not (_count(terminateds) or _count(truncateds)):
            return False
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
        if self.running.all():
            return None
        beyond = (np.arange(steps)[:, None] >= first).ravel().nonzero()[0]
        return beyond if len(beyond) else None
