"""Ray actor of a worker, which collects one fragment per call."""

from __future__ import annotations

import contextlib
import os
import pickle
import traceback
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Literal

from samplebatch.column.unpickling import unpickle
from samplebatch.errors import require
from samplebatch.rollout.statistics import EpisodeStatistics
from samplebatch.transport.broadcast import Publication, batch_to_weights
from samplebatch.workers.backend import word_failure
from samplebatch.workers.task import StateRequest, Task
from samplebatch.workers.worker import exchange_state, start_task

Packed = tuple[bytes, list[Any]]
"""A pickle and its out-of-band buffers, which Ray copies into its store once and maps on reading."""


Body = tuple[Packed, EpisodeStatistics]
"""A packed fragment and the statistics of the episodes that it ends."""


def pack(value: Any) -> Packed:
    """Pickle a value for Ray's store, with arrays out of band."""
    buffers: list[pickle.PickleBuffer] = []
    return pickle.dumps(value, protocol=5, buffer_callback=buffers.append), buffers


def unpack(packed: Packed, buffers: Sequence[Any] | None = None) -> Any:
    """Unpickle a value from Ray's store, with arrays over `buffers`; by default over writable copies.

    >>> import numpy as np
    >>> value = unpack(pack({"bias": np.zeros(2)}))
    >>> value["bias"] += 1
    >>> value
    {'bias': array([1., 1.])}
    """
    pickled, stored = packed
    return pickle.loads(pickled, buffers=[bytearray(buffer) for buffer in stored] if buffers is None else buffers)


Kind = Literal["progress", "fragment", "state", "end", "failed"]


@dataclass(frozen=True)
class Report:
    """Progress of an actor, part of each answer; small enough to bypass the object store.

    Attributes
    ----------
    kind
        Kind of the answer.
    pid, node
        Process id and node id.
    num_envs
        Number of environments; 0 until they are created.
    messages, sent, made
        Answers to requests that were not over, environment steps in them, and environment steps completed that were
        sent or may yet be sent.
    why, details
        Reason of a failure, and its traceback.
    """

    kind: Kind = "progress"
    pid: int = 0
    node: str = ""
    num_envs: int = 0
    messages: int = 0
    sent: int = 0
    made: int = 0
    why: str = ""
    details: str = ""


class RayCollector:
    """Worker in a Ray actor; `RayWorker` calls it with a bounded number of calls in flight.

    The methods `report` and `stop` run in a separate thread, while another call collects.

    Parameters
    ----------
    spec
        Pickled `WorkerSpec`.
    threads
        Number of torch threads.
    """

    def __init__(self, spec: bytes, threads: int) -> None:
        self._spec = spec
        self._threads = threads
        self._weights = _NewestWeights()
        self._task: Task | None = None
        self._number = 0
        self._state_request: StateRequest | None = None
        self._messages = self._sent = self._made = 0
        self._is_stopping = False
        self._failure: tuple[str, str] | None = None
        self._node = str(require("ray", "ray").get_runtime_context().get_node_id())

    def next(
        self, number: int, request: bytes | None, version: int, weights: list[Any]
    ) -> tuple[Report, Body | bytes | None]:
        """Collect the next fragment of a request.

        Parameters
        ----------
        number
            Number of the request; a request that is over is answered with its end.
        request
            Pickled request, in the first call of the request.
        version, weights
            Version of the newest weights, and a list with their reference in the object store unless sent before.
        """
        if self._failure is None:
            try:
                return self._answer(number, request, version, weights)
            except _Stop:
                return self.report("end"), None
            except Exception as error:
                self._failure = word_failure(error), traceback.format_exc()
        return self.report("failed"), None

    def _answer(
        self, number: int, request: bytes | None, version: int, weights: list[Any]
    ) -> tuple[Report, Body | bytes | None]:
        self._weights.offer(version, weights)
        if request is not None:
            self._begin(number, request)
        if number != self._number or self._is_stopping:
            return self.report("end"), None
        task = self._require_task()
        if self._state_request is not None:
            body: Body | bytes | None = exchange_state(task, self._state_request)
            self._state_request, self._number = None, 0
            return self._reply("state"), body
        fragment = task.next()
        if fragment is None:
            self._number = 0
            return self._reply("end"), None
        self._sent += fragment.env_steps()
        # Omitted steps are not lost.
        self._made = self._sent
        return self._reply("fragment"), (pack(fragment), task.count_ended(fragment))

    def _reply(self, kind: Kind) -> Report:
        self._messages += 1
        return self.report(kind)

    def _begin(self, number: int, pickled: bytes) -> None:
        (request,) = unpickle([pickled], "a request", allow_pickle=True)
        self._number = number
        if isinstance(request, StateRequest):
            self._state_request = request
        else:
            self._require_task().begin(request)

    def _require_task(self) -> Task:
        if self._task is None:
            (spec,) = unpickle([self._spec], "the specification of a worker", allow_pickle=True)
            self._task = start_task(spec, self._weights, self._count_steps, threads=self._threads)
        return self._task

    def _count_steps(self, steps: int) -> None:
        self._made += steps
        if self._is_stopping:
            raise _Stop

    def report(self, kind: Kind = "progress") -> Report:
        """Return the progress of the actor."""
        return Report(
            kind,
            os.getpid(),
            self._node,
            0 if self._task is None else self._task.num_envs,
            self._messages,
            self._sent,
            self._made,
            *(self._failure or ()),
        )

    def stop(self) -> None:
        """Stop collecting, and abandon the current fragment at its next step."""
        self._is_stopping = True

    def close(self) -> None:
        """Close the environments."""
        if self._task is not None:
            with contextlib.suppress(Exception):
                self._task.close()


class _NewestWeights:
    """Newest weights known to an actor, fetched when they are first loaded."""

    def __init__(self) -> None:
        self.version = 0
        self._reference: Any = None

    def offer(self, version: int, references: list[Any]) -> None:
        """Record newer weights, if any."""
        if references:
            self.version, (self._reference,) = version, references

    def latest(self) -> Publication:
        """Copy the newest weights."""
        return read_weights(require("ray", "ray"), self.version, self._reference)


class _Stop(BaseException):
    """Raised in a step whose fragment is no longer requested."""


def read_weights(ray: Any, version: int, reference: Any) -> Publication:
    """Copy weights from the store; see `StoredWeights`."""
    return Publication(version, batch_to_weights(unpack(ray.get(reference))))
