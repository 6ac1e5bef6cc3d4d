"""Statistics of workers and of their received fragments."""

from __future__ import annotations

import time
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np

from samplebatch import names
from samplebatch.batch.multi_agent import MultiAgentBatch
from samplebatch.names import PolicyID
from samplebatch.rollout.statistics import CollectStats, EpisodeStatistics, RunningStatistics, report
from samplebatch.workers.backend import Worker
from samplebatch.workers.pool import WorkerFailure, WorkerPool
from samplebatch.workers.task import Fragment


@dataclass(frozen=True)
class WorkerStats:
    """Statistics of the workers of a run; `RolloutWorkers.stats` reports on their steps.

    Attributes
    ----------
    fragments, nbytes
        Number of received fragments, and bytes of their columns.
    sent_steps
        Environment steps in sent fragments, counted by the workers.
    queue_depth
        Number of sent fragments that are not received yet.
    waiting_s
        Seconds that the caller spent waiting for fragments.
    lost_steps
        Known number of environment steps that failed, dead or hung workers had completed but not sent; workers count
        each completed step in shared memory.
    stale_fragments, stale_steps
        Fragments, and their environment steps, that were dropped because of `max_lag`.
    restarts
        Number of replaced workers.
    failures
        Failures of workers, in time order.
    versions
        Environment steps by weights version, including stale ones.
    """

    fragments: int = 0
    nbytes: int = 0
    sent_steps: int = 0
    queue_depth: int = 0
    waiting_s: float = 0.0
    lost_steps: int = 0
    stale_fragments: int = 0
    stale_steps: int = 0
    restarts: int = 0
    failures: list[WorkerFailure] = field(default_factory=list)
    versions: dict[int, int] = field(default_factory=dict)


class StepCount:
    """Step and episode counts of fragments, for the report on a `collect` call or on a run."""

    def __init__(self) -> None:
        self.env_steps = 0
        self._agent_steps: dict[PolicyID, int] = {}
        self._ended = RunningStatistics()
        self._is_flat = True

    def add(self, fragment: Fragment, ended: EpisodeStatistics) -> None:
        """Count a fragment and the episodes that it ends."""
        self.env_steps += fragment.env_steps()
        self._ended.include(ended)
        if isinstance(fragment, MultiAgentBatch):
            self._is_flat = False
            for policy_id, steps in fragment.policy_batches.items():
                self._agent_steps[policy_id] = self._agent_steps.get(policy_id, 0) + steps.count

    def state_dict(self) -> dict[str, Any]:
        """Return the counters, for `load_state_dict`."""
        return {
            "env_steps": self.env_steps,
            "agent_steps": dict(self._agent_steps),
            "ended": self._ended.state_dict(),
            "is_flat": self._is_flat,
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Restore counters from `state_dict`."""
        self.env_steps, self._is_flat = state["env_steps"], state["is_flat"]
        self._agent_steps = dict(state["agent_steps"])
        self._ended.load_state_dict(state["ended"])

    def report(self, time_s: float, batch: Fragment | None = None) -> CollectStats[Any]:
        """Return the report on all counted fragments, with their joined batch."""
        ended = self._ended.statistics()
        if isinstance(batch, MultiAgentBatch) or not self._is_flat:
            joined = None if batch is None else batch.as_multi_agent()
            return report(self.env_steps, self._agent_steps, ended, time_s, joined)
        single_agent = ended.policies.get(names.DEFAULT_POLICY_ID)
        return CollectStats.from_counts(
            steps=self.env_steps,
            time_s=time_s,
            returns=np.empty(0) if single_agent is None else single_agent.returns,
            lens=np.empty(0, np.int64) if single_agent is None else single_agent.lengths,
            batch=batch,
        )


class Received:
    """Counters of everything received from the workers of a run."""

    def __init__(self) -> None:
        self._run = StepCount()
        self._fragments = self._nbytes = self._stale_fragments = self._stale_steps = 0
        self._versions: dict[int, int] = {}
        self._began = self._newest = time.perf_counter()

    def add(self, worker: Worker, fragment: Fragment, ended: EpisodeStatistics) -> int:
        """Count a fragment and its ended episodes for its worker; return its weights version."""
        env_steps = fragment.env_steps()
        worker.env_steps += env_steps
        worker.total_steps += env_steps
        worker.episodes += ended.episodes
        self._fragments += 1
        self._nbytes += fragment.size_bytes()
        version = _weights_version(fragment)
        self._versions[version] = self._versions.get(version, 0) + env_steps
        self._newest = time.perf_counter()
        return version

    def state_dict(self) -> dict[str, Any]:
        """Return the counters of the report, for `load_state_dict`; statistics of workers are not included."""
        return {"run": self._run.state_dict(), "time_s": self._newest - self._began}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Continue the report of another run."""
        self._run.load_state_dict(state["run"])
        self._newest = time.perf_counter()
        self._began = self._newest - state["time_s"]

    def keep(self, fragment: Fragment, ended: EpisodeStatistics) -> None:
        """Count a fragment that is returned to the caller, and the episodes that it ends."""
        self._run.add(fragment, ended)

    def drop(self, fragment: Fragment) -> None:
        """Count a fragment that is dropped as stale."""
        self._stale_fragments += 1
        self._stale_steps += fragment.env_steps()

    def stats(self) -> CollectStats[Any]:
        """Return the report on all fragments returned to the caller."""
        return self._run.report(self._newest - self._began)

    def worker_stats(self, pool: WorkerPool | None) -> WorkerStats:
        """Return the statistics of the workers."""
        counted = WorkerStats(
            fragments=self._fragments,
            nbytes=self._nbytes,
            stale_fragments=self._stale_fragments,
            stale_steps=self._stale_steps,
            versions=dict(sorted(self._versions.items())),
        )
        if pool is None:
            return counted
        return replace(
            counted,
            sent_steps=pool.sent_steps,
            queue_depth=sum(worker.waiting for worker in pool.workers),
            waiting_s=pool.waiting_s,
            lost_steps=sum(failure.lost_steps for failure in pool.failures),
            restarts=sum(failure.replaced for failure in pool.failures),
            failures=list(pool.failures),
        )


def _weights_version(fragment: Fragment) -> int:
    for steps in fragment.as_multi_agent().policy_batches.values():
        if steps.count and names.WEIGHTS_VERSION in steps:
            return int(steps[names.WEIGHTS_VERSION][0])
    return 0
