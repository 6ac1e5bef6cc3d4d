"""LocalWorker: a worker's work done in this process, for debugging."""

from __future__ import annotations

import contextlib
import os
import traceback
from collections.abc import Iterator

from samplebatch.batch.multi_agent import MultiAgentBatch
from samplebatch.batch.sample_batch import SampleBatch
from samplebatch.errors import SampleBatchError
from samplebatch.transport.subscription import Subscription
from samplebatch.workers.exits import WorkerExit
from samplebatch.workers.spec import WorkerSpec
from samplebatch.workers.task import Task, make_task


class LocalWorker:
    """A worker without a process, with the interface of `WorkerProcess`: it collects when it is asked for a fragment.

    Attributes
    ----------
    spec, env_steps, episodes, fragments, finished
        As of `WorkerProcess`.
    made, sent_steps
        Environment steps made, and those of them in fragments.
    """

    waiting = 0

    def __init__(self, spec: WorkerSpec, subscription: Subscription) -> None:
        self.spec = spec
        self.pid = os.getpid()
        self.env_steps = self.episodes = self.fragments = self.made = self.sent_steps = 0
        self.finished = False
        self._subscription = subscription
        self._task: Task | None = None

    def receive(self, timeout_s: float = 0.0) -> SampleBatch | MultiAgentBatch | None:
        """Make the next fragment; None if all is done.

        Raises
        ------
        WorkerExit
            If anything is raised on the way, which is its cause.
        """
        try:
            if self._task is None:
                self._task = make_task(self.spec, self._count)
            self._task.refresh(self._subscription)
            made = self._task.next()
        except Exception as error:
            reason = str(error) if isinstance(error, SampleBatchError) else f"{type(error).__name__}: {error}"
            raise WorkerExit("failed", reason, traceback.format_exc()) from error
        if made is None:
            self.finished = True
            return None
        self.fragments += 1
        self.sent_steps += made.env_steps()
        return made

    def _count(self, steps: int) -> None:
        self.made += steps

    def check_stall(self, stall_timeout_s: float) -> None:
        """Do nothing: a worker without a process cannot stall."""

    def extend_deadline(self, seconds: float) -> None:
        """Do nothing: there is no time that counts."""

    def terminate(self) -> None:
        """Do nothing: nothing is done unless it is asked for."""

    def drain(self, deadline: float) -> Iterator[SampleBatch | MultiAgentBatch]:
        """Yield nothing: no fragment is made before it is asked for."""
        yield from ()

    def end(self) -> None:
        """Close the environments."""
        if self._task is not None:
            with contextlib.suppress(Exception):
                self._task.close()
