"""Concatenation of fragments into train batches."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Container, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from itertools import accumulate, islice, pairwise
from typing import Any, Literal, NamedTuple

import numpy as np
import numpy.typing as npt

from samplebatch import names
from samplebatch.arguments import choice, whole
from samplebatch.batch.concat import concat_samples, join
from samplebatch.batch.episodes import (
    StepNumbers,
    by_stream,
    distinct_ids,
    episode_ends,
    finished_by_number,
    join_column,
    number_coded_steps,
    run_starts,
)
from samplebatch.batch.multi_agent import MultiAgentBatch
from samplebatch.batch.sample_batch import SampleBatch
from samplebatch.column.interface import Column
from samplebatch.column.objects import ObjectColumn
from samplebatch.column.tensor import TensorColumn
from samplebatch.column.varying_rows import VaryingRows
from samplebatch.errors import ColumnMismatchError, ColumnNotFoundError, ColumnTypeError, SequenceError, near_names
from samplebatch.names import PolicyID
from samplebatch.rollout.statistics import policies_of

_MODES = ("env_steps", "agent_steps")
"""Units of batch sizes, in the order of the columns of `Units.counts`."""


class Aggregator:
    """Aggregator that concatenates fragments from any source into train batches; every value is copied once.

    Fragments are queued without a copy. A fragment that crosses the boundary of a train batch is split, and its
    remaining steps start the next batch. Every queued step is returned exactly once. Memory that a fragment references,
    such as a block of a channel, is released when the last step of the fragment has been copied into a train batch.
    Consecutive train batches whose steps all come from one fragment are views of a single copy of these steps.

    A train batch is a `SampleBatch` if all its fragments are `SampleBatch`es, otherwise a `MultiAgentBatch`.

    Parameters
    ----------
    train_batch_size
        Maximum number of steps per train batch. A batch contains at least one complete environment step, even if that
        step exceeds the maximum. If `train_batch_size` is None, `batches` yields nothing and `build_and_reset` returns
        all steps as one batch.
    mode
        Unit of `train_batch_size`: `"agent_steps"` counts the steps of all agents, `"env_steps"` counts environment
        steps. Rows with equal `eps_id` and `t` belong to the same environment step and are in the same train batch.
        Every row of a `SampleBatch` is a separate step. A fragment that is padded, or that lacks `eps_id` or `t`, is
        not split.
    complete_episodes
        Whether train batches contain only complete episodes, at least one per batch. An unfinished episode stays queued
        until a fragment contains the episode's end (see `episode_ends`). In a train batch, the steps of each agent in
        an episode are contiguous and in order of arrival.

    Attributes
    ----------
    env_steps : int
        Number of queued environment steps.
    agent_steps : int
        Number of queued steps of all agents.

    Raises
    ------
    ValueError
        If `train_batch_size` is not positive, or `mode` is unknown.

    Examples
    --------
    >>> aggregator = Aggregator(train_batch_size=4)
    >>> for first in (0, 3, 6):
    ...     aggregator.add(SampleBatch(obs=[first, first + 1, first + 2]))
    >>> [batch["obs"].tolist() for batch in aggregator.batches()]
    [[0, 1, 2, 3], [4, 5, 6, 7]]
    >>> aggregator.env_steps, aggregator.build_and_reset()["obs"].tolist()
    (1, [8])
    """

    def __init__(
        self,
        train_batch_size: int | None = None,
        mode: Literal["agent_steps", "env_steps"] = "agent_steps",
        *,
        complete_episodes: bool = False,
    ) -> None:
        if train_batch_size is not None:
            whole("train_batch_size", train_batch_size, 1)
        choice("mode", mode, _MODES)
        self._size = train_batch_size
        self._mode = _MODES.index(mode)
        self._open_episodes = OpenEpisodes() if complete_episodes else None
        self._clear()

    def _clear(self) -> None:
        self._queue: deque[FragmentView] = deque()
        self._first = 0
        """First unit of the first queued view that is not in a batch yet."""
        self._models: dict[str, _Model] = {}
        self.env_steps = 0
        self.agent_steps = 0

    @property
    def fragments(self) -> int:
        """Number of queued fragments, including partly returned fragments.

        With `complete_episodes`, the number of queued episodes instead.
        """
        is_split = len(self._queue) > 1 and self._queue[0].is_copied
        return len(self._queue) - is_split + (0 if self._open_episodes is None else len(self._open_episodes))

    @property
    def episodes(self) -> int:
        """Number of episodes whose last step is queued."""
        ends = sum([int(view.units.counts[-1, 2]) for view in self._queue])
        return ends - int(self._queue[0].units.counts[self._first, 2]) if self._first else ends

    @property
    def nbytes(self) -> int:
        """Size of the queued columns in bytes; a partly returned fragment is counted in full."""
        unfinished = 0 if self._open_episodes is None else self._open_episodes.nbytes
        return unfinished + sum([view.nbytes for view in self._queue])

    def add(self, fragment: SampleBatch | MultiAgentBatch) -> None:
        """Queue a fragment without copying it.

        Raises
        ------
        ColumnMismatchError
            If the fragment's columns, row shapes or dtypes do not allow concatenation with the queued fragments. The
            queue is unchanged.
        ColumnNotFoundError
            With `complete_episodes`, if a fragment lacks `eps_id`, or a fragment of several policies lacks `t`.
        ColumnTypeError
            If `fragment` is not a batch.
        """
        if not isinstance(fragment, (SampleBatch, MultiAgentBatch)):
            raise ColumnTypeError(
                f"a fragment must be a SampleBatch or MultiAgentBatch, got a {type(fragment).__name__}"
            )
        models = self._check(fragment)
        if self._open_episodes is not None:
            complete = self._open_episodes.add(fragment)
        elif self._size is None:
            complete = [keep_together(fragment)]
        else:
            complete = [by_env_step(fragment)]
        self._models = {**(self._models if self.fragments else {}), **models}
        self._queue += complete
        self.env_steps += fragment.env_steps()
        self.agent_steps += fragment.agent_steps()

    def batches(self) -> Iterator[SampleBatch | MultiAgentBatch]:
        """Yield the complete train batches.

        A batch is complete if adding the next step or episode would exceed `train_batch_size`.

        Raises
        ------
        ColumnMismatchError
            If the queued columns cannot be concatenated. The queue is unchanged.
        """
        while (bounds := self._full()) is not None:
            views, stop = bounds
            if views or self._queue[0].is_copied or not self._copy_batches():
                yield self._join(views, stop)

    def build_and_reset(self, *, unfinished: bool = True) -> SampleBatch | MultiAgentBatch:
        """Concatenate all queued steps in order of arrival and empty the queue.

        Parameters
        ----------
        unfinished
            Whether to include unfinished episodes; if false, unfinished episodes stay queued.

        Raises
        ------
        ColumnMismatchError
            If the queued columns cannot be concatenated. The queue is unchanged.
        """
        unfinished_views = list(self._open_episodes.views()) if unfinished and self._open_episodes is not None else []
        batch = self._join(len(self._queue), 0, unfinished_views)
        if unfinished and self._open_episodes is not None:
            self._open_episodes.clear()
        return batch

    def drop_unfinished(self, env_ids: Container[int] | None = None) -> int:
        """Discard unfinished episodes that will never end, for example after a worker has failed.

        Parameters
        ----------
        env_ids
            `env_id` of each environment whose episodes are discarded; None discards the episodes of all environments.

        Returns
        -------
        int
            Number of discarded environment steps.
        """
        if self._open_episodes is None:
            return 0
        env_steps, agent_steps = self._open_episodes.drop(env_ids).totals
        self.env_steps -= env_steps
        self.agent_steps -= agent_steps
        return env_steps

    def _full(self) -> tuple[int, int] | None:
        """Return the number of entire views in the next batch, and the number of units from the view after these views.

        Returns None if no batch is complete.
        """
        if self._size is None:
            return None
        room, first = self._size, self._first
        for count, view in enumerate(self._queue):
            total = view.totals[self._mode]
            if not first and total <= room:
                # Entire fragments need not be split, so their steps are not numbered.
                room -= total
                if not room:
                    return count + 1, 0
                continue
            before = view.units.counts[:, self._mode]
            stop, last = int(before.searchsorted(before[first] + room, "right")) - 1, len(before) - 1
            if stop < last:
                if stop == first and room == self._size:
                    stop += 1
                return (count, stop) if stop < last else (count + 1, 0)
            room -= int(before[stop] - before[first])
            if not room:
                return count + 1, 0
            first = 0
        return None

    def _copy_batches(self) -> bool:
        """Copy all complete train batches in the first view at once; return False if there are fewer than two."""
        view, size, bounds = self._queue[0], self._size or 0, [self._first]
        before = view.units.counts[:, self._mode]
        last = len(before) - 1
        while (first := bounds[-1]) < last:
            stop = max(int(before.searchsorted(before[first] + size, "right")) - 1, first + 1)
            if stop == last and before[stop] - before[first] < size:
                break
            bounds.append(stop)
        if len(bounds) < 3 or (split := view.copy_units(bounds)) is None:
            return False
        self._queue.popleft()
        self._queue.extendleft(reversed(split))
        self._first = 0
        return True

    def _join(self, count: int, stop: int, extra: Sequence[FragmentView] = ()) -> SampleBatch | MultiAgentBatch:
        """Dequeue and concatenate `count` views, the next view's units before `stop`, and the views `extra`."""
        by_policy: dict[PolicyID, list[SampleBatch]] = {}
        env_steps = agent_steps = 0
        is_flat, views = True, [*islice(self._queue, count + (stop > 0)), *extra]
        for index, view in enumerate(views):
            first = 0 if index else self._first
            last = stop if index == count and stop else None
            for policy, steps in view.parts(first, last):
                by_policy.setdefault(policy, []).append(steps)
            steps_of_view = view.count(first, last)
            env_steps += steps_of_view[0]
            agent_steps += steps_of_view[1]
            is_flat &= view.flat
        if len(views) == 1 and views[0].is_copied:
            joined = {policy: part for policy, (part,) in by_policy.items()}
        else:
            joined = {policy: join(parts) for policy, parts in by_policy.items()}
        self.env_steps -= env_steps
        self.agent_steps -= agent_steps
        for _ in range(count):
            self._queue.popleft()
        self._first = stop
        if views and is_flat:
            alone = joined.get(names.DEFAULT_POLICY_ID)
            return SampleBatch() if alone is None else alone
        return MultiAgentBatch._of(joined, env_steps)

    def _check(self, fragment: SampleBatch | MultiAgentBatch) -> dict[str, _Model]:
        """Check that a fragment can be concatenated with queued fragments; return updated `_Model`s by policy."""
        models = {}
        expected = self._models if self.fragments else {}
        for policy, steps in policies_of(fragment).items():
            if steps.zero_padded or steps.time_major:
                continue
            form = [
                (name, TensorColumn, column.values.dtype, column.values.shape[1:])
                if type(column) is TensorColumn
                else (name, type(column), column.dtype, column.row_shape)
                for name, column in steps._all().items()
            ]
            model = expected.get(policy)
            if model is not None and model.form == form:
                continue
            row = _example(steps)
            try:
                models[policy] = _Model(form, row.copy() if model is None else join([model.row, row]))
            except ColumnMismatchError as error:
                error.add_note(f"in the batch of policy {policy!r}")
                raise
        return models


