"""LocalWorker: a worker's work done in this process, for debugging."""

from __future__ import annotations

import contextlib
import os
import traceback
from collections.abc import Iterator
from typing import Any

from samplebatch.errors import SampleBatchError
from samplebatch.transport.subscription import Subscription
from samplebatch.workers.exits import WorkerExit
from samplebatch.workers.spec import Request, StateRequest, WorkerSpec
from samplebatch.workers.task import Fragment, Task, answer, make_task


class LocalWorker:
    """A worker without a process, with the interface of `WorkerProcess`: it collects when it is asked for a fragment.

    Attributes
    ----------
    spec, request, env_steps, episodes, fragments, total_steps, answer
        As of `WorkerProcess`.
    """

    waiting = 0

    def __init__(self, spec: WorkerSpec, subscription: Subscription) -> None:
        self.spec = spec
        self.request: Request | None = None
        self.pid = os.getpid()
        self.env_steps = self.episodes = self.fragments = self.total_steps = 0
        self.lost_steps = 0
        self._subscription = subscription
        self._task: Task | None = None
        self.answer: Any = None

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
        self.request = request
        self.env_steps = self.episodes = 0
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
                self.answer = answer(self._task, self.request)
                made = None
            else:
                made = self._task.next()
        except Exception as error:
            reason = str(error) if isinstance(error, SampleBatchError) else f"{type(error).__name__}: {error}"
            raise WorkerExit("failed", reason, traceback.format_exc()) from error
        self.lost_steps = 0
        if made is None:
            self.request = None
            return None
        self.fragments += 1
        return made

    def _count(self, steps: int) -> None:
        self.lost_steps += steps

    def check_stall(self, stall_timeout_s: float) -> None:
        """Do nothing: a worker without a process cannot stall."""

    def extend_deadline(self, seconds: float) -> None:
        """Do nothing: there is no time that counts."""

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
