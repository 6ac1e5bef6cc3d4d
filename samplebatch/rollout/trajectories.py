"""Trajectories: the part of a stream in one episode that a batch has."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from samplebatch import names
from samplebatch.batch.episodes import by_stream, run_starts
from samplebatch.batch.sample_batch import SampleBatch
from samplebatch.errors import ColumnNotFoundError, SequenceError
from samplebatch.names import PolicyID


@dataclass(frozen=True)
class Trajectory:
    """The steps of one agent in one episode that a batch has, all or a part; hooks are called on it.

    Attributes
    ----------
    agent
        The agent's id where it is known, else its `agent_index`.
    policy_id
        The policy that acted for it.
    eps_id
        The episode.
    steps
        Its steps, in order.
    """

    agent: Any
    policy_id: PolicyID
    eps_id: Any
    steps: SampleBatch

    @property
    def ended(self) -> bool:
        """Whether the last step terminates or truncates the agent; if not, its episode goes on in another batch."""
        return bool(np.asarray(self.steps[names.DONES])[-1])


def in_order(steps: SampleBatch) -> tuple[SampleBatch, npt.NDArray[np.intp]]:
    """Bring the steps of each trajectory together, in order of time.

    Trajectories are told apart by `eps_id` and, where there is one, `agent_index`; they keep the order in which they
    begin. Where there is no `t`, their steps keep theirs.

    Returns
    -------
    tuple
        The batch, which is the given one where its rows lie so already; and the row where each trajectory begins,
        shape (k,).

    Raises
    ------
    ColumnNotFoundError
        If there is no `eps_id`.
    SequenceError
        If the batch is padded or time-major.

    Examples
    --------
    >>> steps = SampleBatch(eps_id=[7, 8, 7], t=[1, 0, 0], rewards=[1.0, 2.0, 3.0])
    >>> ordered, starts = in_order(steps)
    >>> ordered["rewards"].tolist(), starts
    ([3.0, 1.0, 2.0], array([0, 2]))
    """
    if not steps.count:
        return steps, np.empty(0, np.intp)
    if steps.zero_padded or steps.time_major:
        raise SequenceError("trajectories are cut out of batches that are neither padded nor time-major")
    if names.EPS_ID not in steps:
        raise ColumnNotFoundError(f"column {names.EPS_ID!r} must be there to tell trajectories apart")
    keys = [np.asarray(steps[name]) for name in (names.EPS_ID, names.AGENT_INDEX) if name in steps]
    starts = run_starts(*keys)
    t = np.asarray(steps[names.T]) if names.T in steps else None
    whole = len({*zip(*(key[starts].tolist() for key in keys), strict=True)}) == len(starts)
    if whole and (t is None or _rises(t, starts)):
        return steps, starts
    order = by_stream(*keys, t=t)
    starts = run_starts(*(key[order] for key in keys))
    # By the first row of each, wherever in time that is.
    first = np.minimum.reduceat(order, starts)
    lengths = np.diff(np.append(starts, len(order)))
    place = np.argsort(np.repeat(first, lengths), kind="stable")
    return steps.take(order[place]), np.append(0, lengths[np.argsort(first)].cumsum())[:-1]


def cut(
    policy_id: PolicyID, steps: SampleBatch, starts: npt.NDArray[np.intp], agents: Mapping[tuple[int, int], Any]
) -> list[Trajectory]:
    """View the trajectories of a batch in their order; `agents` has their ids by `env_id` and `agent_index`."""
    eps_id = np.asarray(steps[names.EPS_ID])
    env_id, index = (
        np.asarray(steps[name]) if name in steps else np.zeros(steps.count, int)
        for name in (names.ENV_ID, names.AGENT_INDEX)
    )
    found = []
    for start, stop in zip(starts.tolist(), [*starts[1:].tolist(), steps.count], strict=True):
        agent = int(index[start])
        agent = agents.get((int(env_id[start]), agent), agent)
        found.append(Trajectory(agent, policy_id, eps_id[start : start + 1].tolist()[0], steps.slice(start, stop)))
    return found


def _rises(t: npt.NDArray[Any], starts: npt.NDArray[np.intp]) -> bool:
    rising = np.append(True, t[1:] > t[:-1])
    rising[starts] = True
    return bool(rising.all())
