"""BufferWriter: fragments of many environments, written into a replay buffer in the order of each environment."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np

from samplebatch import names
from samplebatch.batch.episodes import run_starts
from samplebatch.batch.multi_agent import MultiAgentBatch
from samplebatch.batch.sample_batch import SampleBatch
from samplebatch.buffer.multi_agent import MultiAgentReplayBuffer
from samplebatch.env.infos import batch_of
from samplebatch.errors import ArgumentError
from samplebatch.rollout.buffers import check_buffer

_IDS = (names.EPS_ID, names.ENV_ID, names.AGENT_INDEX, names.T, names.UNROLL_ID)
"""Columns that a ring needs no more: it has its environment's steps in order, and knows where episodes begin."""


class BufferWriter:
    """Writer of fragments into a replay buffer, for `RolloutWorkers`: ring k holds the environment of `env_id` k.

    Fragments of one environment come in order. Where one does not go on with the episode of the one before, because
    the worker was replaced or steps between were not handed out, the newest step of the ring becomes truncated: no
    episode in the buffer has a gap.

    Parameters
    ----------
    buffer
        A buffer of one agent with a ring for each environment, or a `MultiAgentReplayBuffer`, which knows by itself
        which steps follow each other.
    """

    def __init__(self, buffer: Any) -> None:
        self._buffer = buffer
        self._next: dict[int, tuple[int, int]] = {}
        """Episode and time of the step that goes on in the ring of each environment, where an episode is under way."""

    def state_dict(self) -> dict[int, tuple[int, int]]:
        """Return where the episodes under way go on, for `load_state_dict`; the buffer has a state of its own."""
        return dict(self._next)

    def load_state_dict(self, state: Mapping[int, tuple[int, int]]) -> None:
        """Go on with the episodes of another writer to a buffer of the same rows."""
        self._next = dict(state)

    def add(self, fragment: SampleBatch | MultiAgentBatch) -> None:
        """Write a fragment.

        Raises
        ------
        ArgumentError
            If the fragment is of one agent and the buffer of several, or the other way round, or there are more
            environments than rings.
        SampleBatchError
            If the buffer cannot take its columns.
        """
        several = isinstance(fragment, MultiAgentBatch)
        if several != isinstance(self._buffer, MultiAgentReplayBuffer):
            raise ArgumentError(
                f"buffer must be a {'MultiAgentReplayBuffer' if several else 'buffer of one agent'} for these "
                f"environments, got a {type(self._buffer).__name__}"
            )
        if isinstance(fragment, MultiAgentBatch):
            self._buffer.add(fragment)
        elif fragment.count:
            self._add_rows(fragment)

    def _add_rows(self, steps: SampleBatch) -> None:
        env_id, eps_id, t = (np.asarray(steps[name]) for name in (names.ENV_ID, names.EPS_ID, names.T))
        check_buffer(self._buffer, int(env_id.max()) + 1)
        starts = run_starts(env_id)
        lasts = np.append(starts[1:], len(env_id)) - 1
        done = np.asarray(steps[names.DONES])
        cut = []
        for start, last in zip(starts.tolist(), lasts.tolist(), strict=True):
            env = int(env_id[start])
            due = self._next.pop(env, None)
            if due is not None and due != (int(eps_id[start]), int(t[start])):
                cut.append(env)
            if not done[last]:
                self._next[env] = int(eps_id[last]), int(t[last]) + 1
        if cut:
            self._truncate(cut)
        rows = steps.select(*[name for name in steps if name not in _IDS]).as_batch(names="tianshou")
        rows.pop("done", None)
        infos = rows.pop("info", None)
        if infos is not None and any(infos):
            rows.info = batch_of(infos.tolist())
        self._buffer.add(rows, buffer_ids=env_id)

    def _truncate(self, rings: list[int]) -> None:
        """Mark the newest step in some rings as the last that there is of its episode."""
        buffer = self._buffer
        newest = buffer.unfinished_index()
        own = np.searchsorted(buffer.subbuffer_edges, newest, "right") - 1
        slots = newest[np.isin(own, rings)]
        if len(slots):
            buffer.truncated[slots] = True
            buffer.done[slots] = True
