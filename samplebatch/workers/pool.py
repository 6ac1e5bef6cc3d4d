"""WorkerPool: the workers of a run, which get requests, send fragments, and are replaced when they fail."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace

from samplebatch.env.seeds import RESTART, seeds_at
from samplebatch.errors import WorkerError
from samplebatch.workers.backend import GRACE_S, Backend, Worker, WorkerExit, WorkerUnplaced
from samplebatch.workers.task import Collected, Request, StateRequest, WorkerSpec

_LOOK_S = 0.1
"""Seconds after which a request to stop, or a worker that hangs, is noticed at the latest."""

_PLACE_S = 20.0
"""Seconds after which no machine is taken to have room for a replacement that has not answered."""


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

    Where no machine has room for a replacement, since workers that are done keep theirs, one of these makes the steps
    that are missing, in its own environments.

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
        self._replacements: dict[Worker, float] = {}
        """The workers that have taken the place of others, and when they were started."""
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

    def receive(
        self, next_request: Callable[[Worker], Request | None] | None = None
    ) -> Iterator[tuple[Worker, Collected]]:
        """Yield fragments as they arrive, each with its worker, until all requests are done or a stop is requested.

        A worker that has done its request gets the `next_request` at once, if there is one.
        """
        self._come_back()
        while (busy := self.busy) and not self._stop_requested:
            began = time.monotonic()
            ready = self._backend.wait(busy, _LOOK_S)
            self.waiting_s += time.monotonic() - began
            for worker in busy:
                if self.is_stopping():
                    return
                if worker not in ready:
                    if not self._has_stand_in(worker):
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
                    self.leave()
                    yield worker, collected
                    del collected
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

    def drain(self) -> Iterator[tuple[Worker, Collected]]:
        """Ask all workers to end, and yield the fragments that they had sent; they have two seconds for that."""
        for worker in self.workers:
            worker.terminate()
        deadline = time.monotonic() + GRACE_S
        for worker in self.workers:
            for collected in worker.drain(deadline):
                yield worker, collected

    def close(self) -> None:
        """Kill all workers that are left."""
        self._sent_before = self.sent_steps
        workers, self.workers = self.workers, []
        for worker in workers:
            worker.end()

    def _note_exit(self, worker: Worker, end: WorkerExit) -> None:
        """Note the failure of a worker, and replace it."""
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
        # Where there was no room for a worker, there is none for its replacement.
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
        """Start a worker in the place of another one, which is ended."""
        self._sent_before += worker.sent_steps
        worker.end()
        self._replacements.pop(worker, None)
        replacement = self._backend.start(spec)
        self._replacements[replacement] = time.monotonic()
        self.workers[self.workers.index(worker)] = replacement

    def _place_of(self, index: int) -> int:
        return next(place for place, worker in enumerate(self.workers) if worker.spec.index == index)

    def _has_stand_in(self, worker: Worker) -> bool:
        """Whether others make the steps of a replacement that no machine has room for; give them its request if so.

        It is given to a worker that is done, and waits for one as long as others are at work. An unlimited request is
        left with the replacement: the others go on in any case.
        """
        request = worker.request
        if worker not in self._replacements or worker.is_placed or request is None or isinstance(request, StateRequest):
            return False
        others = [other for other in self.workers if other is not worker and other.is_placed]
        if not others or time.monotonic() - self._replacements[worker] < _PLACE_S:
            return bool(others)
        idle = next((other for other in others if other.request is None), None)
        if idle is not None and (request.n_step, request.n_episode) != (None, None):
            self._backend.forget(worker)
            why = f"no machine has room for it, and worker {idle.spec.index} makes its steps"
            self._record_failure(worker, WorkerExit("did not start", why), replaced=False)
            # It starts when there is room, for the requests to come.
            self._replace(worker, worker.spec)
            idle.ask(request)
        return True


def _word_exit(worker: Worker, request: Request, end: WorkerExit) -> str:
    sent = f"{worker.env_steps}{'' if request.n_step is None else f' of {request.n_step}'} steps"
    if request.n_episode is not None:
        sent += f" and {worker.episodes} of {request.n_episode} episodes"
    why = f": {end.why}" if end.why else ""
    return f"worker {worker.spec.index} (process {worker.pid}) {end.how} after sending {sent}{why}"
