"""Workers in supervised processes on this machine, which send fragments through shared memory."""

from __future__ import annotations

import contextlib
import multiprocessing
import time
from collections.abc import Callable, Iterator, Sequence
from multiprocessing.context import BaseContext
from typing import Any, cast

from samplebatch import names
from samplebatch.batch.multi_agent import MultiAgentBatch
from samplebatch.column.unpickling import unpickle
from samplebatch.env.environment_process import start_child, wait_for_exit
from samplebatch.errors import (
    ChannelTimeoutError,
    EndOfStreamError,
    EnvironmentSpecError,
    SampleBatchError,
    WorkerError,
)
from samplebatch.policy.source import PickledPolicy
from samplebatch.rollout.statistics import EpisodeStatistics
from samplebatch.transport.broadcast import Subscription
from samplebatch.transport.channel import channel
from samplebatch.transport.channel_end import HEADER_NBYTES
from samplebatch.transport.consumer import Consumer
from samplebatch.transport.peers import Poller
from samplebatch.workers.backend import GRACE_S, Backend, BackendOptions, SharedWeights, Worker, WorkerExit
from samplebatch.workers.task import Collected, Fragment, Request, WorkerSpec
from samplebatch.workers.worker import (
    ENDED,
    ENDING,
    FRAGMENTS,
    MADE,
    READY,
    SENT,
    WorkerCounters,
    is_end,
    state_bytes,
    work,
)


class ProcessBackend(Backend):
    """Processes on this machine, each with a channel in shared memory; see `Backend`."""

    def __init__(self, options: BackendOptions) -> None:
        self._context = multiprocessing.get_context(options.start_method)
        self._capacity_nbytes = options.fragments_nbytes
        self._weights = SharedWeights(options)
        self._board: WorkerCounters | None = None
        self._poller: Poller | None = None
        self._watched: set[Worker] = set()
        self._senders: dict[int, Worker] = {}
        """Watched workers by descriptor."""

    def pack_policy(self, policy: Any) -> Callable[[], Any]:
        return PickledPolicy(policy)

    @property
    def weights(self) -> SharedWeights:
        return self._weights

    def open(self, workers: int) -> None:
        self._weights.open()
        self._board = WorkerCounters.create(workers)
        self._poller = Poller()

    def start(self, spec: WorkerSpec) -> Worker:
        assert self._board is not None
        return WorkerProcess(spec, self._context, self._board, self._weights.subscription, self._capacity_nbytes)

    def wait(self, busy: Sequence[Worker], timeout_s: float) -> Sequence[Worker]:
        if self._poller is None:
            return busy
        for worker in busy:
            if worker not in self._watched:
                self._watch(worker, self._poller)
        senders = [self._senders[descriptor] for descriptor in self._poller.poll(timeout_s)]
        for worker in senders:
            if worker.request is None:
                # The exit of an idle process is handled at its next request.
                self.forget(worker)
        return senders

    def _watch(self, worker: Worker, poller: Poller) -> None:
        self._watched.add(worker)
        for descriptor in worker.waits_on:
            self._senders[descriptor] = worker
            poller.register(descriptor)

    def forget(self, worker: Worker) -> None:
        self._watched.discard(worker)
        for descriptor in [
            descriptor_of_worker for descriptor_of_worker, other in self._senders.items() if other is worker
        ]:
            del self._senders[descriptor]
            if self._poller is not None:
                self._poller.unregister(descriptor)

    def close(self) -> None:
        self._watched.clear()
        self._senders.clear()
        for resource in (self._poller, self._board, self._weights):
            if resource is not None:
                resource.close()
        self._poller = self._board = None


