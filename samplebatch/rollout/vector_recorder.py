"""Recorder: takes steps of environments down, in a buffer or for a batch, and keeps count of their episodes."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import numpy.typing as npt

from samplebatch import names
from samplebatch.batch.nested.batch import Batch
from samplebatch.batch.nested.conversions import as_sample_batch
from samplebatch.batch.nested.node import node
from samplebatch.batch.sample_batch import SampleBatch
from samplebatch.env.infos import Infos, Rows, batch_of, batch_of_steps, rows_of
from samplebatch.env.spaces import Columns, Layout, Leaf, column_names
from samplebatch.env.transitions import Outcome, Outcomes
from samplebatch.names import TO_FLAT, TO_NESTED
from samplebatch.policy.choices import Choice
from samplebatch.rollout.hooks import EpisodeHook, call_on_buffer, call_on_rows
from samplebatch.rollout.rows import GrowingRows, other_columns
from samplebatch.rollout.steps import Steps

StepHook = Callable[[Batch, Batch], Any]
"""Called with every step of the environments: on what was decided (`act`, `act_normalized`, `policy_entry`, `dist`,
`hidden_state`), and on the transitions as they will be kept, to which it may add columns."""

_OUTCOMES = (names.REWARDS, names.TERMINATEDS, names.TRUNCATEDS)
"""What is to be known of steps to count their episodes."""


class Recorder:
    """Takes down what happens in n environments.

    Parameters
    ----------
    num_envs
        How many environments there are.
    observations, actions
        The layouts of the spaces.
    buffer
        Where the steps go; None to keep them for a batch.
    on_step, on_episode
        Hooks.

    Attributes
    ----------
    steps
        The steps taken down since the last `take`; where they go to a buffer, their rewards and flags.
    looks_at_each_step
        Whether hooks want to see steps one by one.
    """

    def __init__(
        self,
        num_envs: int,
        observations: Layout,
        actions: Layout,
        buffer: Any = None,
        *,
        on_step: StepHook | None = None,
        on_episode: EpisodeHook | None = None,
    ) -> None:
        self._buffer = buffer
        self._on_step, self._on_episode = on_step, on_episode
        self._new_names = column_names(names.NEXT_OBS, observations)
        layouts = {names.OBS: observations, names.NEXT_OBS: observations, names.ACTIONS: actions}
        self._actions = actions
        self._all = np.arange(num_envs)
        self.steps = Steps(num_envs, layouts)
        # Buffers need not look at the ids of rows that go to every ring in order.
        self._every_ring = None if getattr(buffer, "buffer_num", None) == num_envs else self._all
        self._waiting = GrowingRows()
        self._plain = buffer is None and on_step is None
        self.looks_at_each_step = on_step is not None or (buffer is not None and on_episode is not None)

    def record(self, choice: Choice, outcome: Outcome, envs: Rows | None = None, drop: Rows | None = None) -> None:
        """Take down a step of some environments.

        Parameters
        ----------
        choice
            What was decided before it.
        outcome
            What it led to.
        envs
            The environments that made it, shape (k,); None for all.
        drop
            Rows that do not count; None for none.
        """
        values = self._values(choice.columns, outcome)
        _, rewards, _, _, infos = outcome
        if self._plain:
            self.steps.append(values, infos, envs, drop)
            return
        rows = None
        if drop is not None:
            rows = np.delete(np.arange(len(rewards)), drop)
            if not len(rows):
                return
            values = {name: column[rows] for name, column in values.items()}
            if infos:
                every = rows_of(infos, len(rewards))
                infos = [every[row] for row in rows.tolist()]
            envs = (self._all if envs is None else envs)[rows]
        if self._on_step is None:
            self._add(nested(values, infos), envs)
            return
        transitions = nested(values, infos)
        said = decided(choice, self._actions)
        self._on_step(said if rows is None else said[rows], transitions)
        if self._buffer is None:
            self.steps.append(flat(transitions), infos, envs)
        else:
            self._add(transitions, envs)

    def _values(self, columns: Columns, outcome: Outcome) -> Columns:
        """Complete the columns of a step by what it led to."""
        new_obs, columns[names.REWARDS], columns[names.TERMINATEDS], columns[names.TRUNCATEDS], _ = outcome
        for name, leaf in zip(self._new_names, new_obs, strict=True):
            columns[name] = leaf
        return columns

    def extend(self, decided_on: Sequence[Columns], outcomes: Outcomes, drop: Rows | None) -> None:
        """Take down several steps of all environments, where no hook wants to see them one by one.

        Parameters
        ----------
        decided_on
            What was known before each.
        outcomes
            What they led to.
        drop
            Rows of all of them, one step after the other, that do not count; None for none.

        Raises
        ------
        ColumnMismatchError, ColumnLengthError
            If the columns of the steps differ too much to be joined; see `GrowingRows.append`.
        """
        known = decided_on[0]
        parts: dict[str, Sequence[Leaf]] = {}
        try:
            for name in known:
                parts[name] = [columns[name] for columns in decided_on]
        except KeyError:
            raise other_columns(decided_on) from None
        if max(map(len, decided_on)) > len(known):
            raise other_columns(decided_on)
        parts.update(zip(self._new_names, outcomes.new_obs, strict=True))
        parts.update(zip(_OUTCOMES, outcomes[1:4], strict=True))
        rows, leaves = outcomes.finals or (self._all, ())
        later = {name: (rows, leaf) for name, leaf in zip(self._new_names, leaves, strict=False)}
        if self._buffer is None:
            self.steps.extend(parts, outcomes.infos, drop, later)
            return
        waiting, n = self._waiting, len(self._all)
        waiting.clear()
        waiting.extend(parts, n)
        columns, envs = waiting.columns(), np.broadcast_to(self._all, (len(decided_on), n)).ravel()
        for name, (where, values) in later.items():
            columns[name][where] = values
        infos = batch_of_steps(outcomes.infos, len(decided_on), n)
        if drop is not None:
            kept = np.delete(np.arange(waiting.rows), drop)
            if not len(kept):
                return
            # Clipping is what makes NumPy skip a second look at every index.
            columns = {name: column.take(kept, 0, None, "clip") for name, column in columns.items()}
            envs = envs[kept]
            infos = infos[kept] if infos.__dict__ else infos
        transitions = nested(columns, {})
        transitions.__dict__["info"] = infos
        self._buffer.add(transitions, buffer_ids=envs)
        self.steps.append({name: columns[name] for name in _OUTCOMES}, {}, envs)

    def _add(self, transitions: Batch, envs: Rows | None) -> None:
        """Add transitions to the buffer, and count them."""
        added = self._buffer.add(transitions, buffer_ids=self._every_ring if envs is None else envs)
        flat_names = {name: transitions.__dict__[TO_NESTED[name]] for name in _OUTCOMES}
        self.steps.append(flat_names, {}, envs)
        if self._on_episode is None:
            return
        ended, lens = self.steps.count()
        if len(ended):
            row_of = {env: row for row, env in enumerate((self._all if envs is None else envs).tolist())}
            for env, length in zip(ended.tolist(), lens.tolist(), strict=True):
                row = row_of[env]
                call_on_buffer(self._on_episode, self._buffer, int(added[3][row]), int(added[0][row]), length)

    def begin(self) -> None:
        """Start an episode in every environment; those under way do not go on.

        In a buffer, the last step of each of these becomes truncated.
        """
        self.steps.begin()
        if self._buffer is None or not len(self._buffer):
            return
        last = self._buffer.unfinished_index()
        if len(last):
            self._buffer.truncated[last] = True
            self._buffer.done[last] = True

    def take(self, unroll_id: int) -> tuple[SampleBatch | None, npt.NDArray[np.float64], npt.NDArray[np.int64]]:
        """Return the steps, if they were kept, and returns and lengths of the episodes that ended; start anew."""
        batch, returns, lens = self.steps.take(batch=self._buffer is None, agent_index=0, unroll_id=unroll_id)
        if batch is not None and self._on_episode is not None:
            call_on_rows(self._on_episode, batch)
        return batch, returns, lens


def nested(values: Columns, infos: Infos) -> Batch:
    """Put columns together as Tianshou's transitions: `obs`, `act`, `rew`, ..., the parts of nested ones in batches.

    >>> nested({"rewards": np.ones(1), "policy.logp": np.zeros(1)}, {})
    Batch(
        rew: array([1.]),
        policy: Batch(
                    logp: array([0.]),
                ),
        info: Batch(),
    )
    """
    data: dict[str, Any] = {}
    for name, value in values.items():
        top, dot, path = name.partition(".")
        top = TO_NESTED.get(top, top)
        if not dot:
            data[top] = value
            continue
        *folders, leaf = path.split(".")
        folder = data.setdefault(top, node(Batch, {})).__dict__
        for key in folders:
            folder = folder.setdefault(key, node(Batch, {})).__dict__
        folder[leaf] = value
    data["info"] = batch_of(infos) if infos else node(Batch, {})
    return node(Batch, data)


def flat(transitions: Batch) -> Columns:
    """Take Tianshou's transitions apart into columns again, leaving out what the environments said."""
    kept = {TO_FLAT.get(name, name): value for name, value in transitions.__dict__.items() if name != "info"}
    columns = as_sample_batch(node(Batch, kept))
    return {name: np.asarray(columns.column(name).values) for name in columns.column_names}


def decided(choice: Choice, actions: Layout) -> Batch:
    """Make what the step hook gets to see of a decision."""
    decision = choice.decision
    return node(
        Batch,
        {
            "act": decision["act"],
            "act_normalized": actions.batch(choice.actions),
            "policy_entry": Batch(decision.get("policy") or {}),
            "dist": decision.get("dist"),
            "hidden_state": decision.get("state"),
        },
    )
