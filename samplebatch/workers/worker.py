"""The main function of a worker's process: collect, and send."""

from __future__ import annotations

import contextlib
import pickle
import random
import signal
import sys
import traceback
from collections.abc import Iterator, Mapping
from importlib import import_module
from multiprocessing.connection import Connection
from typing import Any

import numpy as np

from samplebatch.batch.sample_batch import SampleBatch
from samplebatch.env.seeds import PROCESS, seeds_at
from samplebatch.errors import ChannelClosedError, PeerDiedError, SampleBatchError
from samplebatch.transport.children import begin_child
from samplebatch.transport.producer import Producer
from samplebatch.transport.region import Region
from samplebatch.transport.subscription import Subscription
from samplebatch.workers.counters import FRAGMENTS, MADE, READY, SENT, WorkerCounters
from samplebatch.workers.spec import Request, StateRequest, WorkerSpec
from samplebatch.workers.task import Fragment, Task, answer, make_task

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
                reason = str(error) if isinstance(error, SampleBatchError) else f"{type(error).__name__}: {error}"
                with contextlib.suppress(SampleBatchError):
                    producer.fail(reason, traceback.format_exc())
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

    _seed(seeds_at(spec.seed, PROCESS, spec.index))
    task = make_task(spec, subscription, count_steps)
    tasks.append(task)
    torch = sys.modules.get("torch")
    if torch is not None:
        # There is a process for each core already.
        torch.set_num_threads(1)
        _seed(seeds_at(spec.seed, PROCESS, spec.index))
    line[READY] = task.num_envs
    for request in _receive_all(requests):
        if isinstance(request, StateRequest):
            _exchange_state(producer, task, request)
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


def _exchange_state(producer: Producer, task: Task, request: StateRequest) -> None:
    """Go on from the state in a request, or send the own, that of the process's generators included."""
    told = answer(task, request)
    if request.state is not None:
        _load_generators(request.state["generators"])
        return
    try:
        pickled = pickle.dumps(told if "refused" in told else {**told, "generators": _save_generators()})
    except Exception as error:
        pickled = pickle.dumps({"refused": f"{type(error).__name__}: {error}"})
    producer.send(SampleBatch({_STATE: np.frombuffer(pickled, np.uint8)}), split=True)


def _receive_all(requests: Connection) -> Iterator[Request]:
    with contextlib.suppress(EOFError):
        while True:
            yield requests.recv()


def _seed(seeds: np.random.SeedSequence) -> None:
    """Seed the process's own generators, which torch's distributions draw from: else all workers draw the same."""
    words = seeds.generate_state(3).tolist()
    random.seed(words[0])
    np.random.seed(words[1])
    torch = sys.modules.get("torch")
    if torch is not None:
        torch.manual_seed(words[2])


def _save_generators() -> dict[str, Any]:
    """Return the states of the process's own generators."""
    torch = sys.modules.get("torch")
    drawn = None if torch is None else torch.get_rng_state()
    return {"random": random.getstate(), "numpy": np.random.get_state(), "torch": drawn}


def _load_generators(state: Mapping[str, Any] | None) -> None:
    """Let the process's own generators go on; a worker without a process leaves those of its caller alone."""
    if state is None:
        return
    random.setstate(state["random"])
    np.random.set_state(state["numpy"])
    if state["torch"] is not None:
        import_module("torch").set_rng_state(state["torch"])


def _quit(*_: Any) -> None:
    sys.exit(0)
