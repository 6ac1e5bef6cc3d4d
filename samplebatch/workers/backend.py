"""Base classes of worker backends, and the backends for worker processes and for workers in the calling process."""

from __future__ import annotations

import contextlib
import copy
import multiprocessing
import os
import pickle
import signal
import sys
import time
import traceback
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from multiprocessing.connection import Connection
from multiprocessing.context import BaseContext
from typing import TYPE_CHECKING, Any, cast

import numpy as np
import numpy.typing as npt

from samplebatch import errors, names
from samplebatch.batch.multi_agent import MultiAgentBatch
from samplebatch.batch.sample_batch import SampleBatch
from samplebatch.column.unpickling import unpickle
from samplebatch.policy.source import PickledPolicy, weights_nbytes
from samplebatch.rollout.statistics import EpisodeStatistics
from samplebatch.transport.broadcast import Publication, Publisher, Subscription, broadcast
from samplebatch.transport.channel import channel
from samplebatch.transport.encode import halve
from samplebatch.transport.peers import Poller, begin_child, start_child, wait_for_exit
from samplebatch.transport.producer import Producer
from samplebatch.transport.region import Region
from samplebatch.workers.task import (
    Collected,
    Fragment,
    Request,
    StateRequest,
    Task,
    WorkerSpec,
    answer,
    exchange_state,
    make_task,
    start_task,
)

if TYPE_CHECKING:
    from samplebatch.workers.ray_backend import RayOptions


class WorkerExit(Exception):
    """Exception that reports a failed, dead or hung worker; raised after the worker's last message.

    - `how`: how the worker ended.
    - `why`: reason that the worker reported; empty if it reported none.
    - `details`: further details, such as a traceback.
    """

    def __init__(self, how: str, why: str = "", details: str = "") -> None:
        super().__init__(how)
        self.how = how
        self.why = why
        self.details = details


class WorkerUnplaced(WorkerExit):
    """Exception for a worker whose resources no machine can provide; a replacement could not start either."""


def word_failure(error: Exception) -> str:
    """Format an error as a reason for `WorkerExit.why`; errors of other libraries are prefixed with the error class.

    >>> word_failure(KeyError("obs"))
    "KeyError: 'obs'"
    """
    return str(error) if isinstance(error, errors.SampleBatchError) else f"{type(error).__name__}: {error}"


GRACE_S = 2.0
"""Seconds that workers may use to close their environments when they are stopped."""
_START_S = 60.0
"""Minimum time limit of a worker to start, create its environments, and send its first fragment."""
_ALL_ARENAS_NBYTES, _MIN_ARENA_NBYTES, _MAX_ARENA_NBYTES = 256 << 20, 8 << 20, 64 << 20