def _example(steps: SampleBatch) -> SampleBatch:
    """View the first row of each column, or the first non-empty row of a ragged column.

    Empty rows of a ragged column do not determine a dtype.
    """
    bare = [name for name, column in steps._all().items() if isinstance(column, ObjectColumn) and column.is_bare]
    if bare:
        # Slicing a column creates its dicts, which would then have to be copied into the train batch.
        steps = steps.copy(shallow=True)
        for name in bare:
            steps._own()[name] = ObjectColumn.empty_dicts(steps.count)
    row = steps.slice(0, 1)
    for name, column in steps._all().items():
        if isinstance(column, VaryingRows) and len(column):
            first = int((column.lengths > 0).argmax())
            row._own()[name] = column.slice(first, first + len(row))
    return row


class _Model(NamedTuple):
    """Columns, row shapes and dtypes that all queued rows of a policy must share."""

    form: list[tuple[str, type[Column], Any, tuple[int | None, ...]]]
    """Name, class, dtype and row shape of every column of the newest fragment."""
    row: SampleBatch
    """Row with which all further rows must be concatenable."""


Counts = npt.NDArray[np.int64]
Parts = list[tuple[str, SampleBatch]]
"""Policy ids and views of a fragment's rows."""


class Units(NamedTuple):
    """Units into which a fragment can be split.

    - `rows`: unit number of each row, one array per part of the fragment; None for a single unit.
    - `counts`: numbers of environment steps, agent steps and episode ends before each unit and, in the last row, in
      total; shape (units + 1, 3).
    """

    rows: Sequence[Counts] | None
    counts: Counts


