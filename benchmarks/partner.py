"""Receiving process of the rows of `bench_transport`.

There is one process per contestant, started on first use and reused for all rows. It receives through a pipe the name
of a function below and its connections. Each function receives until the stream ends, and answers through another pipe
with a summary of the received batch, so that contestants can be compared.
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
"""Token of the size of one of our messages in its pipe."""

NOTHING = {"rewards": [0.0]}
"""Content of a token."""


class Answers:
    """Answers every n-th batch; the first answer includes a summary of the batch."""

    def __init__(self, back: Connection, every: int) -> None:
        self._back = back
        self._every = every
        self._came = 0

    def came(self, columns: Any) -> None:
        """Count a received batch."""
        self._came += 1
        if self._came == self._every:
            rewards = columns["rewards"]
            self._back.send_bytes(_SEEN.pack(len(rewards), float(rewards[-1])))
        elif self._came % self._every == 0:
            self._back.send_bytes(TOKEN)


def consume(consumer: Any, back: Connection, every: int) -> None:
    """Receive batches from our channel, and answer every n-th."""
    from samplebatch.errors import EndOfStreamError

    came = Answers(back, every).came
    with consumer, contextlib.suppress(EndOfStreamError):
        while True:
            batch = consumer.recv()
            came(batch)
            del batch


def read_objects(source: Connection, back: Connection, every: int) -> None:
    """Receive objects from `Connection.send` of multiprocessing or torch."""
    came = Answers(back, every).came
    while (columns := source.recv()) is not None:
        came(columns)
        del columns


def read_pickles(source: Connection, back: Connection, every: int) -> None:
    """Receive pickles with in-band buffers."""
    came = Answers(back, every).came
    while raw := source.recv_bytes():
        columns = pickle.loads(raw)
        came(columns)
        del raw, columns


def read_tokens(source: Connection, back: Connection, every: int) -> None:
    """Receive bytes without meaning."""
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
    local, remote = context.Pipe()
    context.Process(target=_serve, args=(remote,), daemon=True, name=f"partner of {name}").start()
    remote.close()
    atexit.register(local.close)
    return local


class Session:
    """One row's work with a partner; resources are closed when the row ends.

    Parameters
    ----------
    name
        Name of the contestant.
    task
        Function that the partner runs.
    ends
        Connections from which the partner receives.
    close
        Function that ends the partner's task.
    every
        Number n, if the partner answers every n-th message.
    """

    def __init__(
        self, name: str, task: Callable[..., None], ends: tuple[Any, ...], close: Callable[[], Any], every: int = 1
    ) -> None:
        self._close = close
        self._back, remote = multiprocessing.Pipe(duplex=False)
        orders = _partner(name)
        orders.send((task, (*ends, remote, every)))
        orders.recv()
        remote.close()
        self._seen: tuple[int, float] | None = None

    def answer(self) -> tuple[int, float]:
        """Wait for the partner's answer, and return the summary of its first answered batch."""
        raw = self._back.recv_bytes()
        if self._seen is None:
            rows, last = _SEEN.unpack(raw)
            self._seen = rows, last
        return self._seen

    def __del__(self) -> None:
        # Resources may be destroyed in any order when the program ends.
        with contextlib.suppress(OSError):
            self._close()
        self._back.close()
