"""ProcessBackend: workers in processes of this machine, which send through shared memory."""

from __future__ import annotations

import multiprocessing
from collections.abc import Callable, Sequence
from typing import Any

from samplebatch.policy.source import PickledPolicy
from samplebatch.transport.children import interrupts_blocked
from samplebatch.transport.peers import Poller
from samplebatch.workers.backend import Backend, BackendOptions, Worker
from samplebatch.workers.counters import WorkerCounters
from samplebatch.workers.shared_weights import SharedWeights
from samplebatch.workers.spec import WorkerSpec
from samplebatch.workers.supervision import WorkerProcess


class ProcessBackend(Backend):
    """Processes on this machine, each with a channel in shared memory; see `Backend`."""

    def __init__(self, options: BackendOptions) -> None:
        self._context = multiprocessing.get_context(options.start_method)
        self._capacity_bytes = options.fragments_nbytes
        self._weights = SharedWeights(options)
        self._board: WorkerCounters | None = None
        self._poller: Poller | None = None
        self._watched: set[Worker] = set()
        self._senders: dict[int, Worker] = {}
        """The watched workers by descriptor."""

    def pack_policy(self, policy: Any) -> Callable[[], Any]:
        """Pickle a policy."""
        return PickledPolicy(policy)

    @property
    def weights(self) -> SharedWeights:
        """The newest weights."""
        return self._weights

    def open(self, workers: int) -> None:
        """Reserve memory for weights and counters."""
        self._weights.open()
        self._board = WorkerCounters.create(workers)
        self._poller = Poller()

    def start(self, spec: WorkerSpec) -> Worker:
        """Start a process."""
        assert self._board is not None
        with interrupts_blocked():
            return WorkerProcess(spec, self._context, self._board, self._weights.subscription, self._capacity_bytes)

    def wait(self, busy: Sequence[Worker], timeout_s: float) -> Sequence[Worker]:
        """Wait until a process has sent a message or ended."""
        if self._poller is None:
            return busy
        for worker in busy:
            if worker not in self._watched:
                self._watch(worker, self._poller)
        found = [self._senders[descriptor] for descriptor in self._poller.poll(timeout_s)]
        for worker in found:
            if worker.request is None:
                # A process that ended without anything to do is looked at when it is asked again.
                self.forget(worker)
        return found

    def _watch(self, worker: Worker, poller: Poller) -> None:
        self._watched.add(worker)
        for descriptor in worker.waits_on:
            self._senders[descriptor] = worker
            poller.register(descriptor)

    def forget(self, worker: Worker) -> None:
        """Wait no more for a process."""
        self._watched.discard(worker)
        for descriptor in [own for own, other in self._senders.items() if other is worker]:
            del self._senders[descriptor]
            if self._poller is not None:
                self._poller.unregister(descriptor)

    def close(self) -> None:
        """Let go of weights, counters and descriptors."""
        self._watched.clear()
        self._senders.clear()
        for own in (self._poller, self._board, self._weights):
            if own is not None:
                own.close()
        self._poller = self._board = None
