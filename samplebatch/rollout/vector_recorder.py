"""VectorRecorder: steps of vector environments, counted by episode and recorded for a batch or in a buffer."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from functools import lru_cache
from operator import itemgetter
from typing import Any

import numpy as np
import numpy.typing as npt

from samplebatch import names
from samplebatch.batch.nested.batch import Batch
from samplebatch.batch.nested.conversions import as_sample_batch
from samplebatch.batch.nested.node import node
from samplebatch.batch.sample_batch import SampleBatch
from samplebatch.env.base import OUTCOMES, StepResult
from samplebatch.env.infos import Infos, Rows, batch_of_steps, infos_to_rows
from samplebatch.env.spaces import Columns, SpaceLayout, column_names
from samplebatch.env.stacking import NestedRows, join_blocks, join_steps, take_rows
from samplebatch.env.tensors import is_tensor, to_host, to_tensor
from samplebatch.errors import ColumnMismatchError
from samplebatch.names import TO_FLAT, TO_NESTED
from samplebatch.policy.actor import ActResult
from samplebatch.rollout.episodes import CountedSteps, EpisodeCount
from samplebatch.rollout.hooks import EpisodeHook, call_on_buffer, call_on_rows
from samplebatch.rollout.recorder import Block, Recorder, Streams

StepHook = Callable[[Batch, Batch], Any]
"""Called with every step of the environments: on the decision (`act`, `act_normalized`, `policy_entry`, `dist`,
`hidden_state`), and on the transitions as they will be kept, to which it may add columns."""

_EMPTY: dict[str, Any] = {}
_ndarray = np.ndarray


class VectorRecorder:
    """Steps of n environments of one agent each; collectors write them and take a batch, or find them in a buffer.

    Parameters
    ----------
    env_ids
        The `env_id` of each environment.
    observations, actions
        The layouts of the spaces.
    buffer
        Where the steps go; None to keep them for a batch.
    on_step, on_episode
        Hooks.
    infos
        Whether infos are kept.

    Attributes
    ----------
    recorded
        Steps since the last `take`.
    looks_at_each_step
        Whether hooks are called on every single step.
    """

    def __init__(
        self,
        env_ids: npt.NDArray[np.int64],
        observations: SpaceLayout,
        actions: SpaceLayout,
        buffer: Any = None,
        *,
        on_step: StepHook | None = None,
        on_episode: EpisodeHook | None = None,
        infos: bool = True,
    ) -> None:
        self._env_ids, self._agent_index = env_ids, np.zeros(len(env_ids), np.int64)
        self._buffer = buffer
        # A buffer need not look at the ids of rows that go to every ring in order.
        self._all_rings = None if getattr(buffer, "buffer_num", 0) == len(env_ids) else list(range(len(env_ids)))
        self._on_step, self._on_episode = on_step, on_episode
        self._actions = actions
        self._obs_names = frozenset(column_names(names.OBS, observations))
        self._new_names = column_names(names.NEXT_OBS, observations)
        self._outcome_names = (*self._new_names, *OUTCOMES)
        self._layouts = {
            top: layout
            for top, layout in ((names.OBS, observations), (names.NEXT_OBS, observations), (names.ACTIONS, actions))
            if layout.structure is not None
        }
        self._has_infos = infos
        self._recorder = Recorder(infos=infos)
        self._episodes = EpisodeCount(len(env_ids))
        self.looks_at_each_step = on_step is not None or (buffer is not None and on_episode is not None)
        self.recorded = 0

    def record_chunk(
        self,
        columns: Sequence[Columns],
        result: StepResult,
        drop: Rows | None,
        act: ActResult | None = None,
    ) -> None:
        """Record steps of all environments.

        Parameters
        ----------
        columns
            The columns that were known before each step.
        result
            The steps.
        drop
            Rows of all of them, one step after the other, that do not count; None for none.
        act
            The decision, where a hook looks at each step.

        Raises
        ------
        ColumnMismatchError
            If the columns of the steps differ too much to be joined.
        """
        known = columns[0]
        outcomes = zip(self._outcome_names, (*result.new_obs, *result[2:5]), strict=True)
        if result.steps == 1:
            # Buffers and batches copy the arrays that they are given; a hook may write to them.
            data = {**known, **dict(outcomes)}
            if self._on_step is not None:
                data = {name: join_blocks(name, [column]) for name, column in data.items()}
            self.record(data, result.infos, drop=drop, act=act)
            return
        keys = known.keys()
        for own in columns:
            if own.keys() != keys:
                odd = next(iter(own.keys() ^ keys))
                raise ColumnMismatchError(f"all steps of a collection must have the same columns, some lack {odd!r}")
        data = {}
        for name in known:
            # Adapters give all observations in one shape.
            join = join_steps if name in self._obs_names else join_blocks
            data[name] = join(name, [*map(itemgetter(name), columns)])
        data.update(outcomes)
        self.record(data, result.infos, steps=result.steps, drop=drop, act=act)

    def record(
        self,
        columns: Columns,
        infos: Mapping[int, Infos],
        envs: Rows | None = None,
        *,
        steps: int = 1,
        drop: Rows | None = None,
        act: ActResult | None = None,
    ) -> None:
        """Record rows of steps.

        Parameters
        ----------
        columns
            Arrays of shape (k, ...), the rows of a step after those of the one before.
        infos
            Infos by step; steps without any may be missing.
        envs
            The place of each row's environment, shape (k,); None for all of them in order in each step.
        steps
            How many steps these are, all of equally many rows.
        drop
            Rows that do not count; None for none.
        act
            The decision, where a hook looks at each step.
        """
        if not self._has_infos:
            infos = {}
        every = len(self._env_ids)
        count = every if envs is None else len(envs) // steps
        kept = None
        if drop is not None:
            keeps = np.ones(steps * count, np.bool_)
            keeps[drop] = False
            kept = keeps.nonzero()[0]
            if not len(kept):
                return
            columns = {name: take_rows(column, kept) for name, column in columns.items()}
            envs = (self._every_env(steps) if envs is None else envs)[kept]
        elif envs is None and steps > 1:
            envs = self._every_env(steps)
        self.recorded += every if envs is None else len(envs)
        decided = None if self._on_step is None else act
        if self._buffer is None and decided is None:
            self._keep(columns, _info_rows(infos, steps, count, kept) if infos else None, envs, steps)
            return
        if self._buffer is not None and is_tensor(columns[self._new_names[0]]):
            columns = {name: to_host(column) for name, column in columns.items()}
        transitions = to_transitions(columns, _infos_of_batch(infos, steps, count, kept))
        if self._on_step is not None and decided is not None:
            self._on_step(_decision(decided, self._actions, kept), transitions)
        if self._buffer is None:
            self._keep(to_columns(transitions), _info_rows(infos, steps, count, kept) if infos else None, envs, steps)
            return
        added = self._buffer.add(transitions, buffer_ids=self._all_rings if envs is None else envs)
        ends, rewards = columns[names.TERMINATEDS] | columns[names.TRUNCATEDS], columns[names.REWARDS]
        counted = self._episodes.add(ends, rewards, envs, steps)
        if self._on_episode is not None and counted.ended is not None:
            self._call_on_ended(self._on_episode, added, envs, counted)

    def _every_env(self, steps: int) -> Rows:
        """Return the place of each row's environment where all of them make steps."""
        count = len(self._env_ids)
        return np.broadcast_to(np.arange(count), (steps, count)).ravel()

    def _keep(self, columns: Columns, infos: list[Any] | None, envs: Rows | None, steps: int) -> None:
        """Record rows for a batch."""
        ends, rewards = columns[names.TERMINATEDS] | columns[names.TRUNCATEDS], columns[names.REWARDS]
        counted = self._episodes.add(ends, rewards, envs, steps)
        seen: Any = columns[self._new_names[0]]
        if type(seen) is not _ndarray and is_tensor(seen):
            columns = {name: to_tensor(column, seen.device) for name, column in columns.items()}
        blocks: dict[str, Block] = dict(columns)
        for top, layout in self._layouts.items():
            leaves = [columns[name] for name in column_names(top, layout)]
            blocks = {name: block for name, block in blocks.items() if name.partition(".")[0] != top}
            blocks[top] = NestedRows(layout.structure, leaves)
        env_id, agent_index = self._env_ids, self._agent_index
        if envs is not None:
            env_id, agent_index = env_id[envs], np.zeros(len(envs), np.int64)
        eps_id, t = counted.number()
        self._recorder.append(names.DEFAULT_POLICY_ID, blocks, Streams(eps_id, env_id, agent_index), t, infos)

    def _call_on_ended(self, hook: EpisodeHook, added: Any, envs: Rows | None, counted: CountedSteps) -> None:
        """Call the episode hook on episodes that ended in the buffer with the added rows, of one step."""
        ended: Any = counted.ended
        row_of = {env: row for row, env in enumerate(envs.tolist())} if envs is not None else range(len(self._env_ids))
        for env, length in zip(ended.tolist(), counted.lens.tolist(), strict=True):
            row = row_of[env]
            call_on_buffer(hook, self._buffer, int(added[3][row]), int(added[0][row]), length)

    def begin(self) -> None:
        """Start an episode in every environment; those under way do not go on.

        In a buffer, the last step of each of these becomes truncated.
        """
        self._episodes.begin()
        if self._buffer is None or not len(self._buffer):
            return
        last = self._buffer.unfinished_index()
        if len(last):
            self._buffer.truncated[last] = True
            self._buffer.done[last] = True

    def state_dict(self) -> dict[str, Any]:
        """Return the episodes under way and the steps that have not been taken, for `load_state_dict`."""
        return {
            "episodes": self._episodes.state_dict(),
            "rows": self._recorder.state_dict(),
            "recorded": self.recorded,
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Go on where a recorder of as many environments was."""
        self._episodes.load_state_dict(state["episodes"])
        self._recorder.load_state_dict(state["rows"])
        self.recorded = state["recorded"]

    def take(
        self, constants: Mapping[str, int]
    ) -> tuple[SampleBatch | None, npt.NDArray[np.float64], npt.NDArray[np.int64]]:
        """Return the steps, if they were kept, and returns and lengths of the episodes that ended; start afresh.

        Parameters
        ----------
        constants
            Further columns, of one number each.
        """
        ended, self._episodes.ended, self.recorded = self._episodes.ended, [], 0
        returns, lens = np.empty(0), np.empty(0, np.int64)
        if ended:
            returns, lens = map(np.concatenate, zip(*ended, strict=True))
        if self._buffer is not None:
            return None, returns, lens
        batches = self._recorder.take(constants)
        batch = batches[names.DEFAULT_POLICY_ID] if batches else SampleBatch()
        if self._on_episode is not None:
            call_on_rows(self._on_episode, batch)
        return batch, returns, lens


def _info_rows(infos: Mapping[int, Infos], steps: int, count: int, kept: Rows | None) -> list[Any]:
    """List the infos of rows."""
    rows: list[Any] = [_EMPTY] * (steps * count)
    for step, said in infos.items():
        rows[step * count : (step + 1) * count] = infos_to_rows(said, count)
    return rows if kept is None else [rows[row] for row in kept.tolist()]


def _infos_of_batch(infos: Mapping[int, Infos], steps: int, count: int, kept: Rows | None) -> Batch:
    """Put the infos of rows together as a batch."""
    batch = batch_of_steps(infos, steps, count) if infos else node(Batch, {})
    return batch if kept is None or not batch.__dict__ else batch[kept]


def to_transitions(values: Columns, infos: Batch) -> Batch:
    """Put columns together as Tianshou's transitions: `obs`, `act`, `rew`, ..., the parts of nested ones in batches.

    >>> to_transitions({"rewards": np.ones(1), "policy.logp": np.zeros(1)}, Batch())
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
        folders, leaf = _nested_place(name)
        folder = data
        for key in folders:
            folder = folder.setdefault(key, node(Batch, {})).__dict__
        folder[leaf] = value
    data["info"] = infos
    return node(Batch, data)


@lru_cache(maxsize=1024)
def _nested_place(name: str) -> tuple[tuple[str, ...], str]:
    """Return where a column lies in transitions: the names of the batches around it, and its own."""
    top, *path = name.split(".")
    *folders, leaf = TO_NESTED.get(top, top), *path
    return tuple(folders), leaf


def to_columns(transitions: Batch) -> Columns:
    """Take Tianshou's transitions apart into columns again, without the infos."""
    kept = {TO_FLAT.get(name, name): value for name, value in transitions.__dict__.items() if name != "info"}
    columns = as_sample_batch(node(Batch, kept))
    values = {name: columns.column(name).values for name in columns.column_names}
    return {name: own if is_tensor(own) else np.asarray(own) for name, own in values.items()}


def _decision(act: ActResult, actions: SpaceLayout, rows: Rows | None) -> Batch:
    """Make the batch of a decision that the step hook is called on."""
    decision = act.decision
    batch = node(
        Batch,
        {
            "act": decision["act"],
            "act_normalized": actions.batch(act.actions),
            "policy_entry": Batch(decision.get("policy") or {}),
            "dist": decision.get("dist"),
            "hidden_state": decision.get("state"),
        },
    )
    return batch if rows is None else batch[rows]
