"""Main function of worker processes: collect, send, and exchange state."""

from __future__ import annotations

import contextlib
import pickle
import random
import signal
import sys
import traceback
from collections.abc import Iterator
from multiprocessing.connection import Connection
from typing import Any, cast

import numpy as np
import numpy.typing as npt

from samplebatch.batch.multi_agent import MultiAgentBatch
from samplebatch.batch.sample_batch import SampleBatch
from samplebatch.env.seeds import PROCESS, generators_state, load_generators, seeds_at
from samplebatch.errors import ChannelClosedError, PeerDiedError, SampleBatchError
from samplebatch.rollout.statistics import EpisodeStatistics
from samplebatch.transport.broadcast import Subscription
from samplebatch.transport.encode import halve
from samplebatch.transport.peers import begin_child
from samplebatch.transport.producer import Producer
from samplebatch.transport.region import Region
from samplebatch.workers.backend import word_failure
from samplebatch.workers.task import (
    Count,
    Fragment,
    Request,
    StateRequest,
    Task,
    WeightsSource,
    WorkerSpec,
    answer,
    make_task,
)

_NBYTES = 64
"""Bytes of each worker's line: a cache line, to avoid false sharing."""

MADE, SENT, FRAGMENTS, READY, ENDING = range(5)
"""Words of a line: completed environment steps that were sent or may yet be sent, steps that were sent, sent messages,
created environments, and whether the parent requests the worker to end."""


class WorkerCounters:
    """Counters of each worker, which survive its death; all but `ENDING` are written by the worker.

    Examples
    --------
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


def is_end(fragment: Fragment) -> bool:
    """Return whether a message marks the end of a request."""
    return isinstance(fragment, SampleBatch) and not fragment.column_names


def state_bytes(fragment: Fragment) -> bytes | None:
    """Return the bytes of a message with a part of a pickled state; None for other messages."""
    if isinstance(fragment, SampleBatch) and fragment.column_names == (_STATE,):
        return bytes(np.asarray(fragment[_STATE]))
    return None


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


def start_task(spec: WorkerSpec, weights: WeightsSource, count_steps: Count, *, threads: int = 1) -> Task:
    """Create the task of a worker with its own process, and seed the process-wide generators.

    Parameters
    ----------
    spec, weights, count_steps
        As for `make_task`.
    threads
        Number of torch threads, if the policy or the environments import torch.
    """
    seeds = seeds_at(spec.seed, PROCESS, spec.index)
    _seed(seeds)
    task = make_task(spec, weights, count_steps)
    torch = sys.modules.get("torch")
    if torch is not None:
        torch.set_num_threads(threads)
        _seed(seeds)
    return task


def exchange_state(task: Task, request: StateRequest) -> bytes | None:
    """Restore the state in a request, or return the pickled state, including process-wide generators."""
    reply = answer(task, request)
    if request.state is not None:
        load_generators(request.state["generators"])
        return None
    try:
        return pickle.dumps(reply if "refused" in reply else {**reply, "generators": generators_state()})
    except Exception as error:
        return pickle.dumps({"refused": f"{type(error).__name__}: {error}"})


def _seed(seeds: np.random.SeedSequence) -> None:
    """Seed the process-wide generators, which torch distributions use, so that workers draw different numbers."""
    words = seeds.generate_state(3).tolist()
    random.seed(words[0])
    np.random.seed(words[1])
    torch = sys.modules.get("torch")
    if torch is not None:
        torch.manual_seed(words[2])
