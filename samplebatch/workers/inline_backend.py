"""InlineBackend: workers in this process, for debugging."""

from __future__ import annotations

import contextlib
import copy
import os
import traceback
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from typing import Any

from samplebatch.transport.subscription import Subscription
from samplebatch.workers.backend import Backend, BackendOptions, Worker
from samplebatch.workers.exits import WorkerExit, word_failure
from samplebatch.workers.shared_weights import SharedWeights
from samplebatch.workers.spec import Request, StateRequest, WorkerSpec
from samplebatch.workers.task import Fragment, Task, answer, make_task


class InlineBackend(Backend):
    """Workers in this process, which work one after the other; see `Backend`."""

    def __init__(self, options: BackendOptions) -> None:
        self._weights = SharedWeights(options)

    def pack_policy(self, policy: Any) -> Callable[[], Any]:
        """Copy a policy for each worker."""
        return partial(copy.deepcopy, policy)

    @property
    def weights(self) -> SharedWeights:
        """The newest weights."""
        return self._weights

    def open(self, workers: int) -> None:
        """Reserve memory for weights."""
        self._weights.open()

    def start(self, spec: WorkerSpec) -> Worker:
        """Make a worker."""
        return LocalWorker(spec, self._weights.subscription)

    def wait(self, busy: Sequence[Worker], timeout_s: float) -> Sequence[Worker]:
        """Return all: each works when it is asked for a fragment."""
        return busy

    def close(self) -> None:
        """Let go of the weights."""
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
        """The id of this process."""
        return os.getpid()

    @property
    def answer(self) -> Any:
        """The state that it was asked for last."""
        return self._answer

    @property
    def lost_steps(self) -> int:
        """Environment steps of the fragment that it is making."""
        return self._lost_steps

    @property
    def num_envs(self) -> int:
        """How many environments it has; 0 until they are made."""
        return 0 if self._task is None else self._task.num_envs

    @property
    def sent_steps(self) -> int:
        """Environment steps in the fragments that it has made."""
        return self.total_steps

    def ask(self, request: Request) -> None:
        """Take a request."""
        super().ask(request)
        if self._task is not None and not isinstance(request, StateRequest):
            self._task.begin(request)

    def receive(self, timeout_s: float = 0.0) -> Fragment | None:
        """Make the next fragment; None if the request is done.

        Raises
        ------
        WorkerExit
            If anything is raised on the way, which is its cause.
        """
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
        return made

    def _count(self, steps: int) -> None:
        self._lost_steps += steps

    def check_stall(self, stall_timeout_s: float) -> None:
        """Do nothing: a worker without a process cannot stall."""

    def terminate(self) -> None:
        """Do nothing: nothing is done unless it is asked for."""

    def drain(self, deadline: float) -> Iterator[Fragment]:
        """Yield nothing: no fragment is made before it is asked for."""
        yield from ()

    def end(self) -> None:
        """Close the environments."""
        if self._task is not None:
            with contextlib.suppress(Exception):
                self._task.close()
