"""Child processes of the tests of channels; the module is quick to import."""

from __future__ import annotations

import os
import signal
import time
from typing import Any

import numpy as np

from samplebatch import Batch, MultiAgentBatch, SampleBatch
from samplebatch.transport.consumer import Consumer
from samplebatch.transport.producer import Producer

AnyBatch = SampleBatch | MultiAgentBatch | Batch


def steps(n: int = 4, seed: int = 0) -> SampleBatch:
    rng = np.random.default_rng(seed)
    return SampleBatch(
        obs={"camera": rng.integers(0, 255, (n, 4, 4), np.uint8), "arm": rng.random((n, 3))},
        rewards=rng.random(n),
        terminateds=rng.random(n) < 0.5,
    )


def sequences() -> SampleBatch:
    return SampleBatch(
        a=np.arange(6),
        obs={"x": np.arange(6.0), "y": (np.zeros((6, 3), np.uint8),)},
        infos=[{"step": i} for i in range(6)],
        state_in_0=np.array([[1.0], [2.0], [3.0], [4.0]], np.float32),
        seq_lens=[2, 3, 0, 1],
        _num_grad_updates=1.5,
    )


def some_batches() -> list[AnyBatch]:
    return [
        steps(),
        steps(7),
        SampleBatch(obs=np.arange(400_000.0).reshape(-1, 2)),
        sequences(),
        sequences().right_zero_pad(4),
        SampleBatch(),
        SampleBatch(obs=np.zeros((0, 3))),
        MultiAgentBatch({"walker": steps(3), "guard": sequences().right_zero_pad(4)}, 3),
        MultiAgentBatch({}, 0),
        Batch(obs=Batch(x=np.arange(3), later=Batch()), act=np.arange(3), info=None, tag="a", k=np.float32(2)),
        Batch(),
    ]


def produce(producer: Producer) -> None:
    with producer:
        for batch in some_batches():
            producer.send(batch, timeout_s=20)


def echo(consumer: Consumer, producer: Producer) -> None:
    with consumer, producer:
        for batch in consumer:
            producer.send(batch, timeout_s=20)


def send_many(producer: Producer, count: int) -> None:
    """Send batches so large that an arena of 16 KiB stores only one."""
    with producer:
        for i in range(count):
            producer.send(SampleBatch(i=np.full(1500, i)), timeout_s=20)


def produce_from_queue(queue: Any) -> None:
    produce(queue.get())


def leave(producer: Producer, how: str) -> None:
    producer.send(steps(3))
    if how == "raise":
        raise ValueError("the dog ate it")
    if how == "exit":
        os._exit(3)
    if how == "kill":
        os.kill(os.getpid(), signal.SIGKILL)


def idle(end: Producer | Consumer, other: Any, how: str) -> None:
    if how == "kill":
        os.kill(os.getpid(), signal.SIGKILL)


def pass_on(queue: Any, further: Any, arrived: Any) -> None:
    further.put(queue.get())
    # What goes through a queue is asked for at the process that sent it.
    arrived.wait()


def consume(consumer: Consumer, count: int, how: str) -> None:
    for _ in range(count):
        consumer.recv(timeout_s=10)
    if how == "close":
        consumer.close()
        time.sleep(30)
    leave_now = {"exit": lambda: os._exit(3), "kill": lambda: os.kill(os.getpid(), signal.SIGKILL)}
    if how in leave_now:
        leave_now[how]()