@dataclass(frozen=True)
class BackendOptions:
    """Arguments of `RolloutWorkers` that are passed to its backend.

    - `num_workers`, `policy`, `start_method`, `capacity_nbytes`, `ray_options`: as in `RolloutWorkers`.
    """

    num_workers: int
    policy: Any
    start_method: str
    capacity_nbytes: int | None
    ray_options: RayOptions | None = None

    @property
    def fragments_nbytes(self) -> int:
        """Size of the memory for the fragments of each worker, in bytes.

        >>> [
        ...     BackendOptions(workers, "random", "spawn", None).fragments_nbytes >> 20
        ...     for workers in (2, 16, 100)
        ... ]
        [64, 16, 8]
        """
        default = max(_MIN_ARENA_NBYTES, min(_MAX_ARENA_NBYTES, _ALL_ARENAS_NBYTES // self.num_workers))
        return default if self.capacity_nbytes is None else self.capacity_nbytes


class Worker(ABC):
    """Base class of worker handles in all backends; workers receive requests and send fragments.

    - `spec`: environments and policy of the worker.
    - `request`: current request; None if all requests are complete.
    - `env_steps`, `episodes`: numbers of environment steps and completed episodes that were received for the current
      request.
    - `fragments`, `total_steps`: total numbers of received messages and received environment steps.
    - `heard_at`: monotonic time of the worker's last progress, from which the stall deadline is measured.
    """

    def __init__(self, spec: WorkerSpec) -> None:
        self.spec = spec
        self.request: Request | None = None
        self.env_steps = self.episodes = self.fragments = self.total_steps = 0
        self._progress = (0, 0)
        self.heard_at = time.monotonic()

    @property
    @abstractmethod
    def pid(self) -> int:
        """Process id on the worker's machine; 0 until the process id is known."""

    @property
    def is_placed(self) -> bool:
        """Whether a machine has been assigned to the worker."""
        return True

    @property
    def waits_on(self) -> list[Any]:
        """File descriptors, or object references of Ray, that become ready when a message is available."""
        return []

    @property
    @abstractmethod
    def num_envs(self) -> int:
        """Number of the worker's environments; 0 until the environments have been created."""

    @property
    @abstractmethod
    def answer(self) -> Any:
        """The state returned by the worker.

        Raises FormatError if the state cannot be unpickled in this process.
        """

    @property
    @abstractmethod
    def lost_steps(self) -> int:
        """Known number of environment steps that the worker has completed, but that this process has not received."""

    @property
    @abstractmethod
    def sent_steps(self) -> int:
        """Number of environment steps in the fragments that the worker has sent."""

    @property
    @abstractmethod
    def waiting(self) -> int:
        """Number of sent fragments that have not been received yet."""

    def ask(self, request: Request) -> None:
        """Send a request; if the worker has died, the next `receive` raises the error."""
        self.request = request
        self.env_steps = self.episodes = 0
        self.heard_at = time.monotonic()

    @abstractmethod
    def receive(self, timeout_s: float = 0.0) -> Collected | None:
        """Receive the next fragment; return None if no fragment is available or the request is complete.

        Raises WorkerExit if the worker has exited and all its fragments have been received.
        """

    @abstractmethod
    def check_stall(self, stall_timeout_s: float) -> None:
        """Kill the worker if it has made no progress within the stall deadline.

        After the last fragment of a killed worker, `receive` raises WorkerExit.
        """

    @abstractmethod
    def terminate(self) -> None:
        """Request the worker to exit."""

    @abstractmethod
    def drain(self, deadline: float) -> Iterator[Collected]:
        """Receive the last fragments of a worker that was requested to exit; kill the worker at the deadline."""

    @abstractmethod
    def end(self) -> None:
        """Kill the worker; fragments that have been received stay valid."""

    def _find_hang(self, progress: tuple[int, int], stall_timeout_s: float, *, has_sent: bool) -> WorkerExit | None:
        """Return a WorkerExit if the worker has made no progress within the stall deadline; otherwise None."""
        now = time.monotonic()
        if not has_sent:
            # The first fragment may require slow imports, such as pandas by pyarrow, and compilation of policies.
            stall_timeout_s = max(stall_timeout_s, _START_S)
        if progress != self._progress:
            self._progress, self.heard_at = progress, now
        elif now - self.heard_at > stall_timeout_s:
            return WorkerExit(f"hangs (it completed no step for {stall_timeout_s:g} s)")
        return None


class Weights(ABC):
    """Store from which workers load the newest published weights of a run."""

    @property
    @abstractmethod
    def version(self) -> int:
        """Number of published versions."""

    @abstractmethod
    def publish(self, weights: Mapping[str, Any]) -> int:
        """Publish weights and return their version; see `RolloutWorkers.publish`."""

    @abstractmethod
    def latest(self) -> Publication:
        """Copy the newest weights; requires that a version has been published."""

    @abstractmethod
    def close(self) -> None:
        """Release the memory."""


class Backend(ABC):
    """Base class of backends, which start workers, receive messages from the workers, and publish weights.

    `RolloutWorkers` creates a backend by name; see `samplebatch.workers.workers`.
    """

    @abstractmethod
    def pack_policy(self, policy: Any) -> Callable[[], Any]:
        """Return a function that creates a copy of a policy in a worker.

        Raises PolicySpecError if the policy cannot be sent to a worker.
        """

    @property
    @abstractmethod
    def weights(self) -> Weights:
        """Newest weights."""

    @abstractmethod
    def open(self, workers: int) -> None:
        """Allocate resources for the given number of workers."""

    @abstractmethod
    def start(self, spec: WorkerSpec) -> Worker:
        """Start a worker."""

    @abstractmethod
    def wait(self, busy: Sequence[Worker], timeout_s: float) -> Sequence[Worker]:
        """Wait up to `timeout_s` seconds until at least one worker has a message; return the workers with messages."""

    def forget(self, worker: Worker) -> None:  # noqa: B027 # optional
        """Stop waiting for a failed worker."""

    @abstractmethod
    def close(self) -> None:
        """Release all memory after the workers have exited; idempotent."""


class SharedWeights(Weights):
    """Broadcast of weights in shared memory, created on first use."""

    def __init__(self, options: BackendOptions) -> None:
        self._nbytes = max(weights_nbytes(options.policy), options.capacity_nbytes or 0)
        self._ends: tuple[Publisher, Subscription] | None = None

    @property
    def subscription(self) -> Subscription:
        """Subscription to the broadcast, which is passed to the workers."""
        return self.open()[1]

    @property
    def version(self) -> int:
        return self.open()[0].version

    def publish(self, weights: Mapping[str, Any]) -> int:
        return self.open()[0].publish(weights)

    def latest(self) -> Publication:
        return self.open()[1].latest()

    def open(self) -> tuple[Publisher, Subscription]:
        """Return the publishing and the reading end of the broadcast."""
        if self._ends is None:
            self._ends = broadcast(self._nbytes)
        return self._ends

    def close(self) -> None:
        for end in self._ends or ():
            end.close()


class InlineBackend(Backend):
    """Backend that executes workers sequentially in the calling process."""

    def __init__(self, options: BackendOptions) -> None:
        self._weights = SharedWeights(options)

    def pack_policy(self, policy: Any) -> Callable[[], Any]:
        # Copy now, as other backends pickle now: the training flag may change before a worker starts.
        return partial(copy.deepcopy, copy.deepcopy(policy))

    @property
    def weights(self) -> SharedWeights:
        return self._weights

    def open(self, workers: int) -> None:
        self._weights.open()

    def start(self, spec: WorkerSpec) -> Worker:
        return LocalWorker(spec, self._weights.subscription)

    def wait(self, busy: Sequence[Worker], timeout_s: float) -> Sequence[Worker]:
        return busy

    def close(self) -> None:
        self._weights.close()


class LocalWorker(Worker):
    """Worker that runs in the calling process and collects when `receive` is called; for attributes, see `Worker`."""

    waiting = 0

    def __init__(self, spec: WorkerSpec, subscription: Subscription) -> None:
        super().__init__(spec)
        self._subscription = subscription
        self._task: Task | None = None
        self._lost_steps = 0
        self._answer: Any = None

    @property
    def pid(self) -> int:
        return os.getpid()

    @property
    def answer(self) -> Any:
        return self._answer

    @property
    def lost_steps(self) -> int:
        return self._lost_steps

    @property
    def num_envs(self) -> int:
        return 0 if self._task is None else self._task.num_envs

    @property
    def sent_steps(self) -> int:
        return self.total_steps

    def ask(self, request: Request) -> None:
        super().ask(request)
        if self._task is not None and not isinstance(request, StateRequest):
            self._task.begin(request)

    def receive(self, timeout_s: float = 0.0) -> Collected | None:
        try:
            if self._task is None:
                self._task = make_task(self.spec, self._subscription, self._count)
                if self.request is not None:
                    self.ask(self.request)
            if isinstance(self.request, StateRequest):
                self._answer = answer(self._task, self.request)
                fragment = None
            else:
                fragment = self._task.next()
        except Exception as error:
            raise WorkerExit("failed", word_failure(error), traceback.format_exc()) from error
        self._lost_steps = 0
        if fragment is None:
            self.request = None
            return None
        self.fragments += 1
        return Collected(fragment, self._task.count_ended(fragment))

    def _count(self, steps: int) -> None:
        self._lost_steps += steps

    def check_stall(self, stall_timeout_s: float) -> None:
        return None

    def terminate(self) -> None:
        return None

    def drain(self, deadline: float) -> Iterator[Collected]:
        yield from ()

    def end(self) -> None:
        if self._task is not None:
            with contextlib.suppress(Exception):
                self._task.close()


class ProcessBackend(Backend):
    """Backend that starts worker processes on this machine, each with a channel in shared memory."""

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
    """Handle of a worker process, with the consumer of its channel; `Worker` describes the attributes."""

    def __init__(
        self,
        spec: WorkerSpec,
        context: BaseContext,
        board: WorkerCounters,
        subscription: Subscription,
        capacity_nbytes: int,
    ) -> None:
        super().__init__(spec)
        self._state_bytes = b""
        board.clear(spec.index)
        self._line = board.line(spec.index)
        producer, self._consumer = channel(capacity_nbytes, allow_pickle=True)
        requests, self._requests = context.Pipe(duplex=False)
        requirement = "env, policy_mapping and hooks go to other processes, and must be names or importable functions"
        args = (producer, requests, subscription, board.region, spec)
        try:
            self._process = start_child(
                context, work, args, name=f"rollout-worker-{spec.index}", requirement=requirement
            )
        except errors.EnvironmentSpecError:
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
        return unpickle([self._state_bytes], f"the state of worker {self.spec.index}", allow_pickle=True)[0]

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
        self._state_bytes = b""
        with contextlib.suppress(BrokenPipeError):
            self._requests.send(request)

    def receive(self, timeout_s: float = 0.0) -> Collected | None:
        """Receive the next fragment, as a view of shared memory if enough memory remains free, otherwise as a copy."""
        was_alive = self._process.is_alive()
        try:
            fragment = cast("Fragment", self._consumer.recv(timeout_s))
        except errors.ChannelTimeoutError:
            if was_alive:
                return None
            raise self._exit() from None
        except errors.EndOfStreamError:
            raise self._exit() from None
        except errors.WorkerError as error:
            raise WorkerExit("failed", str(error), "\n".join(getattr(error, "__notes__", ()))) from None
        except errors.SampleBatchError as error:
            raise self._exit(str(error)) from None
        self.heard_at = time.monotonic()
        self.fragments += 1
        ended = EpisodeStatistics(0, 0, {})
        if isinstance(fragment, SampleBatch):
            if not fragment.column_names:
                self.request = None
                return None
            if fragment.column_names == (_STATE,):
                self._state_bytes += bytes(fragment[_STATE])
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
    """Counters of each worker in shared memory, which remain readable after the worker's death.

    A worker writes all of its counters except `ENDING`, which the parent process writes.

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
        """Allocate counters for the given number of workers."""
        return cls(Region.create(workers * _NBYTES))

    def line(self, index: int) -> npt.NDArray[np.int64]:
        """Return the counters of a worker."""
        line: npt.NDArray[Any] = self._words[index]
        return line

    def clear(self, index: int) -> None:
        """Set a worker's counters to 0, before the worker or its replacement is started."""
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
    """Execute requests in a worker process until the request pipe is closed."""
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
            except (errors.ChannelClosedError, errors.PeerDiedError):
                # The parent is gone.
                return
            except Exception as error:
                with contextlib.suppress(errors.SampleBatchError):
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
    """Send a fragment and the statistics of the episodes that end in it; split a fragment that is too large."""
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