class FragmentView:
    """View of a fragment as units: one unit per environment step, or a single unit if the fragment cannot be split.

    - `parts`: policy ids and rows.
    - `totals`: numbers of environment steps and of agent steps.
    - `units`: units of the fragment, or a function that returns the units and is called on first use.
    - `flat`: whether the fragment is a `SampleBatch`.
    - `is_copied`: whether the rows have been copied in the order of train batches.
    """

    def __init__(
        self,
        parts: Parts,
        totals: tuple[int, int],
        units: Units | Callable[[], Units],
        *,
        flat: bool,
        is_copied: bool = False,
    ) -> None:
        self._parts = parts
        self.totals = totals
        self._units = units
        self.flat = flat
        self.is_copied = is_copied
        self._nbytes: int | None = None

    @property
    def units(self) -> Units:
        """Units of the fragment, computed on first use."""
        units = self._units
        if not isinstance(units, Units):
            units = self._units = units()
        return units

    @property
    def nbytes(self) -> int:
        """Size of all rows in bytes, computed on first use."""
        if self._nbytes is None:
            self._nbytes = sum([steps.size_bytes() for _, steps in self._parts])
        return self._nbytes

    def copy_units(self, bounds: Sequence[int]) -> list[FragmentView] | None:
        """Copy the units from the first bound to the last; in the copy, rows between consecutive bounds are contiguous.

        Returns
        -------
        A view of the copy and, if any units remain, a view of the remaining units; None if the rows are sequences or
        the fragment cannot be split.
        """
        units_of_rows, counts = self.units
        if units_of_rows is None or any(names.SEQ_LENS in steps for _, steps in self._parts):
            return None
        first, stop = bounds[0], bounds[-1]
        copied, remaining, copied_units, remaining_units = [], [], [], []
        for (policy, steps), units in zip(self._parts, units_of_rows, strict=True):
            rows = np.flatnonzero((units >= first) & (units < stop))
            rows = rows[by_stream(np.searchsorted(bounds, units[rows], "right"))]
            # Rows of a flat batch are in order; large batches are copied by two threads.
            copied.append((policy, join([steps.slice(first, stop)]) if self.flat else steps.take(rows)))
            copied_units.append(units[rows] - first)
            for start, end in runs(np.flatnonzero(units >= stop)):
                remaining.append((policy, steps.slice(start, end)))
                remaining_units.append(units[start:end] - stop)
        views = [self._part(copied, copied_units, counts[first : stop + 1], is_copied=True)]
        if remaining:
            views.append(self._part(remaining, remaining_units, counts[stop:]))
        return views

    def _part(self, parts: Parts, rows: list[Counts], counts: Counts, *, is_copied: bool = False) -> FragmentView:
        units = Units(rows, counts - counts[0])
        env_steps, agent_steps, _ = units.counts[-1].tolist()
        return FragmentView(parts, (env_steps, agent_steps), units, flat=self.flat, is_copied=is_copied)

    def count(self, first: int, stop: int | None) -> tuple[int, int]:
        """Count environment steps and agent steps in the units from `first` to `stop`, or in all later units."""
        if first == 0 and stop is None:
            return self.totals
        counts = self.units.counts
        env_steps, agent_steps, _ = (counts[-1 if stop is None else stop] - counts[first]).tolist()
        return env_steps, agent_steps

    def parts(self, first: int, stop: int | None) -> Iterator[tuple[str, SampleBatch]]:
        """Yield each policy's rows in the units from `first` to `stop`, or in all later units, without a copy."""
        units_of_rows = None if first == 0 and stop is None else self.units.rows
        if units_of_rows is None:
            yield from self._parts
            return
        if stop is None:
            stop = len(self.units.counts) - 1
        for (policy, steps), units in zip(self._parts, units_of_rows, strict=True):
            rows = np.flatnonzero((units >= first) & (units < stop))
            for start, end in runs(rows) if not self.is_copied else [(rows[0], rows[-1] + 1)] if len(rows) else ():
                yield policy, steps.slice(start, end)