class WorkerProcess(Worker):
    """Worker process and the consumer of its channel; see `Worker` for its attributes."""

    def __init__(
        self,
        spec: WorkerSpec,
        context: BaseContext,
        board: WorkerCounters,
        subscription: Subscription,
        capacity_nbytes: int,
    ) -> None:
        super().__init__(spec)
        self._told = b""
        board.clear(spec.index)
        self._line = board.line(spec.index)
        producer, self._consumer = channel(capacity_nbytes, allow_pickle=True)
        requests, self._requests = context.Pipe(duplex=False)
        must = "env, policy_mapping and hooks go to other processes, and must be names or importable functions"
        args = (producer, requests, subscription, board.region, spec)
        try:
            self._process = start_child(context, work, args, name=f"rollout-worker-{spec.index}", must=must)
        except EnvironmentSpecError:
            self._consumer.close()
            self._requests.close()
            raise
        finally:
            producer.close()
            requests.close()
        self._pid = self._process.pid or 0
        self._hang: WorkerExit | None = None

    @property
    def waits_on(self) -> list[int]:
        return [self._consumer.fileno(), self._process.sentinel]

    @property
    def pid(self) -> int:
        return self._pid

    @property
    def num_envs(self) -> int:
        return int(self._line[READY])

    @property
    def answer(self) -> Any:
        return unpickle([self._told], f"the state of worker {self.spec.index}", allow_pickle=True)[0]

    @property
    def lost_steps(self) -> int:
        return max(0, int(self._line[MADE]) - self.total_steps)

    @property
    def sent_steps(self) -> int:
        # The worker may have been killed before it counted its last fragment.
        return max(int(self._line[SENT]), self.total_steps)

    @property
    def waiting(self) -> int:
        return max(0, int(self._line[FRAGMENTS]) - self.fragments)

    def ask(self, request: Request) -> None:
        super().ask(request)
        self._told = b""
        with contextlib.suppress(BrokenPipeError):
            self._requests.send(request)

    def receive(self, timeout_s: float = 0.0) -> Collected | None:
        """Receive the next fragment, in the arena if enough memory stays free, otherwise as a copy."""
        was_alive = self._process.is_alive()
        try:
            fragment = cast("Fragment", self._consumer.recv(timeout_s))
        except ChannelTimeoutError:
            if was_alive:
                return None
            raise self._exit() from None
        except EndOfStreamError:
            raise self._exit() from None
        except WorkerError as error:
            raise WorkerExit("failed", str(error), "\n".join(getattr(error, "__notes__", ()))) from None
        except SampleBatchError as error:
            raise self._exit(str(error)) from None
        self._heard_at = time.monotonic()
        self.fragments += 1
        if is_end(fragment):
            self.request = None
            return None
        state_part = state_bytes(fragment)
        if state_part is not None:
            self._told += state_part
            return None
        fragment, ended = _open_fragment(fragment)
        return Collected(fragment if _leaves_room(self._consumer) else fragment.copy(), ended)

    def _exit(self, why: str = "") -> WorkerExit:
        if self._hang is not None:
            return self._hang
        end = wait_for_exit(self._process, GRACE_S)
        return WorkerExit(end.how, why if end.status is None else "", end.advice)

    def check_stall(self, stall_timeout_s: float) -> None:
        hang = self._find_hang(
            (self.num_envs, int(self._line[MADE])), stall_timeout_s, has_sent=bool(self._line[FRAGMENTS])
        )
        if hang is not None and self._hang is None and not self._consumer.poll():
            self._hang = hang
            self._process.kill()

    def terminate(self) -> None:
        self._line[ENDING] = 1
        self._process.terminate()

    def drain(self, deadline: float) -> Iterator[Collected]:
        """Receive the last fragments; kill the process at the deadline."""
        with contextlib.suppress(WorkerExit):
            while True:
                fragment = self.receive(min(0.1, max(0.0, deadline - time.monotonic())))
                if fragment is not None:
                    yield fragment
                elif time.monotonic() > deadline:
                    self._process.kill()

    def end(self) -> None:
        self._process.kill()
        self._process.join()
        self._process.close()
        self._requests.close()
        self._consumer.close()


def _leaves_room(consumer: Consumer) -> bool:
    """Return whether half of the arena is contiguous free memory.

    No fragment is larger, so fragments kept by the caller never prevent a worker from sending the next one.
    """
    start = int(consumer._memory.ctypes.data) + HEADER_NBYTES
    stop = start + consumer.capacity_nbytes
    half = consumer.capacity_nbytes // 2
    leases = [lease for lease in [tie() for tie in list(consumer._lent.values())] if lease is not None]
    spans = sorted((int(lease.ctypes.data), lease.nbytes) for lease in leases)
    free_from = start
    for address, nbytes in spans:
        if address - free_from >= half:
            return True
        free_from = address + nbytes
    return stop - free_from >= half


def _open_fragment(message: Fragment) -> Collected:
    """Split a message into its fragment and the statistics of the episodes that it ends."""
    if not isinstance(message, MultiAgentBatch) or ENDED not in message.policy_batches:
        return Collected(message, EpisodeStatistics(0, 0, {}))
    report = message.policy_batches.pop(ENDED)
    pickled = report[ENDED].tobytes()
    ((is_flat, ended),) = unpickle([pickled], "the statistics of a worker", allow_pickle=True)
    return Collected(message.policy_batches[names.DEFAULT_POLICY_ID] if is_flat else message, ended)
