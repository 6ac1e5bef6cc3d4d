"""Views: fragments that are cut between environment steps, or between episodes, without being copied."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from samplebatch import names
from samplebatch.batch.concat import concat_samples
from samplebatch.batch.episodes import by_stream, episode_ends, number_env_steps
from samplebatch.batch.multi_agent import MultiAgentBatch
from samplebatch.batch.sample_batch import SampleBatch
from samplebatch.names import PolicyID

Counts = npt.NDArray[np.int64]
Parts = list[tuple[str, SampleBatch]]
"""Views of a fragment's rows, and the policy of each."""


class FragmentView:
    """Steps that may be cut between units: environment steps, or one unit where they must stay together.

    Parameters
    ----------
    parts
        The rows, of each policy in order.
    units
        The unit of each row, by policy; None if there is but one unit.
    counts
        Environment steps, agent steps and ends of episodes before each unit, and of all: shape (units + 1, 3).
    flat
        Whether the steps came as a `SampleBatch`.
    """

    def __init__(self, parts: Parts, units: Mapping[str, Counts] | None, counts: Counts, *, flat: bool) -> None:
        self._parts = parts
        self._units = units
        self.counts = counts
        self.flat = flat
        self._nbytes: int | None = None

    @property
    def nbytes(self) -> int:
        """Bytes of all rows, counted when they are first asked for."""
        if self._nbytes is None:
            self._nbytes = sum([steps.size_bytes() for _, steps in self._parts])
        return self._nbytes

    @property
    def stop(self) -> int:
        """The number of units."""
        return len(self.counts) - 1

    def parts(self, first: int, stop: int) -> Iterator[tuple[str, SampleBatch]]:
        """View the rows of the units `first` to `stop`."""
        if self._units is None or stop - first == self.stop:
            yield from self._parts
            return
        for policy, steps in self._parts:
            units = self._units[policy]
            for start, end in runs(np.flatnonzero((units >= first) & (units < stop))):
                yield policy, steps.slice(start, end)


def keep_together(fragment: SampleBatch | MultiAgentBatch, episodes: int) -> FragmentView:
    """Make a view of a fragment that stays together."""
    parts = list(fragment.as_multi_agent().policy_batches.items())
    counts = np.array([[0, 0, 0], [fragment.env_steps(), fragment.agent_steps(), episodes]])
    return FragmentView(parts, None, counts, flat=isinstance(fragment, SampleBatch))


def by_env_step(fragment: SampleBatch | MultiAgentBatch) -> FragmentView:
    """Make a view that can be cut between environment steps.

    Every row of a flat batch is a step. Of a `MultiAgentBatch` the steps are the distinct pairs of `eps_id` and `t`, by
    episode in the order in which these appear, not of their ids. One whose rows do not tell their steps, or tell
    another number of steps than the batch counts, stays together, and so does one that is padded or time-major.
    """
    policies = policies_of(fragment)
    ends = episode_ends(policies)
    ended = 0 if ends is None else int(ends.finished.sum())
    if not policies or any(steps.zero_padded or steps.time_major for steps in policies.values()):
        return keep_together(fragment, ended)
    if isinstance(fragment, SampleBatch):
        last = np.zeros(fragment.count, np.int64) if ends is None else _last_rows(fragment, ends.ids[ends.finished])
        ones = np.ones(fragment.count, np.int64)
        units = {names.DEFAULT_POLICY_ID: np.arange(fragment.count)}
        return FragmentView(list(policies.items()), units, _before(ones, ones, last), flat=True)
    numbered = number_steps(policies)
    if numbered is None or len(numbered.episode) != fragment.env_steps():
        return keep_together(fragment, ended)
    episode = numbered.episode
    agents = np.bincount(np.concatenate(list(numbered.units.values())), minlength=len(episode))
    last = np.zeros(len(episode), np.int64)
    if ends is not None:
        finished = np.isin(numbered.ids, ends.ids[ends.finished])
        last[:] = finished[episode] & np.append(episode[1:] != episode[:-1], True)
    counts = _before(np.ones(len(episode), np.int64), agents, last)
    return FragmentView(list(policies.items()), numbered.units, counts, flat=False)


