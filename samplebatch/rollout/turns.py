"""Turns of one environment: decisions that wait for their outcomes, in the order in which they were made."""

from __future__ import annotations

import copy
from collections import deque
from collections.abc import Sequence
from itertools import chain, takewhile
from typing import Any

import numpy as np

from samplebatch import names
from samplebatch.env.agent_adapter import AgentGroup, AgentOutcomes
from samplebatch.env.stacking import stack_rows
from samplebatch.rollout.recorder import Block, Streams


class Turn:
    """One agent's decision, and its outcome once the agent has seen that.

    Attributes
    ----------
    policy_id
        The agent's policy.
    columns
        The columns that are known by now: arrays of shape (1, ...), or lists of one value.
    streams, t
        Its episode, stream and time, shape (1,).
    step
        The environment step that it is part of: the episode and the time.
    infos
        Its info, in a list; None until the outcome is there.
    """

    __slots__ = ("columns", "infos", "policy_id", "step", "streams", "t")

    def __init__(self, group: AgentGroup, place: int, columns: dict[str, Block], t: int) -> None:
        self.policy_id = group.policy_id
        self.columns: dict[str, Block] = {**columns, names.EPS_DONE: [False]}
        own = slice(place, place + 1)
        self.streams = Streams(group.eps_ids[own], group.env_ids[own], group.indices[own])
        self.t = np.array([t])
        self.step = (group.adapter.eps_id, t)
        self.infos: list[Any] | None = None


class TurnQueue:
    """Turns of one environment that are not recorded, oldest first.

    An agent may see the outcome of its action after others have seen those of later ones. A fragment takes complete
    environment steps only: turns leave the queue in order, those of a step together, once all outcomes up to theirs are
    there.
    """

    def __init__(self) -> None:
        self._turns: deque[Turn] = deque()
        self._waiting: dict[Any, Turn] = {}

    def clear(self) -> None:
        """Forget all turns."""
        self._turns.clear()
        self._waiting = {}

    def state_dict(self) -> Any:
        """Return the turns, for `load_state_dict`."""
        return copy.deepcopy((self._turns, self._waiting))

    def load_state_dict(self, state: Any) -> None:
        """Go on with the turns of another queue."""
        self._turns, self._waiting = copy.deepcopy(state)

    def break_off(self) -> None:
        """Drop turns that will never be complete."""
        steps = self.complete(None)
        self.clear()
        self._turns += chain.from_iterable(steps)

    def begin(self, agent: Any, turn: Turn) -> None:
        """Let a turn wait for its outcome."""
        self._turns.append(turn)
        self._waiting[agent] = turn

    def finish(self, outcomes: Sequence[AgentOutcomes]) -> None:
        """Complete the turns of agents that have seen their outcomes."""
        for (agent,), seen, rewards, terminateds, truncateds, infos in outcomes:
            turn = self._waiting.pop(agent)
            turn.columns |= {
                names.NEXT_OBS: stack_rows(names.NEXT_OBS, seen),
                names.REWARDS: rewards,
                names.TERMINATEDS: terminateds,
                names.TRUNCATEDS: truncateds,
            }
            turn.infos = list(infos)

    def end(self) -> None:
        """Mark the turns of the newest step as the last of their episode."""
        newest = self._turns[-1].step if self._turns else None
        for turn in takewhile(lambda turn: turn.step == newest, reversed(self._turns)):
            turn.columns[names.EPS_DONE] = [True]

    def complete(self, limit: int | None) -> list[list[Turn]]:
        """Take the turns of complete environment steps off the queue, step by step, at most `limit`."""
        found: list[list[Turn]] = []
        turns = self._turns
        while turns and len(found) != limit:
            first = turns[0].step
            step = [*takewhile(lambda turn, first=first: turn.step == first, turns)]  # type: ignore[misc]
            if any(turn.infos is None for turn in step):
                break
            found.append([turns.popleft() for _ in step])
        return found
