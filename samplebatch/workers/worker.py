"""The main function of a worker's process: collect, send, and exchange state."""

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
"""Bytes of each worker's line: a cache line, which no other process writes to."""

MADE, SENT, FRAGMENTS, READY, ENDING = range(5)
"""Words of a line: environment steps made that were sent or may yet be, those of them that were sent, the messages that
the worker has sent, how many environments it has made, and whether its parent asks it to end."""


class WorkerCounters:
    """A line of numbers for each worker, which stays when it is killed; all but `ENDING` are written by that worker.

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
        """Make the counters of some workers."""
        return cls(Region.create(workers * _NBYTES))

    def line(self, index: int) -> npt.NDArray[np.int64]:
        """Return the numbers of a worker."""
        line: npt.NDArray[Any] = self._words[index]
        return line

    def clear(self, index: int) -> None:
        """Set the numbers of a worker to 0, before another takes its place."""
        self._words[index] = 0

    def close(self) -> None:
        """Let go of the memory."""
        self._words = np.zeros((0, 0), np.int64)
        self.region.close()


ENDED = "__ended__"
"""The part of a fragment that has the pickled statistics of the episodes that ended with it, a row a byte."""
END = SampleBatch()
"""Sent once a request is done."""
_STATE = "worker_state"
"""The only column of messages with the state of a worker, a row a byte, so that it may go in parts."""


def is_end(fragment: Fragment) -> bool:
    """Tell whether a message is the mark that a request is done."""
    return isinstance(fragment, SampleBatch) and not fragment.column_names


def state_bytes(fragment: Fragment) -> bytes | None:
    """Return the bytes in a message that is a part of a state, pickled; None for any other."""
    if isinstance(fragment, SampleBatch) and fragment.column_names == (_STATE,):
        return bytes(np.asarray(fragment[_STATE]))
    return None


def work(
    producer: Producer, requests: Connection, subscription: Subscription, region: Region, spec: WorkerSpec
) -> None:
    """Do the work of one worker, request by request, until there are none to come."""
    line = WorkerCounters(region).line(spec.index)

    def end(*_: Any) -> None:
        # A SIGTERM to the group of processes is the parent's to handle: it asks for what has been collected first.
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
                # There is nobody to send anything to.
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

    # Torch has one thread: there is a process for each core already.
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
            # Steps that were left out are not lost.
            line[MADE] = line[SENT]
            line[FRAGMENTS] = producer.sent
        producer.send(END)
        line[FRAGMENTS] = producer.sent


def _send(producer: Producer, fragment: Fragment, task: Task) -> None:
    """Send a fragment with the statistics of the episodes that end with it; one that is too large goes in parts."""
    # Fragments of less are never split, and need no second look.
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
    """Add statistics to a fragment, for `ProcessBackend` to take off again."""
    is_flat = isinstance(fragment, SampleBatch)
    pickled = np.frombuffer(pickle.dumps((is_flat, ended)), np.uint8)
    batches = {**fragment.as_multi_agent().policy_batches, ENDED: SampleBatch({ENDED: pickled})}
    return MultiAgentBatch._of(batches, fragment.env_steps())


def _receive_all(requests: Connection) -> Iterator[Request]:
    with contextlib.suppress(EOFError):
        while True:
            yield requests.recv()


def start_task(spec: WorkerSpec, weights: WeightsSource, count_steps: Count, *, threads: int = 1) -> Task:
    """Make the task of a worker that has this process for itself, and seed the process's own generators.

    Parameters
    ----------
    spec, weights, count_steps
        As for `make_task`.
    threads
        How many threads torch may use, if the policy or the environments import it.
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
    """Go on from the state in a request, or return the own, pickled, that of the process's generators included."""
    told = answer(task, request)
    if request.state is not None:
        load_generators(request.state["generators"])
        return None
    try:
        return pickle.dumps(told if "refused" in told else {**told, "generators": generators_state()})
    except Exception as error:
        return pickle.dumps({"refused": f"{type(error).__name__}: {error}"})


def _seed(seeds: np.random.SeedSequence) -> None:
    """Seed the process's own generators, which torch's distributions draw from: else all workers draw the same."""
    words = seeds.generate_state(3).tolist()
    random.seed(words[0])
    np.random.seed(words[1])
    torch = sys.modules.get("torch")
    if torch is not None:
        torch.manual_seed(words[2])
