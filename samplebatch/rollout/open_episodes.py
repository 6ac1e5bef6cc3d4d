"""OpenEpisodes: the steps of episodes that have not ended."""

from __future__ import annotations

from collections.abc import Container, Iterator
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from samplebatch import names
from samplebatch.batch.episodes import episode_ends, run_starts
from samplebatch.batch.multi_agent import MultiAgentBatch
from samplebatch.batch.sample_batch import SampleBatch
from samplebatch.errors import ColumnNotFoundError, SequenceError
from samplebatch.names import PolicyID
from samplebatch.rollout.fragments import FragmentView, keep_together, number_steps, policies_of, runs


@dataclass
class _Episode:
    """The steps of one episode so far."""

    parts: list[tuple[int, PolicyID, SampleBatch]] = field(default_factory=list)
    """Runs of steps: the agent's index, the policy, and the rows."""
    env_id: int | None = None
    env_steps: int = 0
    agent_steps: int = 0
    flat: bool = True

    def view(self, *, ended: bool) -> FragmentView:
        """Make a view that stays together, in which the steps of each agent do too."""
        parts = sorted(self.parts, key=lambda part: part[0])
        counts = np.array([[0, 0, 0], [self.env_steps, self.agent_steps, ended]])
        return FragmentView([(policy, steps) for _, policy, steps in parts], None, counts, flat=self.flat)


class OpenEpisodes:
    """Hold the steps of each episode until it ends."""

    def __init__(self) -> None:
        self._episodes: dict[Any, _Episode] = {}
        self.nbytes = 0
        """Bytes of the rows that are held."""

    def __len__(self) -> int:
        return len(self._episodes)

    def clear(self) -> None:
        """Forget all episodes."""
        self._episodes = {}
        self.nbytes = 0

    def drop(self, env_ids: Container[int] | None) -> FragmentView:
        """Drop the episodes of some environments, or all, and return their steps."""
        gone = {
            eps_id: episode
            for eps_id, episode in self._episodes.items()
            if env_ids is None or episode.env_id in env_ids
        }
        dropped = _Episode()
        for eps_id, episode in gone.items():
            del self._episodes[eps_id]
            dropped.parts += episode.parts
            dropped.env_steps += episode.env_steps
            dropped.agent_steps += episode.agent_steps
        view = dropped.view(ended=False)
        self.nbytes -= view.nbytes
        return view

    def views(self) -> Iterator[FragmentView]:
        """Yield the steps of each episode, in the order in which they began."""
        for episode in self._episodes.values():
            yield episode.view(ended=False)

    def add(self, fragment: SampleBatch | MultiAgentBatch) -> list[FragmentView]:
        """Take a fragment in, and hand out the episodes that it ends.

        Raises
        ------
        ColumnNotFoundError
            If it does not tell its episodes and where they end.
        SequenceError
            If it is padded or time-major.
        """
        policies = policies_of(fragment)
        if not policies:
            return [keep_together(fragment, 0)] if fragment.env_steps() else []
        flat = isinstance(fragment, SampleBatch)
        _check(policies, flat=flat)
        ends = episode_ends(policies)
        if ends is None:
            raise ColumnNotFoundError(
                f"columns {names.TERMINATEDS!r} and {names.TRUNCATEDS!r}, or {names.EPS_DONE!r}, must be there to tell "
                "where episodes end, and a policy's batch has neither"
            )
        env_steps = _env_steps(policies, flat=flat)
        # Steps that the fragment counts and no row tells of must not be lost either.
        first = next(iter(env_steps))
        env_steps[first] += fragment.env_steps() - sum(env_steps.values())
        for eps_id, steps in env_steps.items():
            episode = self._episodes.setdefault(eps_id, _Episode())
            episode.env_steps += steps
            episode.flat &= flat
        for policy, steps_of_policy in policies.items():
            self._cut(policy, steps_of_policy)
        finished = set(ends.ids[ends.finished].tolist())
        found = [self._episodes.pop(eps_id).view(ended=True) for eps_id in env_steps if eps_id in finished]
        self.nbytes -= sum([view.nbytes for view in found])
        return found

    def _cut(self, policy: PolicyID, steps: SampleBatch) -> None:
        """Give each episode its rows."""
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
                f"episodes are cut out of batches as they were collected, and that of policy {policy!r} is padded or "
                "time-major; pad the train batch instead"
            )
        for name in (names.EPS_ID,) if flat else (names.EPS_ID, names.T):
            if name not in steps:
                raise ColumnNotFoundError(
                    f"column {name!r} must be there to tell whole episodes, and policy {policy!r} has none"
                )


def _env_steps(policies: dict[PolicyID, SampleBatch], *, flat: bool) -> dict[Any, int]:
    """Count the environment steps of each episode, in the order in which they appear."""
    numbered = None if flat else number_steps(policies)
    if numbered is not None:
        return dict(zip(numbered.ids.tolist(), np.bincount(numbered.episode).tolist(), strict=True))
    (steps,) = policies.values()
    ids, first, counts = np.unique(np.asarray(steps[names.EPS_ID]), return_index=True, return_counts=True)
    order = np.argsort(first)
    return dict(zip(ids[order].tolist(), counts[order].tolist(), strict=True))
