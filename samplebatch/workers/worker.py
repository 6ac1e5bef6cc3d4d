"""The main function of a worker's process: collect, and send."""

from __future__ import annotations

import contextlib
import signal
import sys
import traceback
from collections.abc import Iterator
from multiprocessing.connection import Connection
from typing import Any

import numpy as np

from samplebatch.batch.sample_batch import SampleBatch
from samplebatch.errors import ChannelClosedError, PeerDiedError, SampleBatchError
from samplebatch.transport.children import begin_child
from samplebatch.transport.producer import Producer
from samplebatch.transport.region import Region
from samplebatch.transport.subscription import Subscription
from samplebatch.workers.counters import FRAGMENTS, MADE, READY, SENT, WorkerCounters
from samplebatch.workers.exits import word_failure
from samplebatch.workers.serving import exchange_state, start_task
from samplebatch.workers.spec import Request, StateRequest, WorkerSpec
from samplebatch.workers.task import Fragment, Task

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
    signal.signal(signal.SIGTERM, _quit)
    begin_child()
    line = WorkerCounters(region).line(spec.index)
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
                # A fragment that is too large goes in parts.
                producer.send(fragment, split=True)
            line[SENT] += fragment.env_steps()
            # Steps that were left out are not lost.
            line[MADE] = line[SENT]
            line[FRAGMENTS] = producer.sent
        producer.send(END)
        line[FRAGMENTS] = producer.sent


def _receive_all(requests: Connection) -> Iterator[Request]:
    with contextlib.suppress(EOFError):
        while True:
            yield requests.recv()


def _quit(*_: Any) -> None:
    sys.exit(0)
