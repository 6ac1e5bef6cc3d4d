"""Receiver processes for the rows of `bench_transport`.

Each contestant has one receiver process, which is started on first use and reused for all rows. The process receives a
function of this module and its connections through a pipe. Each function receives batches until the stream ends, and
answers through another pipe. The first answer is a summary of the received batch, which `measure` compares.
"""

from __future__ import annotations

import atexit
import contextlib
import multiprocessing
import pickle
import struct
from collections.abc import Callable
from functools import cache
from multiprocessing.connection import Connection
from typing import Any

_SUMMARY = struct.Struct("<qd")
"""Layout of a summary: number of rows, last reward."""

TOKEN = bytes(64)
"""Token with the size of a pipe message of our channel."""

TOKEN_COLUMNS = {"rewards": [0.0]}
"""Columns that stand for a token."""


class Answers:
    """Acknowledgement of every n-th batch; the first acknowledgement is a summary of the batch."""

    def __init__(self, back: Connection, every: int) -> None:
        self._back = back
        self._every = every
        self._count = 0

    def acknowledge(self, columns: Any) -> None:
        """Count a received batch, and answer if it is an n-th batch."""
        self._count += 1
        if self._count == self._every:
            rewards = columns["rewards"]
            self._back.send_bytes(_SUMMARY.pack(len(rewards), float(rewards[-1])))
        elif self._count % self._every == 0:
            self._back.send_bytes(TOKEN)


def consume(consumer: Any, back: Connection, every: int) -> None:
    """Receive batches from our channel, and answer every n-th batch."""
    from samplebatch.errors import EndOfStreamError

    acknowledge = Answers(back, every).acknowledge
    with consumer, contextlib.suppress(EndOfStreamError):
        while True:
            batch = consumer.recv()
            acknowledge(batch)
            del batch


def read_objects(source: Connection, back: Connection, every: int) -> None:
    """Receive objects that `Connection.send` of multiprocessing or torch has sent."""
    acknowledge = Answers(back, every).acknowledge
    while (columns := source.recv()) is not None:
        acknowledge(columns)
        del columns


def read_pickles(source: Connection, back: Connection, every: int) -> None:
    """Receive pickled batches with in-band buffers."""
    acknowledge = Answers(back, every).acknowledge
    while raw := source.recv_bytes():
        columns = pickle.loads(raw)
        acknowledge(columns)
        del raw, columns


def read_tokens(source: Connection, back: Connection, every: int) -> None:
    """Receive tokens instead of batches."""
    acknowledge = Answers(back, every).acknowledge
    while raw := source.recv_bytes():
        acknowledge(TOKEN_COLUMNS)
        del raw


def _serve(requests: Connection) -> None:
    with contextlib.suppress(EOFError):
        while True:
            task, arguments = requests.recv()
            requests.send("ready")
            task(*arguments)
            del task, arguments


@cache
def _partner(name: str) -> Connection:
    context = multiprocessing.get_context("spawn")
    local, remote = context.Pipe()
    context.Process(target=_serve, args=(remote,), daemon=True, name=f"partner of {name}").start()
    remote.close()
    atexit.register(local.close)
    return local


class Session:
    """Connection of one row to a receiver process; it is closed when the object is deleted.

    Parameters
    ----------
    name
        Name of the contestant.
    task
        Function that the receiver process runs.
    ends
        Connections from which the receiver process receives.
    close
        Function that ends the task of the receiver process.
    every
        Number of messages per answer.
    """

    def __init__(
        self, name: str, task: Callable[..., None], ends: tuple[Any, ...], close: Callable[[], Any], every: int = 1
    ) -> None:
        self._close = close
        self._back, remote = multiprocessing.Pipe(duplex=False)
        requests = _partner(name)
        requests.send((task, (*ends, remote, every)))
        requests.recv()
        remote.close()
        self._summary: tuple[int, float] | None = None

    def answer(self) -> tuple[int, float]:
        """Wait for the next answer, and return the summary in the first answer of the session."""
        raw = self._back.recv_bytes()
        if self._summary is None:
            rows, last_reward = _SUMMARY.unpack(raw)
            self._summary = rows, last_reward
        return self._summary

    def __del__(self) -> None:
        # Resources may be destroyed in any order when the program exits.
        with contextlib.suppress(OSError):
            self._close()
        self._back.close()
