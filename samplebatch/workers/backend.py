"""Base classes of worker backends, and the backend without processes."""

from __future__ import annotations

import contextlib
import copy
import os
import time
import traceback
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Any

from samplebatch.errors import SampleBatchError
from samplebatch.policy.source import weights_nbytes
from samplebatch.transport.broadcast import Publication, Publisher, Subscription, broadcast
from samplebatch.workers.task import Collected, Request, StateRequest, Task, WorkerSpec, answer, make_task

if TYPE_CHECKING:
    from samplebatch.workers.ray_backend import RayOptions


class WorkerExit(Exception):
    """A worker has failed, died or hung, and all its messages have been received.

    - `how`: how the worker ended.
    - `why`: reason reported by the worker, if any.
    - `details`: further details, such as a traceback.
    """

    def __init__(self, how: str, why: str = "", details: str = "") -> None:
        super().__init__(how)
        self.how = how
        self.why = why
        self.details = details


class WorkerUnplaced(WorkerExit):
    """A worker was never started, because no machine had the resources; a replacement would fail too."""


def word_failure(error: Exception) -> str:
    """Format the reason of a failure for `WorkerExit.why`; errors of other libraries include their class.

    >>> word_failure(KeyError("obs"))
    "KeyError: 'obs'"
    """
    return str(error) if isinstance(error, SampleBatchError) else f"{type(error).__name__}: {error}"


GRACE_S = 2.0
"""Seconds that workers may use to close their environments when they are stopped."""
_START_S = 60.0
"""Minimum time limit of a worker to start, create its environments, and send its first fragment."""
_ALL_ARENAS_NBYTES, _MIN_ARENA_NBYTES, _MAX_ARENA_NBYTES = 256 << 20, 8 << 20, 64 << 20


