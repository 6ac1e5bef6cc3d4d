"""Child processes that die while they start; the module is quick to import."""

from __future__ import annotations

import os
import signal
import sys
from typing import Any


class DiesWhenLoaded:
    """Object that ends or breaks the process that unpickles it."""

    def __init__(self, how: str) -> None:
        self.how = how

    def __reduce__(self) -> Any:
        if self.how == "cannot be pickled":
            raise TypeError("a lock cannot be pickled")
        return _die, (self.how, os.getpid())


def _die(how: str, not_in: int) -> DiesWhenLoaded:
    if os.getpid() != not_in:
        if how == "cannot be imported":
            raise ImportError("there is no such module")
        if how == "is killed":
            os.kill(os.getpid(), signal.SIGKILL)
    return DiesWhenLoaded(how)


def look_on(*_: Any) -> None:
    """Do nothing with an end."""


def stay(*_: Any) -> None:
    """Wait for the signal that ends this process."""
    signal.pause()


def stop(*_: Any) -> None:
    """Raise an error without having used an end."""
    raise ValueError("no legs to stand on")


def lose(pipe: Any, how: str) -> None:
    """Exit while a local variable is the only reference to an end that was received through a pipe."""
    end = pipe.recv()
    end.reserve({"a": "i8"}, 1).commit()
    if how == "raise":
        raise ValueError("no legs to stand on")
    if how.startswith("exit"):
        sys.exit(int(how.split()[1]))
