"""Turns of one environment: decisions that wait for their outcomes, in the order in which they were made."""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from typing import Any

from samplebatch import names
from samplebatch.env.pettingzoo import AgentGroup, AgentOutcomes
from samplebatch.rollout.recorder import Block, Streams
from samplebatch.rollout.stacking import stack_rows


class Turn:
    """One agent's decision, and its outcome once the agent has seen that.

    Attributes
    ----------
    policy_id
        The agent's policy.
    columns
        What the row has by now: arrays of shape (1, ...), or lists of one value.
    streams, t
        Its episode, stream and time.
    infos
        Its info, in a list; None until the outcome is there.
    """

    __slots__ = ("columns", "infos", "policy_id", "streams", "t")

    def __init__(self, group: AgentGroup, columns: dict[str, Block], t: int) -> None:
        self.policy_id = group.policy_id
        self.columns: dict[str, Block] = {**columns, names.EPS_DONE: [False]}
        self.streams = Streams(group.eps_ids, group.env_ids, group.indices)
        self.t = 0 * group.indices + t
        self.infos: list[Any] | None = None


class TurnQueue:
    """Turns of one environment that are not recorded, oldest first.

    An agent may see the outcome of its action after others have seen those of later ones. A fragment takes complete
    environment steps only: turns leave the queue in order, each once all outcomes up to its own are there.
    """

    def __init__(self) -> None:
        self._turns: deque[Turn] = deque()
        self._waiting: dict[Any, Turn] = {}

    def clear(self) -> None:
        """Forget all turns."""
        self._turns.clear()
        self._waiting = {}

    def break_off(self) -> None:
        """Drop turns that will never be complete."""
        complete = self.complete(None)
        self.clear()
        self._turns += complete

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
        """Mark the newest turn as the last of its episode."""
        if self._turns:
            self._turns[-1].columns[names.EPS_DONE] = [True]

    def complete(self, limit: int | None) -> list[Turn]:
        """Take turns that are complete off the queue, at most `limit`."""
        found: list[Turn] = []
        turns = self._turns
        while turns and turns[0].infos is not None and len(found) != limit:
            found.append(turns.popleft())
        return found
