"""The process at the other end: what receives in the rows of `bench_transport`.

There is one for each contestant, started when it is first needed and used for all rows. It is told through a pipe which
of the functions below to run, and between what ends. Each receives until nothing more comes, and answers through
another pipe: with what it saw, so that contestants can be held against each other.
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

_SEEN = struct.Struct("<qd")
"""Number of rows, and the last reward."""

TOKEN = bytes(64)
"""As much as one of our own messages takes in its pipe."""

NOTHING = {"rewards": [0.0]}
"""What a token carries."""


class Answers:
    """Says that batches arrived: every so manyth of them, and the first time what was in it, which takes longer."""

    def __init__(self, back: Connection, every: int) -> None:
        self._back = back
        self._every = every
        self._came = 0

    def came(self, columns: Any) -> None:
        """Count a batch, which is there to be read."""
        self._came += 1
        if self._came == self._every:
            rewards = columns["rewards"]
            self._back.send_bytes(_SEEN.pack(len(rewards), float(rewards[-1])))
        elif self._came % self._every == 0:
            self._back.send_bytes(TOKEN)


def consume(consumer: Any, back: Connection, every: int) -> None:
    """Receive batches from our channel, and answer every so manyth."""
    from samplebatch.errors import EndOfStreamError

    came = Answers(back, every).came
    with consumer, contextlib.suppress(EndOfStreamError):
        while True:
            batch = consumer.recv()
            came(batch)
            del batch


def read_objects(source: Connection, back: Connection, every: int) -> None:
    """Receive what `Connection.send` of multiprocessing, or torch's, sends."""
    came = Answers(back, every).came
    while (columns := source.recv()) is not None:
        came(columns)
        del columns


def read_pickles(source: Connection, back: Connection, every: int) -> None:
    """Receive pickles as they are, with their buffers within."""
    came = Answers(back, every).came
    while raw := source.recv_bytes():
        columns = pickle.loads(raw)
        came(columns)
        del raw, columns


def read_tokens(source: Connection, back: Connection, every: int) -> None:
    """Receive bytes that stand for nothing."""
    came = Answers(back, every).came
    while raw := source.recv_bytes():
        came(NOTHING)
        del raw


def _serve(orders: Connection) -> None:
    with contextlib.suppress(EOFError):
        while True:
            task, arguments = orders.recv()
            orders.send("ready")
            task(*arguments)
            del task, arguments


@cache
def _partner(name: str) -> Connection:
    context = multiprocessing.get_context("spawn")
    here, there = context.Pipe()
    context.Process(target=_serve, args=(there,), daemon=True, name=f"partner of {name}").start()
    there.close()
    atexit.register(here.close)
    return here


class Session:
    """One row's work with a partner; what it stands on is closed when the row is done with it.

    Parameters
    ----------
    name
        The contestant.
    task
        What the partner runs.
    ends
        What the partner receives from.
    close
        Lets the partner's task come to its end.
    every
        Which messages the partner answers.
    """

    def __init__(
        self, name: str, task: Callable[..., None], ends: tuple[Any, ...], close: Callable[[], Any], every: int = 1
    ) -> None:
        self._close = close
        self._back, there = multiprocessing.Pipe(duplex=False)
        orders = _partner(name)
        orders.send((task, (*ends, there, every)))
        orders.recv()
        there.close()
        self._seen: tuple[int, float] | None = None

    def answer(self) -> tuple[int, float]:
        """Wait for the partner to answer, and return what it saw in the first batch it answered."""
        raw = self._back.recv_bytes()
        if self._seen is None:
            rows, last = _SEEN.unpack(raw)
            self._seen = rows, last
        return self._seen

    def __del__(self) -> None:
        # What a row stands on may go in any order when the program ends.
        with contextlib.suppress(OSError):
            self._close()
        self._back.close()
