"""WaitingRoom: the threads that a table's limits hold back, why, and since when."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Literal, NamedTuple

from samplebatch.errors import AbandonedError, LimitTimeoutError, TableClosedError

if TYPE_CHECKING:
    from _thread import RLock

Action = Literal["insert", "sample"]
Gone = Callable[[], bool]

_LOOK_S = 0.2
"""Seconds after which it is looked whether anybody waits for an answer."""


class Hold(NamedTuple):
    """The reason for which a request is held back."""

    why: str
    needs_items: bool = False
    """Whether more items would admit it, and nothing else: inserts are not held back by a ratio meanwhile."""


@dataclass
class _Waiting:
    """A request that is held back."""

    who: str
    action: Action
    since: float
    look: Callable[[], Hold | None]
    needs_items: bool = False


class WaitingRoom:
    """The requests that a table holds back: its back-pressure.

    Parameters
    ----------
    name
        The table's name.
    lock
        The table's lock, which `admit` gives up while it waits.
    """

    def __init__(self, name: str, lock: RLock) -> None:
        self._name = name
        self._changed = threading.Condition(lock)
        self._waiting: dict[int, _Waiting] = {}
        self.closed = False

    @property
    def needs_items(self) -> bool:
        """Whether a sample waits for items, and for nothing else."""
        return any(waiting.needs_items for waiting in self._waiting.values())

    def admit(
        self, who: str, action: Action, hold: Callable[[], Hold | None], timeout: float | None, gone: Gone | None = None
    ) -> float:
        """Wait until nothing holds a request back; the lock must be held.

        Parameters
        ----------
        who
            The name of the writer or reader.
        action
            The request.
        hold
            Says why the request is held back as things stand, None if it is not.
        timeout
            Seconds to wait at the most; None for any number, 0 for not at all.
        gone
            Tells whether nobody waits for the answer any more; None where somebody always does.

        Returns
        -------
        Seconds that it was held back.

        Raises
        ------
        LimitTimeoutError
            If it still is after that time.
        TableClosedError
            If the table is closed, or is meanwhile.
        AbandonedError
            If nobody waits for the answer any more.
        """
        self._check_open()
        found = hold()
        if found is None:
            return 0.0
        begun = time.monotonic()
        waiting = _Waiting(who, action, time.time(), hold)
        self._waiting[id(waiting)] = waiting
        try:
            while found is not None:
                left = None if timeout is None else begun + timeout - time.monotonic()
                if left is not None and left <= 0.0:
                    whose = f" of {who!r}" if who else ""
                    raise LimitTimeoutError(
                        f"table {self._name!r} held back the {action}{whose} for {time.monotonic() - begun:.1f} s: "
                        f"{found.why}",
                        found.why,
                        waiting.since,
                    )
                if found.needs_items and not waiting.needs_items:
                    # Inserts that a ratio held back are admitted now. Once only: two who wait would wake each other.
                    self.wake()
                waiting.needs_items = found.needs_items
                self._changed.wait(_shortest(left, None if gone is None else _LOOK_S))
                self._check_open()
                if gone is not None and gone():
                    raise AbandonedError(f"table {self._name!r} held back a request that nobody waits for any more")
                found = hold()
        finally:
            del self._waiting[id(waiting)]
        return time.monotonic() - begun

    def _check_open(self) -> None:
        if self.closed:
            raise TableClosedError(f"table {self._name!r} is closed, and takes and gives nothing")

    def wake(self) -> None:
        """Let all who wait look again; the lock must be held."""
        if self._waiting:
            self._changed.notify_all()

    def close(self) -> None:
        """Let all who wait raise, and all who come; the lock must be held."""
        self.closed = True
        self._changed.notify_all()

    def held_back(self) -> list[dict[str, Any]]:
        """List who is held back, oldest first: `who`, `action`, `why`, and `since`, in seconds of Unix time.

        The reasons are those of this moment; the lock must be held.
        """
        found = []
        for one in sorted(self._waiting.values(), key=lambda waiting: waiting.since):
            hold = one.look()
            if hold is not None:
                found.append({"who": one.who, "action": one.action, "why": hold.why, "since": one.since})
        return found


def _shortest(*seconds: float | None) -> float | None:
    """Return the shortest time to wait; None for any."""
    known = [min(one, threading.TIMEOUT_MAX) for one in seconds if one is not None]
    return min(known, default=None)