@dataclass(frozen=True)
class BackendOptions:
    """Arguments of `RolloutWorkers` for its backend.

    - `num_workers`, `policy`, `start_method`, `capacity_nbytes`, `ray_options`: arguments of `RolloutWorkers`.
    """

    num_workers: int
    policy: Any
    start_method: str
    capacity_nbytes: int | None
    ray_options: RayOptions | None = None

    @property
    def fragments_nbytes(self) -> int:
        """Bytes of memory for the fragments of each worker.

        >>> [BackendOptions(workers, "random", "spawn", None).fragments_nbytes >> 20 for workers in (2, 16, 100)]
        [64, 16, 8]
        """
        default = max(_MIN_ARENA_NBYTES, min(_MAX_ARENA_NBYTES, _ALL_ARENAS_NBYTES // self.num_workers))
        return default if self.capacity_nbytes is None else self.capacity_nbytes


class Worker(ABC):
    """Base of workers in any backend, which receive requests and send fragments.

    - `spec`: environments and policy.
    - `request`: current request; None if all requests are done.
    - `env_steps`, `episodes`: environment steps and completed episodes received for the current request.
    - `fragments`, `total_steps`: total number of received messages and environment steps.
    - `heard_at`: monotonic time of the last progress; the stall deadline starts there.
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
        """Process id on the worker's machine; 0 while unknown."""

    @property
    def is_placed(self) -> bool:
        """Whether a machine is known to run the worker."""
        return True

    @property
    def waits_on(self) -> list[Any]:
        """Handles that become ready when there is a message: descriptors of a process, references of Ray."""
        return []

    @property
    @abstractmethod
    def num_envs(self) -> int:
        """Number of environments; 0 until they are created."""

    @property
    @abstractmethod
    def answer(self) -> Any:
        """Newest requested state; raises FormatError if the state cannot be unpickled in this process."""

    @property
    @abstractmethod
    def lost_steps(self) -> int:
        """Known number of environment steps that the worker has completed and that were not received."""

    @property
    @abstractmethod
    def sent_steps(self) -> int:
        """Environment steps in sent fragments."""

    @property
    @abstractmethod
    def waiting(self) -> int:
        """Number of sent fragments that are not received yet."""

    def ask(self, request: Request) -> None:
        """Send a request; if the worker has died, `receive` raises."""
        self.request = request
        self.env_steps = self.episodes = 0
        self.heard_at = time.monotonic()

    @abstractmethod
    def receive(self, timeout_s: float = 0.0) -> Collected | None:
        """Receive the next fragment; None if there is none, or if the request is done.

        Raises WorkerExit if the worker has ended and there are no more fragments.
        """

    @abstractmethod
    def check_stall(self, stall_timeout_s: float) -> None:
        """Kill the worker if it has made no progress for too long; `receive` raises after the last fragment."""

    @abstractmethod
    def terminate(self) -> None:
        """Request the worker to end."""

    @abstractmethod
    def drain(self, deadline: float) -> Iterator[Collected]:
        """Receive the last fragments of a stopping worker; kill the worker at the deadline."""

    @abstractmethod
    def end(self) -> None:
        """Kill the worker; received fragments stay valid."""

    def _find_hang(self, progress: tuple[int, int], stall_timeout_s: float, *, has_sent: bool) -> WorkerExit | None:
        """Return the exit of a worker without progress; None if it makes progress or has time left."""
        now = time.monotonic()
        if not has_sent:
            # The first fragment may require slow imports, such as pandas by pyarrow, and compilation of policies.
            stall_timeout_s = max(stall_timeout_s, _START_S)
        if progress != self._progress:
            self._progress, self.heard_at = progress, now
        elif now - self.heard_at > stall_timeout_s:
            return WorkerExit(f"hangs (it made no step for {stall_timeout_s:g} s)")
        return None


class Weights(ABC):
    """Newest weights of a run, which the learner publishes and workers load."""

    @property
    @abstractmethod
    def version(self) -> int:
        """Number of published versions."""

    @abstractmethod
    def publish(self, weights: Mapping[str, Any]) -> int:
        """Publish weights and return their version; see `RolloutWorkers.publish`."""

    @abstractmethod
    def latest(self) -> Publication:
        """Copy the newest weights; at least one version must have been published."""

    @abstractmethod
    def close(self) -> None:
        """Release the memory."""


class Backend(ABC):
    """Base of backends: starts workers, waits for them, and publishes weights to them.

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
        """Allocate resources for some workers."""

    @abstractmethod
    def start(self, spec: WorkerSpec) -> Worker:
        """Start a worker."""

    @abstractmethod
    def wait(self, busy: Sequence[Worker], timeout_s: float) -> Sequence[Worker]:
        """Wait until workers have messages, and return these workers."""

    def forget(self, worker: Worker) -> None:  # noqa: B027 # optional
        """Stop waiting for a failed worker."""

    @abstractmethod
    def close(self) -> None:
        """Release all memory after the workers have ended; idempotent."""


class SharedWeights(Weights):
    """Broadcast of weights in shared memory, created on first use."""

    def __init__(self, options: BackendOptions) -> None:
        self._nbytes = max(weights_nbytes(options.policy), options.capacity_nbytes or 0)
        self._ends: tuple[Publisher, Subscription] | None = None

    @property
    def subscription(self) -> Subscription:
        """Reader of the broadcast, for workers."""
        return self.open()[1]

    @property
    def version(self) -> int:
        return self.open()[0].version

    def publish(self, weights: Mapping[str, Any]) -> int:
        return self.open()[0].publish(weights)

    def latest(self) -> Publication:
        return self.open()[1].latest()

    def open(self) -> tuple[Publisher, Subscription]:
        """Return both ends of the broadcast."""
        if self._ends is None:
            self._ends = broadcast(self._nbytes)
        return self._ends

    def close(self) -> None:
        for end in self._ends or ():
            end.close()


class InlineBackend(Backend):
    """Workers in this process, executed sequentially; see `Backend`."""

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
    """Worker without a process, which collects on `receive`; see `Worker` for its attributes."""

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
