"""Pool of workers, which sends requests, receives and counts fragments, and replaces failed workers."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from operator import attrgetter
from typing import Any

import numpy as np

from samplebatch import names
from samplebatch.batch.multi_agent import MultiAgentBatch
from samplebatch.batch.sample_batch import SampleBatch
from samplebatch.env.seeds import RESTART, seeds_at
from samplebatch.errors import WorkerError
from samplebatch.names import PolicyID
from samplebatch.rollout.statistics import CollectStats, EpisodeStatistics, RunningStatistics, report
from samplebatch.workers.backend import GRACE_S, Backend, Worker, WorkerExit, WorkerUnplaced
from samplebatch.workers.task import Collected, Fragment, Request, StateRequest, WorkerSpec

_LOOK_S = 0.1
"""Maximum delay in seconds before a stop request or a hung worker is detected."""

_PLACE_S = 20.0
"""Seconds without an answer after which a replacement counts as not placed on any machine."""


@dataclass(frozen=True)
class WorkerFailure:
    """Record of the failure, death or hang of a worker.

    Attributes
    ----------
    index, pid
        Index and process id of the worker.
    how
        Predicate that describes how the worker ended, such as `was killed by SIGKILL`.
    env_steps
        Number of environment steps that the worker had sent; sent steps are not lost.
    lost_steps
        Known number of environment steps that the worker had completed but not sent; unsent steps are lost.
    env_ids
        `env_id` of each environment of the worker. Unfinished episodes of the worker's environments never end; see
        `Aggregator.drop_unfinished`.
    replaced
        Whether the worker was replaced.
    """

    index: int
    pid: int
    how: str
    env_steps: int
    lost_steps: int
    env_ids: range
    replaced: bool

    def __str__(self) -> str:
        end = "replaced" if self.replaced else "not replaced"
        return (
            f"worker {self.index} (process {self.pid}) {self.how} after sending {self.env_steps} steps; "
            f"{self.lost_steps} steps lost; {end}"
        )


class WorkerPool:
    """Pool of a run's workers, which sends requests, receives fragments, and replaces failed workers.

    If idle workers occupy the resources that a replacement requires, an idle worker collects the missing steps in its
    own environments.

    - `workers`: current workers, in order of their indices.
    - `failures`: worker failures in this run, in time order.
    - `earlier_failures`: number of failures before the run was resumed.
    - `waiting_s`: time in seconds that callers spent waiting for fragments.
    """

    def __init__(
        self,
        specs: Sequence[WorkerSpec],
        backend: Backend,
        *,
        max_restarts: int,
        stall_timeout_s: float,
    ) -> None:
        self.workers: list[Worker] = []
        self.failures: list[WorkerFailure] = []
        self.earlier_failures = 0
        self.waiting_s = 0.0
        self._stop_requested = False
        self._backend = backend
        self._restarts_left = max_restarts
        self._stall_timeout_s = stall_timeout_s
        self._sent_before = 0
        self._replacements: dict[Worker, float] = {}
        """Start times of replacement workers."""
        self._left_at: float | None = None
        """Time when the caller received a fragment and has not requested the next; None while it waits."""
        try:
            for spec in specs:
                self.workers.append(backend.start(spec))
        except BaseException:
            self.close()
            raise

    @property
    def sent_steps(self) -> int:
        """Number of environment steps in the fragments that workers have sent."""
        return self._sent_before + sum(worker.sent_steps for worker in self.workers)

    @property
    def busy(self) -> list[Worker]:
        """Workers with a request in progress."""
        return [*filter(attrgetter("request"), self.workers)]

    def request_stop(self) -> None:
        """Request `receive` to return soon."""
        self._stop_requested = True

    def is_stopping(self) -> bool:
        """Return whether `request_stop` has been called."""
        return self._stop_requested

    def ask(self, requests: Mapping[int, Request]) -> None:
        """Send one request to each worker whose index is a key of `requests`, unless a stop has been requested."""
        if self._stop_requested:
            return
        for position, request in requests.items():
            self.workers[position].ask(request)

    def receive(
        self, next_request: Callable[[Worker], Request | None] | None = None
    ) -> Iterator[tuple[Worker, Collected]]:
        """Yield each fragment with its worker on arrival, until all requests are complete or a stop is requested.

        When a worker completes its request, the result of `next_request` is sent to the worker, unless the result is
        None.
        """
        self._come_back()
        while (busy := self.busy) and not self._stop_requested:
            began = time.monotonic()
            workers = self._backend.wait(busy, _LOOK_S)
            self.waiting_s += time.monotonic() - began
            for worker in busy:
                if self.is_stopping():
                    return
                if worker not in workers:
                    if worker not in self._replacements or not self._has_stand_in(worker):
                        worker.check_stall(self._stall_timeout_s)
                    continue
                try:
                    collected = worker.receive()
                except WorkerExit as end:
                    self._note_exit(worker, end)
                    continue
                if collected is None and worker.request is None and next_request is not None:
                    request = next_request(worker)
                    if request is not None:
                        self.ask({self._place_of(worker.spec.index): request})
                if collected is not None:
                    self._left_at = time.monotonic()
                    yield worker, collected
                    del collected
                    self._come_back()

    def leave(self) -> None:
        """Record that no caller is waiting for fragments until `receive` is called or resumed."""
        self._left_at = time.monotonic()

    def _come_back(self) -> None:
        """Extend the stall deadlines by the time during which no caller was waiting for fragments."""
        if self._left_at is not None:
            away_s = time.monotonic() - self._left_at
            self._left_at = None
            for worker in self.workers:
                worker.heard_at += away_s

    def drain(self) -> Iterator[tuple[Worker, Collected]]:
        """Request all workers to exit within two seconds, and yield the fragments that the workers have sent."""
        for worker in self.workers:
            worker.terminate()
        deadline = time.monotonic() + GRACE_S
        for worker in self.workers:
            for collected in worker.drain(deadline):
                yield worker, collected

    def close(self) -> None:
        """Kill all remaining workers."""
        self._sent_before = self.sent_steps
        workers, self.workers = self.workers, []
        for worker in workers:
            worker.end()

    def _note_exit(self, worker: Worker, end: WorkerExit) -> None:
        self._backend.forget(worker)
        spec, request = worker.spec, worker.request or Request()
        left = replace(
            request,
            n_step=None if request.n_step is None else request.n_step - worker.env_steps,
            n_episode=None if request.n_episode is None else request.n_episode - worker.episodes,
        )
        if any(amount is not None and amount <= 0 for amount in (left.n_step, left.n_episode)):
            # The worker died after its last request.
            worker.request = None
            return
        # If there were no resources for a worker, there are none for its replacement.
        replaced = self._restarts_left > 0 and not isinstance(end, WorkerUnplaced)
        self._record_failure(worker, end, replaced=replaced)
        if not replaced:
            worker.request = None
            error = WorkerError(_word_exit(worker, request, end))
            if end.details:
                error.add_note(end.details)
            raise error from end.__cause__
        self._restarts_left -= 1
        seed = seeds_at(spec.seed, RESTART, self.earlier_failures + len(self.failures))
        self._replace(worker, replace(spec, seed=seed, first_unroll_id=spec.first_unroll_id + worker.fragments))
        self.ask({self._place_of(spec.index): left})

    def _record_failure(self, worker: Worker, end: WorkerExit, *, replaced: bool) -> None:
        self.failures.append(
            WorkerFailure(
                index=worker.spec.index,
                pid=worker.pid,
                how=end.how + (f": {end.why}" if end.why else ""),
                env_steps=worker.total_steps,
                lost_steps=worker.lost_steps,
                env_ids=worker.spec.env_ids,
                replaced=replaced,
            )
        )

    def _replace(self, worker: Worker, spec: WorkerSpec) -> None:
        self._sent_before += worker.sent_steps
        worker.end()
        self._replacements.pop(worker, None)
        replacement = self._backend.start(spec)
        self._replacements[replacement] = time.monotonic()
        self.workers[self.workers.index(worker)] = replacement

    def _place_of(self, index: int) -> int:
        return next(position for position, worker in enumerate(self.workers) if worker.spec.index == index)

    def _has_stand_in(self, worker: Worker) -> bool:
        """Reassign the request of a worker without resources, and return whether other workers can execute the request.

        The request is assigned to an idle worker; if all workers are busy, the request waits until a worker is idle. An
        unlimited request remains assigned to the replacement, because the other workers also have unlimited requests.
        """
        request = worker.request
        if worker.is_placed or request is None or isinstance(request, StateRequest):
            return False
        others = [other for other in self.workers if other is not worker and other.is_placed]
        if not others or time.monotonic() - self._replacements[worker] < _PLACE_S:
            return bool(others)
        idle = next((other for other in others if other.request is None), None)
        if idle is not None and (request.n_step, request.n_episode) != (None, None):
            self._backend.forget(worker)
            why = f"no node has resources for it; worker {idle.spec.index} collects its steps"
            self._record_failure(worker, WorkerExit("did not start", why), replaced=False)
            # The replacement starts when there are resources, for later requests.
            self._replace(worker, worker.spec)
            idle.ask(request)
        return True


def _word_exit(worker: Worker, request: Request, end: WorkerExit) -> str:
    sent = f"{worker.env_steps}{'' if request.n_step is None else f' of {request.n_step}'} steps"
    if request.n_episode is not None:
        sent += f" and {worker.episodes} of {request.n_episode} episodes"
    why = f": {end.why}" if end.why else ""
    return f"worker {worker.spec.index} (process {worker.pid}) {end.how} after sending {sent}{why}"


@dataclass(frozen=True)
class WorkerStats:
    """Statistics of the workers of a run; `RolloutWorkers.stats` contains statistics of steps and episodes.

    Attributes
    ----------
    fragments, nbytes
        Number of received fragments, and total size of their columns in bytes.
    sent_steps
        Number of environment steps in sent fragments, as counted by the workers.
    queue_depth
        Number of sent fragments that have not been received yet.
    waiting_s
        Time in seconds that the caller spent waiting for fragments.
    lost_steps
        Known number of environment steps that failed, dead or hung workers had completed but not sent.
    stale_fragments, stale_steps
        Number of fragments that were discarded because their weights were older than `max_lag` permits, and number of
        environment steps in these fragments.
    restarts
        Number of replaced workers.
    failures
        Worker failures in time order.
    versions
        Number of environment steps by weights version, including steps in stale fragments.
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
    """Counter of steps and episodes in fragments, for the statistics of a `collect` call or of a run."""

    def __init__(self) -> None:
        self.env_steps = 0
        self._agent_steps: dict[PolicyID, int] = {}
        self._ended = RunningStatistics()
        self._is_flat = True

    def add(self, fragment: Fragment, ended: EpisodeStatistics) -> None:
        """Count the steps of a fragment and the episodes that end in the fragment."""
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
        """Return the statistics of all counted fragments; `batch` is the concatenation of these fragments."""
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
    """Counters of the fragments received from the workers of a run."""

    def __init__(self) -> None:
        self._run = StepCount()
        self._fragments = self._nbytes = self._stale_fragments = self._stale_steps = 0
        self._versions: dict[int, int] = {}
        self._began = self._newest = time.perf_counter()

    def add(self, worker: Worker, fragment: Fragment, ended: EpisodeStatistics, min_version: int) -> bool:
        """Count a fragment and the episodes that it completes; return whether the caller receives the fragment.

        A fragment whose weights version is less than `min_version` is counted as stale and discarded.
        """
        env_steps = fragment.env_steps()
        worker.env_steps += env_steps
        worker.total_steps += env_steps
        worker.episodes += ended.episodes
        self._fragments += 1
        self._nbytes += fragment.size_bytes()
        version = _weights_version(fragment)
        self._versions[version] = self._versions.get(version, 0) + env_steps
        self._newest = time.perf_counter()
        if version < min_version:
            self._stale_fragments += 1
            self._stale_steps += env_steps
            return False
        self._run.add(fragment, ended)
        return True

    def state_dict(self) -> dict[str, Any]:
        """Return the counters of steps and episodes, for `load_state_dict`; `worker_stats` is not included."""
        return {"run": self._run.state_dict(), "time_s": self._newest - self._began}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Restore the counters of steps and episodes from the state of an earlier run."""
        self._run.load_state_dict(state["run"])
        self._newest = time.perf_counter()
        self._began = self._newest - state["time_s"]

    def stats(self) -> CollectStats[Any]:
        """Return the statistics of all fragments that have been returned to the caller."""
        return self._run.report(self._newest - self._began)

    def worker_stats(self, pool: WorkerPool | None) -> WorkerStats:
        """Return the statistics of the received fragments and of the pool's workers."""
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
    batches = [fragment] if isinstance(fragment, SampleBatch) else fragment.policy_batches.values()
    for steps in batches:
        if steps.count and names.WEIGHTS_VERSION in steps:
            return int(steps[names.WEIGHTS_VERSION][0])
    return 0