def keep_together(fragment: SampleBatch | MultiAgentBatch) -> FragmentView:
    """Return a view of a fragment that cannot be split."""
    parts = list(fragment.as_multi_agent().policy_batches.items())
    totals = fragment.env_steps(), fragment.agent_steps()
    units = partial(_single_unit, policies_of(fragment), totals)
    return FragmentView(parts, totals, units, flat=isinstance(fragment, SampleBatch))


def by_env_step(fragment: SampleBatch | MultiAgentBatch) -> FragmentView:
    """Return a view of a fragment that can be split between environment steps.

    Every row of a flat batch is a step. The steps of a `MultiAgentBatch` are the distinct pairs of `eps_id` and `t`,
    ordered by the first appearance of the episode and then by time. A fragment is not split if it is padded or
    time-major, lacks `eps_id` or `t`, or contains more or fewer distinct steps than its `count`.
    """
    policies = policies_of(fragment)
    if not policies or any(steps.zero_padded or steps.time_major for steps in policies.values()):
        return keep_together(fragment)
    totals, flat = (fragment.env_steps(), fragment.agent_steps()), isinstance(fragment, SampleBatch)
    units = partial(_unit_per_row if flat else _unit_per_env_step, policies, totals)
    return FragmentView(list(policies.items()), totals, units, flat=flat)


