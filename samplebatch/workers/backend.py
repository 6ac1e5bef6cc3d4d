"""Backend: where the workers of a run live, and how the learner reaches them; and the one without processes."""

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
    """A worker has failed, died or been found hanging; everything that it sent has been received.

    Attributes
    ----------
    how
        How it ended.
    why
        Its reason, if it gave one.
    details
        More of that, such as a traceback.
    """

    def __init__(self, how: str, why: str = "", details: str = "") -> None:
        super().__init__(how)
        self.how = how
        self.why = why
        self.details = details


class WorkerUnplaced(WorkerExit):
    """A worker was never started, because no machine had room for it: another one would not be either."""


def word_failure(error: Exception) -> str:
    """Word why a worker failed, for `WorkerExit.why`: errors of others are named by their class.

    >>> word_failure(KeyError("obs"))
    "KeyError: 'obs'"
    """
    return str(error) if isinstance(error, SampleBatchError) else f"{type(error).__name__}: {error}"


GRACE_S = 2.0
"""Seconds that workers have to close their environments when they are stopped."""
_START_S = 60.0
"""Seconds that a worker has in any case to start, make its environments, and send its first fragment."""
_ALL_ARENAS_NBYTES, _MIN_ARENA_NBYTES, _MAX_ARENA_NBYTES = 256 << 20, 8 << 20, 64 << 20


