"""RateLimiter: ratio of samples to inserts, and minimum size of a table for sampling."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from math import isinf
from typing import TYPE_CHECKING, Any, Literal, NamedTuple, Self

from samplebatch.arguments import count_of, positive, whole
from samplebatch.errors import AbandonedError, ArgumentError, LimitTimeoutError, TableClosedError

if TYPE_CHECKING:
    from _thread import RLock


class RateLimiter:
    """Rate limiter of a replay table: minimum size for sampling, and ratio of samples to inserts.

    Inserts and samples are counted in items of the table (steps or fragments). Each insert after the first `min_size`
    inserts earns `samples_per_insert` samples. A request is blocked while its first item would make earned and drawn
    samples differ by more than `error_buffer`. Once admitted, a request completes, so fragments and batches of any size
    cannot cause a deadlock.

    Parameters
    ----------
    min_size
        Minimum number of items for sampling. The limiter never blocks inserts into a table with fewer items.
    samples_per_insert
        Number of samples that each insert earns; None for no limit.
    error_buffer
        Maximum difference between earned and drawn samples, in either direction. The default difference is `max(2, 2 *
        samples_per_insert, 0.1 * samples_per_insert * min_size)`.

    Raises
    ------
    ArgumentError
        If `min_size` is not a positive integer, or `samples_per_insert` is not a positive finite number. If
        `error_buffer` is less than 1 or less than `samples_per_insert`, is not finite, or is passed without
        `samples_per_insert`.

    Attributes
    ----------
    min_size, samples_per_insert, error_buffer
        Limits in effect; None for no limit.
    inserted, sampled
        Number of inserted items and number of sampled items.

    Examples
    --------
    >>> limiter = RateLimiter(2, samples_per_insert=1.0, error_buffer=2.0)
    >>> limiter.why_not_sample(0)
    'sampling requires 2 items, and there are 0'
    >>> limiter.count_inserts(4)
    >>> limiter.why_not_insert(4)
    'samples are 2 behind, with a limit of 2: 0 were drawn for 4 inserts'
    >>> limiter.count_samples(4)
    >>> limiter.why_not_sample(4)
    'samples are 2 ahead, with a limit of 2: 4 were drawn for 4 inserts'
    """

    def __init__(
        self, min_size: int = 1, *, samples_per_insert: float | None = None, error_buffer: float | None = None
    ) -> None:
        self.inserted = self.sampled = 0
        self._use(min_size, samples_per_insert, error_buffer)
        self._origin = (self.min_size, 0)

    def _use(self, min_size: Any, samples_per_insert: Any, error_buffer: Any) -> None:
        """Validate and apply limits."""
        minimum = whole("min_size", min_size, 1)
        ratio = None if samples_per_insert is None else positive("samples_per_insert", samples_per_insert)
        if error_buffer is not None and ratio is None:
            raise ArgumentError("error_buffer must come with samples_per_insert, got none")
        if ratio is not None and error_buffer is None:
            error_buffer = max(2.0 * max(1.0, ratio), 0.1 * ratio * minimum)
        buffer = None if error_buffer is None else positive("error_buffer", error_buffer)
        if isinf(ratio or 0.0) or isinf(buffer or 0.0):
            raise ArgumentError(
                "samples_per_insert and error_buffer must be finite, got inf; leave them out for no limit"
            )
        if ratio is not None and buffer is not None and buffer < max(1.0, ratio):
            raise ArgumentError(
                f"error_buffer must be at least {max(1.0, ratio):g}, one sample or the samples of one insert, "
                f"got {buffer:g}"
            )
        self.min_size, self.samples_per_insert, self.error_buffer = minimum, ratio, buffer

    @property
    def _due(self) -> float:
        """Number of earned samples minus number of drawn samples."""
        inserts, samples = self._origin
        return (self.samples_per_insert or 0.0) * (self.inserted - inserts) - (self.sampled - samples)

    def why_not_insert(self, size: int) -> str:
        """Describe the limit that blocks an insert into a table of `size` items; return "" if no limit does."""
        if self.samples_per_insert is None or self.error_buffer is None or size < self.min_size:
            return ""
        num_due = self._due
        if num_due + self.samples_per_insert <= self.error_buffer:
            return ""
        return f"samples are {num_due:g} behind, {self._describe_limit()}"

    def why_not_sample(self, size: int) -> str:
        """Describe the limit that blocks a sample from a table of `size` items; return "" if no limit does."""
        if size < self.min_size:
            return f"sampling requires {self.min_size} items, and there are {size}"
        if self.samples_per_insert is None or self.error_buffer is None:
            return ""
        num_due = self._due
        if num_due - 1.0 >= -self.error_buffer:
            return ""
        return f"samples are {-num_due:g} ahead, {self._describe_limit()}"

    def _describe_limit(self) -> str:
        return f"with a limit of {self.error_buffer:g}: {self.sampled} were drawn for {self.inserted} inserts"

    def count_inserts(self, n: int) -> None:
        """Count n inserts."""
        self.inserted += n

    def count_samples(self, n: int) -> None:
        """Count n samples."""
        self.sampled += n

    def set_limits(self, size: int, limits: Mapping[str, Any]) -> None:
        """Change some limits of a table with `size` items; an error leaves all limits unchanged.

        If `min_size` or `samples_per_insert` is passed, the ratio counts only inserts after the change, and only once
        the table has `min_size` items. If `samples_per_insert` is passed without `error_buffer`, the error buffer is
        reset to its default.

        Raises
        ------
        ArgumentError
            If `RateLimiter` would reject the limits.
        """
        self._use(**self._with(limits))
        if not limits.keys().isdisjoint(("min_size", "samples_per_insert")):
            self._origin = (self.inserted + max(self.min_size - size, 0), self.sampled)

    def _with(self, limits: Mapping[str, Any]) -> dict[str, Any]:
        """Return all limits after a change; `samples_per_insert` without `error_buffer` resets the error buffer."""
        merged = self.limits
        if "samples_per_insert" in limits:
            merged["error_buffer"] = None
        return merged | dict(limits)

    def changed(self, limits: Mapping[str, Any]) -> dict[str, Any]:
        """Return all limits, by name, that would be in effect after `set_limits`.

        Raises
        ------
        ArgumentError
            If `RateLimiter` would reject the limits.
        """
        merged = self._with(limits)
        return type(self)(merged.pop("min_size"), **merged).limits

    @property
    def limits(self) -> dict[str, Any]:
        """Limits in effect by name."""
        return {name: getattr(self, name) for name in ("min_size", "samples_per_insert", "error_buffer")}

    def reset(self) -> None:
        """Reset all counts to 0, for an empty table."""
        self.inserted = self.sampled = 0
        self._origin = (self.min_size, 0)

    # Checkpoints

    def state_dict(self) -> dict[str, Any]:
        """Return limits and counts as plain values, for `from_state_dict`.

        Examples
        --------
        >>> RateLimiter(5).state_dict()
        {'min_size': 5, 'samples_per_insert': None, 'error_buffer': None, 'inserted': 0,
         'sampled': 0, 'origin': [5, 0]}
        """
        return self.limits | {"inserted": self.inserted, "sampled": self.sampled, "origin": list(self._origin)}

    @classmethod
    def from_state_dict(cls, state: Mapping[str, Any]) -> Self:
        """Create a limiter from the result of `state_dict`.

        Raises
        ------
        ArgumentError
            If a limit or a count is invalid.
        """
        limiter = cls(
            state["min_size"], samples_per_insert=state["samples_per_insert"], error_buffer=state["error_buffer"]
        )
        limiter.inserted, limiter.sampled = (count_of(name, state[name]) for name in ("inserted", "sampled"))
        inserts, samples = state["origin"]
        limiter._origin = (count_of("origin", inserts), count_of("origin", samples))
        return limiter


Action = Literal["insert", "sample"]
IsCancelled = Callable[[], bool]

_CANCELLATION_INTERVAL_S = 0.2
"""Seconds between two checks of whether a blocked request was cancelled."""
_PAUSE_S = 1e-4
"""Seconds for which the lock is released between two portions of a request."""


class Hold(NamedTuple):
    """Reason why a request is blocked."""

    why: str
    needs_items: bool = False
    """Whether the request can start only after an insert; until then the ratio does not block inserts."""
    needs_room: bool = False
    """Whether the request can start only after sampling removes items; until then the ratio does not block samples."""


@dataclass
class _Waiting:
    who: str
    action: Action
    since: float
    hold: Callable[[], Hold | None]
    needs_items: bool = False
    needs_room: bool = False


class WaitingRoom:
    """Back-pressure of a table: the requests that its limits block.

    - `name`: name of the table.
    - `lock`: lock of the table, which `admit` releases while it waits.
    """

    def __init__(self, name: str, lock: RLock) -> None:
        self._name = name
        self._changed = threading.Condition(lock)
        self._waiting: dict[int, _Waiting] = {}
        self.closed = False

    @property
    def needs_items(self) -> bool:
        """Whether a blocked request waits only for inserts; see `Hold.needs_items`."""
        return any(waiting.needs_items for waiting in self._waiting.values())

    @property
    def needs_room(self) -> bool:
        """Whether a blocked request waits only for the removal of items; see `Hold.needs_room`."""
        return any(waiting.needs_room for waiting in self._waiting.values())

    def admit(
        self,
        client: str,
        action: Action,
        hold: Callable[[], Hold | None],
        timeout_s: float | None,
        is_cancelled: IsCancelled | None = None,
    ) -> float:
        """Wait until a request is no longer blocked (lock held).

        Parameters
        ----------
        client
            Name of the writer or reader that sent the request.
        action
            Kind of request.
        hold
            Function that returns the reason why the request is blocked, or None if the request may start.
        timeout_s
            Maximum waiting time in seconds; None to wait without limit, 0 not to wait.
        is_cancelled
            Function that returns whether the caller has cancelled the request; None if it cannot be cancelled.

        Returns
        -------
        Seconds for which the request was blocked.

        Raises
        ------
        LimitTimeoutError
            If the request is still blocked after `timeout_s`.
        TableClosedError
            If the table was closed before the call, or is closed during the wait.
        AbandonedError
            If the caller cancels the request.
        """
        self._check_open()
        reason = hold()
        if reason is None:
            return 0.0
        started = time.monotonic()
        waiting = _Waiting(client, action, time.time(), hold)
        self._waiting[id(waiting)] = waiting
        try:
            while reason is not None:
                remaining_s = None if timeout_s is None else started + timeout_s - time.monotonic()
                if remaining_s is not None and remaining_s <= 0.0:
                    whose = f" of {client!r}" if client else ""
                    raise LimitTimeoutError(
                        f"table {self._name!r} blocked the {action}{whose} for {time.monotonic() - started:.1f} s: "
                        f"{reason.why}",
                        reason.why,
                        waiting.since,
                    )
                if (reason.needs_items and not waiting.needs_items) or (reason.needs_room and not waiting.needs_room):
                    # Admit opposite requests (inserts for a sample, samples for an insert) that the ratio blocked.
                    # Only once: otherwise two blocked requests would wake each other forever.
                    self.wake()
                waiting.needs_items, waiting.needs_room = reason.needs_items, reason.needs_room
                self._changed.wait(_shortest(remaining_s, None if is_cancelled is None else _CANCELLATION_INTERVAL_S))
                self._check_open()
                if is_cancelled is not None and is_cancelled():
                    raise AbandonedError(f"table {self._name!r} blocked a request that its client has cancelled")
                reason = hold()
        finally:
            del self._waiting[id(waiting)]
        return time.monotonic() - started

    def pause(self, is_cancelled: IsCancelled | None = None) -> None:
        """Release and reacquire the lock during a request, so that other threads can proceed (lock held).

        Raises TableClosedError if another thread closes the table. Raises AbandonedError if the caller cancels the
        request.
        """
        # Another thread can acquire the lock only if the lock remains free for a moment.
        self._changed.wait(_PAUSE_S)
        self._check_open()
        if is_cancelled is not None and is_cancelled():
            raise AbandonedError(f"table {self._name!r} was sampled for a request that its client has cancelled")

    def _check_open(self) -> None:
        if self.closed:
            raise TableClosedError(f"table {self._name!r} is closed: it accepts no inserts or samples")

    def wake(self) -> None:
        """Wake all waiters so that they re-check their condition (lock held)."""
        if self._waiting:
            self._changed.notify_all()

    def close(self) -> None:
        """Wake all waiters, which then raise TableClosedError, and reject later requests (lock held)."""
        self.closed = True
        self._changed.notify_all()

    def held_back(self) -> list[dict[str, Any]]:
        """List blocked requests, oldest first (lock held).

        Each entry contains `who`, `action`, `why`, and `since`, the start of the wait in Unix seconds.
        """
        requests = []
        for waiting in sorted(self._waiting.values(), key=lambda waiting: waiting.since):
            hold = waiting.hold()
            if hold is not None:
                requests.append({"who": waiting.who, "action": waiting.action, "why": hold.why, "since": waiting.since})
        return requests


def _shortest(*seconds: float | None) -> float | None:
    times = [min(value, threading.TIMEOUT_MAX) for value in seconds if value is not None]
    return min(times, default=None)