def _single_unit(policies: Mapping[PolicyID, SampleBatch], totals: tuple[int, int]) -> Units:
    ends = episode_ends(policies)
    episodes = 0 if ends is None else int(ends.finished.sum())
    return Units(None, np.array([[0, 0, 0], [*totals, episodes]]))


def _unit_per_row(policies: Mapping[PolicyID, SampleBatch], totals: tuple[int, int]) -> Units:
    (steps,), ends = policies.values(), episode_ends(policies)
    last = np.zeros(steps.count, np.int64) if ends is None else _last_rows(steps, ends.ids[ends.finished])
    rows = np.arange(steps.count)
    return Units([rows], _counts_before(np.ones_like(rows), last))


def _unit_per_env_step(policies: Mapping[PolicyID, SampleBatch], totals: tuple[int, int]) -> Units:
    numbered = number_steps(policies)
    if numbered is None or len(numbered.episode) != totals[0]:
        return _single_unit(policies, totals)
    step, episode = numbered.step, numbered.episode
    last = np.zeros(len(episode), np.int64)
    finished = finished_by_number(policies, StepNumbers(step, episode))
    if finished is not None:
        last[-1] = finished[episode[-1]]
        last[:-1] = finished[episode[:-1]] & (episode[1:] != episode[:-1])
    counts = _counts_before(np.bincount(step, minlength=len(episode)), last)
    return Units(list(numbered.units.values()), counts)


class NumberedSteps(NamedTuple):
    """Environment steps of several policies, numbered in order of episode and time.

    - `step`: step number of each row of all policies, shape (n,).
    - `units`: step number of each row, by policy.
    - `episode`: number of each step's episode, in ascending order; episodes are numbered in order of appearance.
    - `ids`: `eps_id` of each episode.
    """

    step: Counts
    units: dict[PolicyID, Counts]
    episode: Counts
    ids: npt.NDArray[Any]


def number_steps(policies: Mapping[PolicyID, SampleBatch]) -> NumberedSteps | None:
    """Number the environment steps of several policies; return None if a required column is missing."""
    batches = list(policies.values())
    eps_id, t = (join_column(batches, name) if batches else None for name in (names.EPS_ID, names.T))
    if eps_id is None or t is None:
        return None
    ids, first, episodes = distinct_ids(eps_id)
    appearance = first.argsort()
    rank = np.empty(len(ids), np.int64)
    rank[appearance] = np.arange(len(ids))
    numbered = number_coded_steps(rank[episodes], t)
    stops = [0, *accumulate(map(len, batches))]
    units = {policy: numbered.step[start:stop] for policy, (start, stop) in zip(policies, pairwise(stops), strict=True)}
    return NumberedSteps(numbered.step, units, numbered.episode, ids[appearance])


