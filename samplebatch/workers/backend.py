"""Backends: where the workers of a run live, and how the learner reaches them."""

from __future__ import annotations

import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from samplebatch.transport.subscription import Publication
from samplebatch.workers.exits import WorkerExit
from samplebatch.workers.ray_options import RayOptions
from samplebatch.workers.spec import Request, WorkerSpec
from samplebatch.workers.task import Fragment

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
    num_workers, policy, start_method, capacity_bytes, ray_options
        As given to `RolloutWorkers`.
    """

    num_workers: int
    policy: Any
    start_method: str
    capacity_bytes: int | None
    ray_options: RayOptions | None = None

    @property
    def fragments_nbytes(self) -> int:
        """Size of the memory of each worker's fragments.

        >>> [BackendOptions(workers, "random", "spawn", None).fragments_nbytes >> 20 for workers in (2, 16, 100)]
        [64, 16, 8]
        """
        least = max(_MIN_ARENA_NBYTES, min(_MAX_ARENA_NBYTES, _ALL_ARENAS_NBYTES // self.num_workers))
        return least if self.capacity_bytes is None else self.capacity_bytes


class Worker(ABC):
    """A worker as `WorkerPool` sees it, wherever it runs: it takes requests, and sends fragments.

    Parameters
    ----------
    spec
        The environments and the policy.

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
    def receive(self, timeout_s: float = 0.0) -> Fragment | None:
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
    def drain(self, deadline: float) -> Iterator[Fragment]:
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

    `RolloutWorkers` makes one by its name; see `samplebatch.workers.backends`.
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
