"""Workers in supervised processes on this machine, which send fragments through shared memory."""

from __future__ import annotations

import contextlib
import multiprocessing
import pickle
import signal
import sys
import time
import traceback
from collections.abc import Callable, Iterator, Sequence
from multiprocessing.connection import Connection
from multiprocessing.context import BaseContext
from typing import Any, cast

import numpy as np
import numpy.typing as npt

from samplebatch import names
from samplebatch.batch.multi_agent import MultiAgentBatch
from samplebatch.batch.sample_batch import SampleBatch
from samplebatch.column.unpickling import unpickle
from samplebatch.env.environment_process import start_child, wait_for_exit
from samplebatch.errors import (
    ChannelClosedError,
    ChannelTimeoutError,
    EndOfStreamError,
    EnvironmentSpecError,
    PeerDiedError,
    SampleBatchError,
    WorkerError,
)
from samplebatch.policy.source import PickledPolicy
from samplebatch.rollout.statistics import EpisodeStatistics
from samplebatch.transport.broadcast import Subscription
from samplebatch.transport.channel import channel
from samplebatch.transport.encode import halve
from samplebatch.transport.peers import Poller, begin_child
from samplebatch.transport.producer import Producer
from samplebatch.transport.region import Region
from samplebatch.workers.backend import (
    GRACE_S,
    Backend,
    BackendOptions,
    SharedWeights,
    Worker,
    WorkerExit,
    word_failure,
)
from samplebatch.workers.task import (
    Collected,
    Fragment,
    Request,
    StateRequest,
    Task,
    WorkerSpec,
    exchange_state,
    start_task,
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
        senders = [*map(self._senders.__getitem__, self._poller.poll(timeout_s))]
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
        self.heard_at = time.monotonic()
        self.fragments += 1
        ended = EpisodeStatistics(0, 0, {})
        if isinstance(fragment, SampleBatch):
            if not fragment.column_names:
                self.request = None
                return None
            if fragment.column_names == (_STATE,):
                self._told += bytes(fragment[_STATE])
                return None
        elif ENDED in fragment.policy_batches:
            pickled = fragment.policy_batches.pop(ENDED)[ENDED].tobytes()
            ((is_flat, ended),) = unpickle([pickled], "the statistics of a worker", allow_pickle=True)
            if is_flat:
                fragment = fragment.policy_batches[names.DEFAULT_POLICY_ID]
        # No fragment is larger than half of the arena, so fragments kept by the caller never block the worker.
        return Collected(fragment if self._consumer.has_free_half() else fragment.copy(), ended)

    def _exit(self, why: str = "") -> WorkerExit:
        if self._hang is not None:
            return self._hang
        end = wait_for_exit(self._process, GRACE_S)
        return WorkerExit(end.how, why if end.status is None else "", end.advice)

    def check_stall(self, stall_timeout_s: float) -> None:
        hang = self._find_hang(
            (int(self._line[READY]), int(self._line[MADE])), stall_timeout_s, has_sent=bool(self._line[FRAGMENTS])
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


# In the process of a worker

_NBYTES = 64
"""Bytes of each worker's line: a cache line, to avoid false sharing."""

MADE, SENT, FRAGMENTS, READY, ENDING = range(5)
"""Words of a line: completed environment steps that were sent or may yet be sent, steps that were sent, sent messages,
created environments, and whether the parent requests the worker to end."""


class WorkerCounters:
    """Counters of each worker, which survive its death; all but `ENDING` are written by the worker.

    >>> board = WorkerCounters.create(2)
    >>> board.line(1)[MADE] += 3
    >>> int(board.line(1)[MADE]), int(board.line(0)[MADE])
    (3, 0)
    >>> board.close()
    """

    def __init__(self, region: Region) -> None:
        self.region = region
        self._words: npt.NDArray[np.int64] = region.array.view(np.int64).reshape(-1, _NBYTES // 8)

    @classmethod
    def create(cls, workers: int) -> WorkerCounters:
        """Allocate the counters of some workers."""
        return cls(Region.create(workers * _NBYTES))

    def line(self, index: int) -> npt.NDArray[np.int64]:
        """Return the counters of a worker."""
        line: npt.NDArray[Any] = self._words[index]
        return line

    def clear(self, index: int) -> None:
        """Set the counters of a worker to 0, before it is replaced."""
        self._words[index] = 0

    def close(self) -> None:
        """Release the memory."""
        self._words = np.zeros((0, 0), np.int64)
        self.region.close()


ENDED = "__ended__"
"""Policy id in messages of the pickled statistics of ended episodes, one row per byte."""
END = SampleBatch()
"""Message after the last fragment of a request."""
_STATE = "worker_state"
"""Only column of messages with a worker's state, one row per byte, so that the state can be split."""


def work(
    producer: Producer, requests: Connection, subscription: Subscription, region: Region, spec: WorkerSpec
) -> None:
    """Execute requests of one worker until the pipe is closed."""
    line = WorkerCounters(region).line(spec.index)

    def end(*_: Any) -> None:
        # The parent handles a SIGTERM to the process group: it first requests the collected steps.
        if line[ENDING]:
            sys.exit(0)

    signal.signal(signal.SIGTERM, end)
    begin_child()
    tasks: list[Task] = []
    try:
        with producer:
            try:
                _serve(producer, requests, subscription, line, spec, tasks)
            except (ChannelClosedError, PeerDiedError):
                # The parent is gone.
                return
            except Exception as error:
                with contextlib.suppress(SampleBatchError):
                    producer.fail(word_failure(error), traceback.format_exc())
    finally:
        for task in tasks:
            with contextlib.suppress(Exception):
                task.close()


def _serve(
    producer: Producer,
    requests: Connection,
    subscription: Subscription,
    line: Any,
    spec: WorkerSpec,
    tasks: list[Task],
) -> None:
    def count_steps(steps: int) -> None:
        line[MADE] += steps

    # One torch thread, because there is already one process per core.
    task = start_task(spec, subscription, count_steps)
    tasks.append(task)
    line[READY] = task.num_envs
    for request in _receive_all(requests):
        if isinstance(request, StateRequest):
            pickled = exchange_state(task, request)
            if pickled is not None:
                producer.send(SampleBatch({_STATE: np.frombuffer(pickled, np.uint8)}), split=True)
        else:
            task.begin(request)
        while (fragment := task.next()) is not None:
            if fragment.env_steps():
                _send(producer, fragment, task)
            line[SENT] += fragment.env_steps()
            # Omitted steps are not lost.
            line[MADE] = line[SENT]
            line[FRAGMENTS] = producer.sent
        producer.send(END)
        line[FRAGMENTS] = producer.sent


def _send(producer: Producer, fragment: Fragment, task: Task) -> None:
    """Send a fragment with the statistics of the episodes that it ends; split fragments that are too large."""
    # Smaller fragments are never split and need no check.
    is_large = fragment.size_bytes() > producer.capacity_nbytes // 32
    before = task.episodes.state_dict() if is_large else {}
    ended = task.count_ended(fragment)
    message = _with_ended(fragment, ended) if ended.episodes else fragment
    if is_large and not producer.fits(message):
        parts = halve(fragment)
        if parts:
            task.episodes.load_state_dict(before)
            for part in parts:
                _send(producer, cast("Fragment", part), task)
            return
    producer.send(message, split=True)


def _with_ended(fragment: Fragment, ended: EpisodeStatistics) -> MultiAgentBatch:
    is_flat = isinstance(fragment, SampleBatch)
    pickled = np.frombuffer(pickle.dumps((is_flat, ended)), np.uint8)
    batches = {**fragment.as_multi_agent().policy_batches, ENDED: SampleBatch({ENDED: pickled})}
    return MultiAgentBatch._of(batches, fragment.env_steps())


def _receive_all(requests: Connection) -> Iterator[Request]:
    with contextlib.suppress(EOFError):
        while True:
            yield requests.recv()