@dataclass(frozen=True)
class BackendOptions:
    """The arguments of `RolloutWorkers` that concern a backend.

    Attributes
    ----------
    num_workers, policy, start_method, capacity_nbytes, ray_options
        As given to `RolloutWorkers`.
    """

    num_workers: int
    policy: Any
    start_method: str
    capacity_nbytes: int | None
    ray_options: RayOptions | None = None

    @property
    def fragments_nbytes(self) -> int:
        """Size of the memory of each worker's fragments.

        >>> [BackendOptions(workers, "random", "spawn", None).fragments_nbytes >> 20 for workers in (2, 16, 100)]
        [64, 16, 8]
        """
        least = max(_MIN_ARENA_NBYTES, min(_MAX_ARENA_NBYTES, _ALL_ARENAS_NBYTES // self.num_workers))
        return least if self.capacity_nbytes is None else self.capacity_nbytes


class Worker(ABC):
    """A worker as `WorkerPool` sees it, wherever it runs: it takes requests, and sends fragments.

    Attributes
    ----------
    spec
        The environments and the policy.
    request
        The request that it works on; None if it has done all that it was asked for.
    env_steps, episodes
        Environment steps, and episodes that ended, that were received for that request.
    fragments, total_steps
        Messages and environment steps that were received from it at all.
    """

    def __init__(self, spec: WorkerSpec) -> None:
        self.spec = spec
        self.request: Request | None = None
        self.env_steps = self.episodes = self.fragments = self.total_steps = 0
        self._progress = (0, 0)
        self._heard_at = time.monotonic()

    @property
    @abstractmethod
    def pid(self) -> int:
        """Its process id, on the machine that it runs on; 0 as long as that is not known."""

    @property
    def is_placed(self) -> bool:
        """Whether a machine is known to run it."""
        return True

    @property
    def waits_on(self) -> list[Any]:
        """Handles that its backend waits on for something to receive: descriptors of a process, references of Ray."""
        return []

    @property
    @abstractmethod
    def num_envs(self) -> int:
        """How many environments it has; 0 until they are made."""

    @property
    @abstractmethod
    def answer(self) -> Any:
        """The state that it was asked for last.

        Raises
        ------
        FormatError
            If it cannot be unpickled in this process.
        """

    @property
    @abstractmethod
    def lost_steps(self) -> int:
        """Environment steps that it has made, as far as is known, and that were not received."""

    @property
    @abstractmethod
    def sent_steps(self) -> int:
        """Environment steps in the fragments that it has sent."""

    @property
    @abstractmethod
    def waiting(self) -> int:
        """Fragments that were sent and not received yet."""

    def ask(self, request: Request) -> None:
        """Send a request. That a worker has died is told by `receive`."""
        self.request = request
        self.env_steps = self.episodes = 0
        self._heard_at = time.monotonic()

    @abstractmethod
    def receive(self, timeout_s: float = 0.0) -> Collected | None:
        """Receive the next fragment; None if there is none, or if the request is done.

        Raises
        ------
        WorkerExit
            If there will be no other.
        """

    @abstractmethod
    def check_stall(self, stall_timeout_s: float) -> None:
        """Kill the worker if it has done nothing for too long; `receive` tells of it once it has nothing else."""

    def extend_deadline(self, seconds: float) -> None:
        """Do not count the time for which nobody wanted anything from the worker."""
        self._heard_at += seconds

    @abstractmethod
    def terminate(self) -> None:
        """Ask the worker to end."""

    @abstractmethod
    def drain(self, deadline: float) -> Iterator[Collected]:
        """Receive the last fragments of a worker that is being stopped; kill it if it has not ended by the deadline."""

    @abstractmethod
    def end(self) -> None:
        """Kill the worker; fragments that were received stay."""

    def _find_hang(self, progress: tuple[int, int], stall_timeout_s: float, *, has_sent: bool) -> WorkerExit | None:
        """Tell how a worker hangs that counts no progress any more; None if it does, or has time left."""
        now = time.monotonic()
        if not has_sent:
            # The first fragment may need imports, pandas by pyarrow for one, and policies may be compiled.
            stall_timeout_s = max(stall_timeout_s, _START_S)
        if progress != self._progress:
            self._progress, self._heard_at = progress, now
        elif now - self._heard_at > stall_timeout_s:
            return WorkerExit(f"hangs (it made no step for {stall_timeout_s:g} s)")
        return None


class Weights(ABC):
    """The newest weights of a run, which the learner publishes and workers load."""

    @property
    @abstractmethod
    def version(self) -> int:
        """How many weights have been published."""

    @abstractmethod
    def publish(self, weights: Mapping[str, Any]) -> int:
        """Publish weights, and return their number; see `RolloutWorkers.publish`."""

    @abstractmethod
    def latest(self) -> Publication:
        """Copy the newest weights, of which there must be some."""

    @abstractmethod
    def close(self) -> None:
        """Let go of their memory."""


class Backend(ABC):
    """The place where the workers of a run live: starts them, waits for them, and gives them weights.

    `RolloutWorkers` makes one by its name; see `samplebatch.workers.workers`.
    """

    @abstractmethod
    def pack_policy(self, policy: Any) -> Callable[[], Any]:
        """Return a function that makes a copy of a policy where a worker is.

        Raises
        ------
        PolicySpecError
            If it cannot be sent there.
        """

    @property
    @abstractmethod
    def weights(self) -> Weights:
        """The newest weights."""

    @abstractmethod
    def open(self, workers: int) -> None:
        """Get ready to start some workers."""

    @abstractmethod
    def start(self, spec: WorkerSpec) -> Worker:
        """Start a worker."""

    @abstractmethod
    def wait(self, busy: Sequence[Worker], timeout_s: float) -> Sequence[Worker]:
        """Wait until one of some workers has something to say, and return those that have."""

    def forget(self, worker: Worker) -> None:  # noqa: B027 # most have nothing to forget
        """Wait no more for a worker that has failed."""

    @abstractmethod
    def close(self) -> None:
        """Let go of all memory; workers have been ended before. Safe to call twice."""


class SharedWeights(Weights):
    """A broadcast of weights, made when it is first used."""

    def __init__(self, options: BackendOptions) -> None:
        self._nbytes = max(weights_nbytes(options.policy), options.capacity_nbytes or 0)
        self._ends: tuple[Publisher, Subscription] | None = None

    @property
    def subscription(self) -> Subscription:
        """The end that workers read at."""
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
    """Workers in this process, which work one after the other; see `Backend`."""

    def __init__(self, options: BackendOptions) -> None:
        self._weights = SharedWeights(options)

    def pack_policy(self, policy: Any) -> Callable[[], Any]:
        # A copy of now, as other backends pickle it: the flag of training steps may change before a worker starts.
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
    """A worker without a process: it collects when it is asked for a fragment; see `Worker` for its attributes."""

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
                made = None
            else:
                made = self._task.next()
        except Exception as error:
            raise WorkerExit("failed", word_failure(error), traceback.format_exc()) from error
        self._lost_steps = 0
        if made is None:
            self.request = None
            return None
        self.fragments += 1
        return Collected(made, self._task.count_ended(made))

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