class NumberedSteps(NamedTuple):
    """The environment steps of several policies' rows, numbered by episode and time.

    Attributes
    ----------
    units
        The step of each row, by policy.
    episode
        The episode of each step, numbered by appearance; ascending.
    ids
        The `eps_id` of each episode.
    """

    units: dict[PolicyID, Counts]
    episode: Counts
    ids: npt.NDArray[Any]


def number_steps(policies: Mapping[PolicyID, SampleBatch]) -> NumberedSteps | None:
    """Number the environment steps of some policies' rows; None if they do not tell."""
    batches = list(policies.values())
    if not batches or any(names.EPS_ID not in steps or names.T not in steps for steps in batches):
        return None
    eps_id, t = (np.concatenate([np.asarray(steps[name]) for steps in batches]) for name in (names.EPS_ID, names.T))
    ids, first, episodes = np.unique(eps_id, return_index=True, return_inverse=True)
    appearance = np.argsort(first, kind="stable")
    rank = np.empty(len(ids), np.int64)
    rank[appearance] = np.arange(len(ids))
    numbered = number_env_steps(rank[episodes], t)
    stops = np.cumsum([len(steps) for steps in batches])
    return NumberedSteps(
        dict(zip(policies, np.split(numbered.step, stops[:-1]), strict=True)), numbered.episode, ids[appearance]
    )


def join_streams(fragments: Sequence[SampleBatch | MultiAgentBatch]) -> SampleBatch | MultiAgentBatch:
    """Join fragments, so that the steps of each agent lie together, by `env_id` and `agent_index`, in order of time.

    Examples
    --------
    >>> parts = [SampleBatch(env_id=[0, 1], agent_index=[0, 0], t=[time, time]) for time in range(2)]
    >>> join_streams(parts)["t"].tolist()
    [0, 1, 0, 1]
    """
    joined = fragments[0] if len(fragments) == 1 else concat_samples(fragments)
    if isinstance(joined, MultiAgentBatch):
        policies = {policy: _by_stream(steps) for policy, steps in joined.policy_batches.items()}
        return MultiAgentBatch(policies, joined.count)
    return _by_stream(joined)


def _by_stream(steps: SampleBatch) -> SampleBatch:
    """Bring the steps of each agent together, unless they are."""
    if not steps.count:
        return steps
    env_id, agent = (np.asarray(steps[name]) for name in (names.ENV_ID, names.AGENT_INDEX))
    stream = env_id * (int(agent.max()) + 1) + agent
    return steps if (stream[1:] >= stream[:-1]).all() else steps.take(by_stream(stream))


def policies_of(fragment: SampleBatch | MultiAgentBatch) -> dict[PolicyID, SampleBatch]:
    """Return the batches of a fragment that have rows."""
    return {policy: steps for policy, steps in fragment.as_multi_agent().policy_batches.items() if steps.count}


def runs(rows: npt.NDArray[np.intp], *, apart: npt.NDArray[Any] | None = None) -> list[tuple[int, int]]:
    """Cut ascending rows into ranges without gaps, and also wherever the values of `apart` at these rows change.

    >>> runs(np.array([2, 3, 4, 7, 8]))
    [(2, 5), (7, 9)]
    """
    if not len(rows):
        return []
    breaks = np.diff(rows) != 1
    if apart is not None:
        breaks |= apart[1:] != apart[:-1]
    cuts = np.flatnonzero(breaks)
    starts, ends = rows[np.append(0, cuts + 1)], rows[np.append(cuts, len(rows) - 1)] + 1
    return list(zip(starts.tolist(), ends.tolist(), strict=True))


def _last_rows(steps: SampleBatch, finished: npt.NDArray[Any]) -> Counts:
    """Mark the last row of each of the given episodes."""
    eps_id = np.asarray(steps[names.EPS_ID])
    last = np.zeros(len(eps_id), np.int64)
    ids, first_from_end = np.unique(eps_id[::-1], return_index=True)
    last[len(eps_id) - 1 - first_from_end[np.isin(ids, finished)]] = 1
    return last


def _before(*counts: Counts) -> Counts:
    return np.concatenate([np.zeros((1, len(counts)), np.int64), np.stack(counts, 1).cumsum(0)])
