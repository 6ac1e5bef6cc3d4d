"""WorkerPool: the workers of a run, which get requests, send fragments, and are replaced when they fail."""

from __future__ import annotations

import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace

from samplebatch.env.seeds import RESTART, seeds_at
from samplebatch.errors import WorkerError
from samplebatch.workers.backend import GRACE_S, Backend, Worker
from samplebatch.workers.exits import WorkerExit
from samplebatch.workers.spec import Request, WorkerSpec
from samplebatch.workers.task import Fragment

_LOOK_S = 0.1
"""Seconds after which a request to stop, or a worker that hangs, is noticed at the latest."""


@dataclass(frozen=True)
class WorkerFailure:
    """The failure, death or hang of a worker.

    Attributes
    ----------
    index, pid
        Which worker it was.
    how
        How it ended, such as `was killed by SIGKILL`.
    env_steps
        Steps that it had sent, and that count.
    lost_steps
        Steps that it had made and not sent, as far as is known: they are dropped.
    env_ids
        Its environments. The episodes that were under way in them will never end: see `Aggregator.drop_unfinished`.
    replaced
        Whether another took its place.
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
    """Workers of a run under supervision: they get requests, and send fragments; who fails is replaced.

    Parameters
    ----------
    specs
        The environments and the policy of each.
    backend
        Starts them, and waits for them.
    max_restarts
        How many may be replaced.
    stall_timeout_s
        Seconds without a sign of life after which a worker is taken to hang.

    Attributes
    ----------
    workers
        Those that are there, in order.
    failures
        Those that failed, in order of time.
    earlier_failures
        How many workers had failed when the run was resumed.
    waiting_s
        Seconds that were spent waiting for fragments.
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
        self._left_at: float | None = None
        """When somebody was given a fragment who has not come back for the next."""
        try:
            for spec in specs:
                self.workers.append(backend.start(spec))
        except BaseException:
            self.close()
            raise

    @property
    def sent_steps(self) -> int:
        """Environment steps in the fragments that workers have sent."""
        return self._sent_before + sum(worker.sent_steps for worker in self.workers)

    @property
    def busy(self) -> list[Worker]:
        """Workers that have not done all that they were asked for."""
        return [worker for worker in self.workers if worker.request is not None]

    def request_stop(self) -> None:
        """Let `receive` end soon."""
        self._stop_requested = True

    def is_stopping(self) -> bool:
        """Tell whether `request_stop` has been called."""
        return self._stop_requested

    def ask(self, requests: Mapping[int, Request]) -> None:
        """Send requests to workers, by their places; none once a stop is requested."""
        if self._stop_requested:
            return
        for place, request in requests.items():
            self.workers[place].ask(request)

    def receive(self) -> Iterator[tuple[Worker, Fragment]]:
        """Yield fragments as they arrive, each with its worker, until all requests are done or a stop is requested.

        Raises
        ------
        WorkerError
            If a worker fails that cannot be replaced.
        """
        self._come_back()
        while self.busy and not self.is_stopping():
            ready = self._wait()
            for worker in self.busy:
                if self.is_stopping():
                    return
                if worker not in ready:
                    worker.check_stall(self._stall_timeout_s)
                    continue
                try:
                    fragment = worker.receive()
                except WorkerExit as end:
                    self._note_exit(worker, end)
                    continue
                if fragment is not None:
                    self.leave()
                    yield worker, fragment
                    del fragment
                    self._come_back()

    def leave(self) -> None:
        """Take it that nobody waits for fragments until `receive` is called or goes on."""
        self._left_at = time.monotonic()

    def _come_back(self) -> None:
        """Do not count the time for which nobody wanted anything from the workers."""
        if self._left_at is not None:
            away_s = time.monotonic() - self._left_at
            self._left_at = None
            for worker in self.workers:
                worker.extend_deadline(away_s)

    def drain(self) -> Iterator[tuple[Worker, Fragment]]:
        """Ask all workers to end, and yield the fragments that they had sent; they have two seconds for that."""
        for worker in self.workers:
            worker.terminate()
        deadline = time.monotonic() + GRACE_S
        for worker in self.workers:
            for fragment in worker.drain(deadline):
                yield worker, fragment

    def close(self) -> None:
        """Kill all workers that are left."""
        self._sent_before = self.sent_steps
        workers, self.workers = self.workers, []
        for worker in workers:
            worker.end()

    def _wait(self) -> Sequence[Worker]:
        """Wait for workers that have something to say."""
        began = time.monotonic()
        ready = self._backend.wait(self.busy, _LOOK_S)
        self.waiting_s += time.monotonic() - began
        return ready

    def _note_exit(self, worker: Worker, end: WorkerExit) -> None:
        """Note the failure of a worker, and replace it.

        Raises
        ------
        WorkerError
            If it cannot be replaced.
        """
        self._backend.forget(worker)
        spec, request = worker.spec, worker.request or Request()
        left = replace(
            request,
            n_step=None if request.n_step is None else request.n_step - worker.env_steps,
            n_episode=None if request.n_episode is None else request.n_episode - worker.episodes,
        )
        if any(amount is not None and amount <= 0 for amount in (left.n_step, left.n_episode)):
            # It died when it had nothing left to do.
            worker.request = None
            return
        replaced = self._restarts_left > 0
        self.failures.append(
            WorkerFailure(
                index=spec.index,
                pid=worker.pid,
                how=end.how + (f": {end.why}" if end.why else ""),
                env_steps=worker.total_steps,
                lost_steps=worker.lost_steps,
                env_ids=spec.env_ids,
                replaced=replaced,
            )
        )
        if not replaced:
            worker.request = None
            error = WorkerError(_word_exit(worker, request, end))
            if end.details:
                error.add_note(end.details)
            raise error from end.__cause__
        self._restarts_left -= 1
        self._sent_before += worker.sent_steps
        worker.end()
        seed = seeds_at(spec.seed, RESTART, self.earlier_failures + len(self.failures))
        place = self.workers.index(worker)
        self.workers[place] = self._backend.start(
            replace(spec, seed=seed, first_unroll_id=spec.first_unroll_id + worker.fragments)
        )
        self.ask({place: left})


def _word_exit(worker: Worker, request: Request, end: WorkerExit) -> str:
    sent = f"{worker.env_steps}{'' if request.n_step is None else f' of {request.n_step}'} steps"
    if request.n_episode is not None:
        sent += f" and {worker.episodes} of {request.n_episode} episodes"
    why = f": {end.why}" if end.why else ""
    return f"worker {worker.spec.index} (process {worker.pid}) {end.how} after sending {sent}{why}"
