"""Handover: the processes that ends are given to while they start, before they can say so themselves.

A process that is killed while it starts has told nobody that it has an end. Its parent knows: under `fork` from the
arguments of the process that it starts, otherwise because it pickles the end for that process.
"""

from __future__ import annotations

import os
import sys
import weakref
from abc import ABC, abstractmethod
from collections.abc import Iterator
from multiprocessing import context
from multiprocessing.process import BaseProcess
from typing import Any, Self

from samplebatch.transport import process
from samplebatch.transport.process import Identity


class Recipient:
    """A process that an end was given to when it was started, as its parent sees it.

    Parameters
    ----------
    started
        What `multiprocessing` keeps for as long as the process runs.
    """

    def __init__(self, started: Any) -> None:
        self._started = weakref.ref(started)

    @classmethod
    def being_spawned(cls) -> Self | None:
        """Return the process that is being pickled for, if one is."""
        spawning = context.get_spawning_popen()
        return None if spawning is None else cls(spawning)

    def has_ended(self) -> bool:
        """Tell whether the process has ended, or could not be started at all."""
        started = self._started()
        if started is None:
            return True
        try:
            pid = getattr(started, "pid", None)
        except ValueError:
            # A process that is closed has ended before.
            return True
        return pid is not None and not process.is_alive(Identity(pid, started=0))


def being_forked() -> BaseProcess | None:
    """Return the process whose `start` is forking in this thread, if one is."""
    frame = sys._getframe()
    while frame.f_code is not BaseProcess.start.__code__:
        if frame.f_back is None:
            return None
        frame = frame.f_back
    found: BaseProcess = frame.f_locals["self"]
    return found


def arguments_of(started: BaseProcess) -> Iterator[Any]:
    """Yield the objects that a process was made with: its arguments, and the attributes of a subclass."""
    yield from getattr(started, "_args", ())
    yield from getattr(started, "_kwargs", {}).values()
    yield from list(vars(started).values())


class Given(ABC):
    """An end that one process has, and that notes whom it is given to."""

    @abstractmethod
    def _give(self, recipient: Recipient | None) -> bool:
        """Note that a process that may not run yet is given the end; tell whether it was there to be given."""


def _give_to_child() -> None:
    """Note which ends a process is given that is about to be forked."""
    started = being_forked()
    if started is not None:
        for value in arguments_of(started):
            if isinstance(value, Given):
                value._give(Recipient(started))


os.register_at_fork(before=_give_to_child)