def join_streams(fragments: Sequence[SampleBatch | MultiAgentBatch]) -> SampleBatch | MultiAgentBatch:
    """Concatenate fragments and sort rows by `env_id`, `agent_index` and time.

    >>> parts = [
    ...     SampleBatch(env_id=[0, 1], agent_index=[0, 0], t=[time, time]) for time in range(2)
    ... ]
    >>> join_streams(parts)["t"].tolist()
    [0, 1, 0, 1]
    """
    joined = fragments[0] if len(fragments) == 1 else concat_samples(fragments)
    if isinstance(joined, MultiAgentBatch):
        policies = {policy: _by_stream(steps) for policy, steps in joined.policy_batches.items()}
        return MultiAgentBatch(policies, joined.count)
    return _by_stream(joined)


def _by_stream(steps: SampleBatch) -> SampleBatch:
    if not steps.count:
        return steps
    env_id, agent = (np.asarray(steps[name]) for name in (names.ENV_ID, names.AGENT_INDEX))
    stream = env_id * (int(agent.max()) + 1) + agent
    return steps if (stream[1:] >= stream[:-1]).all() else steps.take(by_stream(stream))


def runs(rows: npt.NDArray[np.intp], *, apart: npt.NDArray[Any] | None = None) -> list[tuple[int, int]]:
    """Split row numbers into contiguous ranges; rows with different values of `apart` are in different ranges.

    >>> runs(np.array([2, 3, 4, 7, 8]))
    [(2, 5), (7, 9)]
    """
    if not len(rows):
        return []
    breaks = rows[1:] - rows[:-1] != 1
    if apart is not None:
        breaks |= apart[1:] != apart[:-1]
    if 1 not in breaks.tobytes():
        return [(int(rows[0]), int(rows[-1]) + 1)]
    cuts = breaks.nonzero()[0]
    starts, ends = rows[np.append(0, cuts + 1)], rows[np.append(cuts, len(rows) - 1)] + 1
    return list(zip(starts.tolist(), ends.tolist(), strict=True))


def _last_rows(steps: SampleBatch, finished: npt.NDArray[Any]) -> Counts:
    eps_id = np.asarray(steps[names.EPS_ID])
    last = np.zeros(len(eps_id), np.int64)
    ids, first_from_end = np.unique(eps_id[::-1], return_index=True)
    last[len(eps_id) - 1 - first_from_end[np.isin(ids, finished)]] = 1
    return last


def _counts_before(agent_steps: Counts, ends: Counts) -> Counts:
    """Return `Units.counts` of units that are one environment step each."""
    counts = np.empty((len(agent_steps) + 1, 3), np.int64)
    counts[:, 0] = np.arange(len(counts))
    counts[0, 1:] = 0
    agent_steps.cumsum(out=counts[1:, 1])
    ends.cumsum(out=counts[1:, 2])
    return counts


@dataclass
class _Episode:
    parts: list[tuple[int, PolicyID, SampleBatch]] = field(default_factory=list)
    """Runs of steps: agent index, policy and rows."""
    env_id: int | None = None
    env_steps: int = 0
    agent_steps: int = 0
    flat: bool = True

    def view(self, *, ended: bool) -> FragmentView:
        """Return the episode as a single unit in which each agent's steps are contiguous."""
        parts = sorted(self.parts, key=lambda part: part[0])
        totals = self.env_steps, self.agent_steps
        units = Units(None, np.array([[0, 0, 0], [*totals, ended]]))
        return FragmentView([(policy, steps) for _, policy, steps in parts], totals, units, flat=self.flat)


