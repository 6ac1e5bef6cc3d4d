"""Aggregator: joins fragments into train batches."""

from __future__ import annotations

from collections import deque
from collections.abc import Container, Iterator, Sequence
from itertools import islice
from typing import Any, Literal, NamedTuple

import numpy as np

from samplebatch import names
from samplebatch.arguments import choice, whole
from samplebatch.batch.concat import join
from samplebatch.batch.multi_agent import MultiAgentBatch
from samplebatch.batch.sample_batch import SampleBatch
from samplebatch.column.interface import Column
from samplebatch.errors import ColumnMismatchError, ColumnTypeError
from samplebatch.rollout.fragments import FragmentView, by_env_step, keep_together, policies_of
from samplebatch.rollout.open_episodes import OpenEpisodes
from samplebatch.rollout.statistics import finished_episodes

_MODES = ("env_steps", "agent_steps")
"""Units of a size, in the order of a view's counts."""
_NOTHING = np.zeros(3, np.int64)


class Aggregator:
    """Join fragments from any source into train batches, one copy of every byte.

    Fragments are kept as they are, and cut without being copied where a train batch is full: what does not fit goes
    into the next one. Every step that goes in comes out once. Memory that fragments lie in, such as a channel's
    blocks, is held until the last of their steps has been joined.

    A train batch is a `SampleBatch` if all that is in it came as such, else a `MultiAgentBatch`.

    Parameters
    ----------
    train_batch_size
        Steps in a train batch: as many whole environment steps as fit, at least one. None for no batches but the one
        that `build_and_reset` makes of everything.
    mode
        The steps that count: `"agent_steps"`, those of all agents, or `"env_steps"`. All agents' rows of an environment
        step, a pair of `eps_id` and `t`, go into one train batch; every row of a `SampleBatch` is a step by itself. A
        fragment whose rows do not tell their steps, or that is padded, is not cut.
    complete_episodes
        Whether train batches consist of whole episodes, as many as fit, at least one. An episode that has not ended is
        held back until a fragment comes in that ends it (see `episode_ends`). Within the batch each agent's steps of an
        episode lie together, in the order in which they came.

    Attributes
    ----------
    env_steps : int
        Environment steps held: those that have come in, and are in no batch yet.
    agent_steps : int
        Steps of all agents in them.
    episodes : int
        Episodes that ended in them.

    Raises
    ------
    ValueError
        If the size is not positive, or the mode is another one.

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
        """The first unit of the queue's first view that is in no batch yet."""
        self._models: dict[str, _Model] = {}
        self.env_steps = 0
        self.agent_steps = 0
        self.episodes = 0

    @property
    def fragments(self) -> int:
        """Fragments held, in whole or in part; with `complete_episodes`, episodes."""
        return len(self._queue) + (0 if self._open_episodes is None else len(self._open_episodes))

    @property
    def nbytes(self) -> int:
        """Bytes of the columns held; of a fragment that is in batches in part, all of its bytes."""
        held = 0 if self._open_episodes is None else self._open_episodes.nbytes
        return held + sum([view.nbytes for view in self._queue])

    def add(self, fragment: SampleBatch | MultiAgentBatch) -> None:
        """Take a fragment in; it is kept, not copied.

        Raises
        ------
        ColumnMismatchError
            If its columns, row shapes or dtypes cannot be joined with those that are held; names them. Nothing is taken
            in then.
        ColumnNotFoundError
            If only whole episodes are wanted, and it has no `eps_id`, or of several policies no `t`.
        ColumnTypeError
            If it is neither type of batch.
        """
        if not isinstance(fragment, (SampleBatch, MultiAgentBatch)):
            raise ColumnTypeError(
                f"a fragment must be a SampleBatch or MultiAgentBatch, got a {type(fragment).__name__}"
            )
        models = self._check(fragment)
        if self._open_episodes is not None:
            complete = self._open_episodes.add(fragment)
        elif self._size is None:
            complete = [keep_together(fragment, len(finished_episodes(fragment)))]
        else:
            complete = [by_env_step(fragment)]
        self._models = {**(self._models if self.fragments else {}), **models}
        self._queue += complete
        self.env_steps += fragment.env_steps()
        self.agent_steps += fragment.agent_steps()
        self.episodes += sum([int(view.counts[-1, 2]) for view in complete])

    def batches(self) -> Iterator[SampleBatch | MultiAgentBatch]:
        """Yield every train batch that is full: the next step or episode does not fit into it any more.

        Raises
        ------
        ColumnMismatchError
            If columns that are held cannot be joined after all. Nothing is lost then.
        """
        while (found := self._full()) is not None:
            yield self._join(*found)

    def build_and_reset(self, *, unfinished: bool = True) -> SampleBatch | MultiAgentBatch:
        """Join all that is held, in the order in which it came, and start afresh.

        Parameters
        ----------
        unfinished
            Whether to include episodes that were held back because they have not ended; if not, they stay.

        Raises
        ------
        ColumnMismatchError
            If columns that are held cannot be joined after all. Nothing is lost then.
        """
        held = list(self._open_episodes.views()) if unfinished and self._open_episodes is not None else []
        batch = self._join(len(self._queue), 0, held)
        if unfinished and self._open_episodes is not None:
            self._open_episodes.clear()
        return batch

    def drop_unfinished(self, env_ids: Container[int] | None = None) -> int:
        """Forget episodes that will never end, such as those of a worker that is gone.

        Parameters
        ----------
        env_ids
            The environments whose episodes are forgotten; all by default.

        Returns
        -------
        int
            The environment steps that are lost with them.
        """
        if self._open_episodes is None:
            return 0
        lost = self._open_episodes.drop(env_ids).counts[-1].tolist()
        self.env_steps -= lost[0]
        self.agent_steps -= lost[1]
        return int(lost[0])

    def _full(self) -> tuple[int, int] | None:
        """Find out how many views, and how many units of the one after them, make a full batch; None if none is."""
        if self._size is None:
            return None
        room, first = self._size, self._first
        for taken, view in enumerate(self._queue):
            before = view.counts[:, self._mode]
            stop = int(before.searchsorted(before[first] + room, "right")) - 1
            if stop < view.stop:
                if stop == first and room == self._size:
                    stop += 1
                return (taken, stop) if stop < view.stop else (taken + 1, 0)
            room -= int(before[stop] - before[first])
            if not room:
                return taken + 1, 0
            first = 0
        return None

    def _join(self, whole: int, stop: int, held: Sequence[FragmentView] = ()) -> SampleBatch | MultiAgentBatch:
        """Join so many whole views, the units up to `stop` of the one after them, and others; forget them then."""
        ranges = [(view, 0, view.stop) for view in islice(self._queue, whole)]
        if stop:
            ranges.append((self._queue[whole], 0, stop))
        if ranges:
            ranges[0] = (ranges[0][0], self._first, ranges[0][2])
        ranges += [(view, 0, view.stop) for view in held]
        by_policy: dict[str, list[SampleBatch]] = {}
        for view, first, last in ranges:
            for policy, steps in view.parts(first, last):
                by_policy.setdefault(policy, []).append(steps)
        joined = {policy: join(parts) for policy, parts in by_policy.items()}
        counts = sum([view.counts[last] - view.counts[first] for view, first, last in ranges], _NOTHING).tolist()
        self.env_steps -= counts[0]
        self.agent_steps -= counts[1]
        self.episodes -= counts[2]
        for _ in range(whole):
            self._queue.popleft()
        self._first = stop
        if ranges and all(view.flat for view, _, _ in ranges):
            alone = joined.get(names.DEFAULT_POLICY_ID)
            return SampleBatch() if alone is None else alone
        return MultiAgentBatch(joined, counts[0])

    def _check(self, fragment: SampleBatch | MultiAgentBatch) -> dict[str, _Model]:
        """Check that a fragment can be joined with those held, and return a model of each policy's rows."""
        models = {}
        held = self._models if self.fragments else {}
        for policy, steps in policies_of(fragment).items():
            if steps.zero_padded or steps.time_major:
                continue
            form = [(name, type(column), column.dtype, column.row_shape) for name, column in steps._all().items()]
            model = held.get(policy)
            if model is not None and model.form == form:
                continue
            row = steps.slice(0, 1)
            try:
                models[policy] = _Model(form, row.copy() if model is None else join([model.row, row]))
            except ColumnMismatchError as error:
                error.add_note(f"in the batch of policy {policy!r}")
                raise
        return models


class _Model(NamedTuple):
    """The columns that rows of a policy must have to be joined."""

    form: list[tuple[str, type[Column], Any, tuple[int | None, ...]]]
    """Name, class, dtype and row shape of every column of the fragment that came last."""
    row: SampleBatch
    """A row with which theirs can be joined."""