class OpenEpisodes:
    """Queue of unfinished episodes, which retains the steps of each episode until the episode ends."""

    def __init__(self) -> None:
        self._episodes: dict[Any, _Episode] = {}
        self.nbytes = 0
        """Bytes of queued rows."""

    def __len__(self) -> int:
        return len(self._episodes)

    def clear(self) -> None:
        """Discard all episodes."""
        self._episodes = {}
        self.nbytes = 0

    def drop(self, env_ids: Container[int] | None) -> FragmentView:
        """Discard the episodes of some environments (None: of all environments); return the discarded steps."""
        ended = {
            eps_id: episode
            for eps_id, episode in self._episodes.items()
            if env_ids is None or episode.env_id in env_ids
        }
        dropped = _Episode()
        for eps_id, episode in ended.items():
            del self._episodes[eps_id]
            dropped.parts += episode.parts
            dropped.env_steps += episode.env_steps
            dropped.agent_steps += episode.agent_steps
        view = dropped.view(ended=False)
        self.nbytes -= view.nbytes
        return view

    def views(self) -> Iterator[FragmentView]:
        """Yield the steps of each episode, in the order in which the episodes started."""
        for episode in self._episodes.values():
            yield episode.view(ended=False)

    def add(self, fragment: SampleBatch | MultiAgentBatch) -> list[FragmentView]:
        """Queue a fragment, and remove and return the episodes that end in the fragment."""
        policies = policies_of(fragment)
        if not policies:
            return [keep_together(fragment)] if fragment.env_steps() else []
        flat = isinstance(fragment, SampleBatch)
        _check(policies, flat=flat)
        ends = episode_ends(policies)
        if ends is None:
            raise ColumnNotFoundError(
                f"columns {names.TERMINATEDS!r} and {names.TRUNCATEDS!r}, or {names.EPS_DONE!r}, must exist to "
                "find episode ends, got a batch with neither"
            )
        env_steps = _env_steps(policies, flat=flat)
        # Steps without rows, which only the fragment's count includes, must not be lost.
        first = next(iter(env_steps))
        env_steps[first] += fragment.env_steps() - sum(env_steps.values())
        for eps_id, steps in env_steps.items():
            episode = self._episodes.setdefault(eps_id, _Episode())
            episode.env_steps += steps
            episode.flat &= flat
        for policy, steps_of_policy in policies.items():
            self._cut(policy, steps_of_policy)
        finished = set(ends.ids[ends.finished].tolist())
        ended_views = [self._episodes.pop(eps_id).view(ended=True) for eps_id in env_steps if eps_id in finished]
        self.nbytes -= sum([view.nbytes for view in ended_views])
        return ended_views

    def _cut(self, policy: PolicyID, steps: SampleBatch) -> None:
        eps_id = np.asarray(steps[names.EPS_ID])
        env_id = np.asarray(steps[names.ENV_ID]) if names.ENV_ID in steps else None
        agents = np.asarray(steps[names.AGENT_INDEX]) if names.AGENT_INDEX in steps else np.zeros(steps.count, int)
        order = np.argsort(eps_id, kind="stable")
        for rows in np.split(order, run_starts(eps_id[order])[1:]):
            episode = self._episodes[eps_id[rows[:1]].tolist()[0]]
            episode.agent_steps += len(rows)
            if env_id is not None:
                episode.env_id = int(env_id[rows[0]])
            for start, stop in runs(rows, apart=agents[rows]):
                part = steps.slice(start, stop)
                episode.parts.append((int(agents[start]), policy, part))
                self.nbytes += part.size_bytes()


def _check(policies: dict[PolicyID, SampleBatch], *, flat: bool) -> None:
    for policy, steps in policies.items():
        if steps.zero_padded or steps.time_major:
            raise SequenceError(
                f"steps of policy {policy!r} must be neither padded nor time-major to be split into episodes, got "
                f"zero_padded={steps.zero_padded}, time_major={steps.time_major}; pad the train batch instead"
            )
        for name in (names.EPS_ID,) if flat else (names.EPS_ID, names.T):
            if name not in steps:
                raise ColumnNotFoundError(
                    f"column {name!r} must exist to build complete episodes of policy {policy!r}; "
                    f"{near_names(name, steps.column_names)}"
                )


def _env_steps(policies: dict[PolicyID, SampleBatch], *, flat: bool) -> dict[Any, int]:
    numbered = None if flat else number_steps(policies)
    if numbered is not None:
        return dict(zip(numbered.ids.tolist(), np.bincount(numbered.episode).tolist(), strict=True))
    (steps,) = policies.values()
    ids, first, counts = np.unique(np.asarray(steps[names.EPS_ID]), return_index=True, return_counts=True)
    order = np.argsort(first)
    return dict(zip(ids[order].tolist(), counts[order].tolist(), strict=True))
