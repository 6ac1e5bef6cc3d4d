"""ReplayTable: experience that many writers insert and many learners sample, under limits."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import replace
from functools import partial
from typing import Any, Literal

import numpy as np

from samplebatch.arguments import choice, positive, whole
from samplebatch.errors import ArgumentError, near_names
from samplebatch.service.fragment_items import FragmentItems
from samplebatch.service.items import InsertResult, Items, Mode, Request, Sample, take_options
from samplebatch.service.limiter import RateLimiter
from samplebatch.service.selectors import REMOVERS
from samplebatch.service.step_items import StepItems
from samplebatch.service.taken import TakenNumbers
from samplebatch.service.waiting import Gone, Hold, WaitingRoom
from samplebatch.storage.damage import name_damage

Kind = Literal["uniform", "prioritized", "fifo", "lifo", "key"]
Unit = Literal["steps", "fragments"]

KINDS: tuple[Kind, ...] = ("uniform", "prioritized", "fifo", "lifo", "key")
"""How tables choose the items that they sample."""

_OF_STEPS = ("uniform", "prioritized")
_LIMITS = ("min_size", "samples_per_insert", "error_buffer", "max_times_sampled")


class ReplayTable:
    """A replay buffer of the service with its limits, filled by writers and drawn from by learners.

    An item is a step, in a replay buffer of the library, or a whole fragment, kept as it was inserted. Threads share a
    table: an insert or a sample that a limit holds back waits, and `info` tells who waits, why and since when.

    Parameters
    ----------
    name
        Its name.
    kind
        How items are sampled: `"uniform"` or `"prioritized"`; fragments also first in first out, `"fifo"`, last in
        first out, `"lifo"`, or by the key that each is given, `"key"`, where a new one replaces that of the same key.
    items
        `"steps"` or `"fragments"`; by default steps, where the kind is one for steps.
    capacity
        How many items there may be; of steps rounded up, so that all rings have as many.
    limiter
        Its limits, which the table uses up; by default sampling needs one item.
    remover
        Which item is removed to make room: `"fifo"`, `"lifo"`, `"uniform"`, `"lowest_priority"`, `"most_sampled"`, or
        `"none"`, where inserts are held back while the table is full. Steps are removed by `"fifo"` only. By default
        `"none"` for a fifo table whose items are sampled a number of times, which is a queue, else `"fifo"`.
    max_times_sampled
        How often each item may be sampled; 0 for any number of times. Fragments are removed then; steps are not drawn
        any more.
    streams
        Rings of a table of steps: the steps of each environment of each writer go to a ring of their own as long as
        there are enough, so that episodes that come in fragments lie in one piece.
    seed
        Of the generator that all draws come from; None for a random one.
    **options
        Of a table of steps those of the replay buffer, which is a `PrioritizedReplayBuffer` or a `ReplayBuffer`, or of
        several rings a `PrioritizedVectorReplayBuffer` or a `VectorReplayBuffer`; and `n_step` and `gamma`, with which
        steps are sampled by default. Of prioritized fragments `alpha` and `beta`.

    Raises
    ------
    ArgumentError
        If a word is unknown, a number not of its values, or arguments do not go together.
    PriorityError
        If alpha or beta is negative or no number.

    Attributes
    ----------
    name, kind, unit, remover
        As given; `unit` is `"steps"` or `"fragments"`.
    capacity
        How many items there may be.

    Examples
    --------
    >>> from samplebatch import SampleBatch
    >>> table = ReplayTable("replay", capacity=100, seed=7, limiter=RateLimiter(3))
    >>> rows = SampleBatch(obs=[1, 2, 3], actions=[0, 0, 0], rewards=[0.0, 0.0, 1.0], terminateds=[False, False, True])
    >>> table.insert(rows).inserted, len(table)
    (3, 3)
    >>> sample = table.sample(2)
    >>> sample.batch.obs - 1 == sample.indices
    array([ True,  True])

    A queue between machines:

    >>> queue = ReplayTable("queue", kind="fifo", capacity=8, max_times_sampled=1)
    >>> inserted = queue.insert(rows)
    >>> queue.sample(1).batch["obs"], len(queue)
    (array([1, 2, 3]), 0)
    """

    def __init__(
        self,
        name: str,
        *,
        kind: Kind = "uniform",
        capacity: int,
        items: Unit | None = None,
        limiter: RateLimiter | None = None,
        remover: str | None = None,
        max_times_sampled: int = 0,
        streams: int = 1,
        seed: Any = None,
        **options: Any,
    ) -> None:
        self.name = name
        self.kind = choice("kind", kind, KINDS)
        self.unit = choice("items", items or ("steps" if kind in _OF_STEPS else "fragments"), ("steps", "fragments"))
        times = whole("max_times_sampled", max_times_sampled)
        self.remover = remover or ("none" if kind == "fifo" and times else "fifo")
        choice("remover", self.remover, (*REMOVERS, "none"))
        self._items = self._make_items(
            whole("capacity", capacity, 1), times, whole("streams", streams, 1), seed, options
        )
        self.capacity = self._items.capacity
        self._limiter = RateLimiter() if limiter is None else limiter
        self._check_limits(self._limiter.limits, times)
        self._lock = self._items.lock
        self._room = WaitingRoom(name, self._lock)
        self._taken = TakenNumbers()

    def _make_items(self, capacity: int, times: int, streams: int, seed: Any, options: dict[str, Any]) -> Items:
        if self.unit == "steps":
            if self.kind not in _OF_STEPS:
                raise ArgumentError(f"a table of kind {self.kind!r} holds fragments; leave out items={self.unit!r}")
            if self.remover != "fifo":
                raise ArgumentError(
                    f"a table of steps writes over its oldest ones, and cannot remove by {self.remover!r}; give "
                    "items='fragments'"
                )
            return StepItems(self.kind, capacity, streams, times, seed, options)
        if streams != 1:
            raise ArgumentError(f"streams are rings of steps, and table {self.name!r} holds fragments; leave them out")
        known = {"alpha": 0.6, "beta": 0.4} if self.kind == "prioritized" else {}
        options = take_options(options, known, f"tables of fragments of kind {self.kind!r}")
        return FragmentItems(self.kind, capacity, self.remover, times, seed, **options)

    def _check_limits(self, limits: Mapping[str, Any], times: int) -> None:
        """Check limits against each other and the table's size."""
        if limits["min_size"] > self.capacity:
            raise ArgumentError(
                f"min_size must be at most the capacity, {self.capacity} {self.unit}, got {limits['min_size']}"
            )
        ratio = limits["samples_per_insert"]
        if times and ratio is not None and ratio > times:
            raise ArgumentError(f"samples_per_insert must be at most max_times_sampled, {times}, got {ratio:g}")

    def __len__(self) -> int:
        with self._lock:
            return len(self._items)

    def __repr__(self) -> str:
        return f"ReplayTable({self.name!r}, {self.kind}, {len(self)} of {self.capacity} {self.unit})"

    # Items

    def insert(
        self,
        rows: Any,
        *,
        writer: str = "",
        stream: str = "",
        number: int = 0,
        priorities: Any = None,
        keys: str | None = None,
        timeout: float | None = None,
        gone: Gone | None = None,
    ) -> InsertResult:
        """Insert a fragment: its steps one after the other, or as a whole.

        A fragment without rows is not inserted, and never held back.

        Parameters
        ----------
        rows
            A batch. A table of steps takes what `ReplayBuffer.extend` takes, and copies it. A table of fragments keeps
            the columns where they lie: they must not be written to afterwards.
        writer
            Who inserts, for `info` and for `streams`.
        stream, number
            Which of the writer's streams brings the fragment, and its number there, which goes up. One whose number is
            not above the last one's was sent again, and is not inserted. 0 for fragments that have no numbers.
        priorities
            Of a prioritized table, or of fragments that are removed by priority: one, or one for each step. By default
            the largest so far.
        keys
            The fragment's key in a table by key.
        timeout
            Seconds to wait while a limit holds it back; None for any number, 0 for not at all.
        gone
            Tells whether nobody waits for the answer any more: who is held back for somebody else is asked now and
            then. AbandonedError is raised then, and nothing inserted.

        Raises
        ------
        LimitTimeoutError
            If it is still held back then; says why.
        TableClosedError
            If the table is closed, or is meanwhile.
        ArgumentError
            If a key is missing, or there is one in a table of another kind.
        CapacityError
            If there are more steps than a ring has slots.
        PriorityError
            If priorities are none, or nothing looks at them.
        SampleBatchError
            As `ReplayBuffer.extend` does; ColumnMismatchError if a fragment has other columns than those before.
        """
        ready, count, steps = self._items.prepare(rows, priorities, keys)
        with self._lock:
            # A fragment of a lost connection may be held back here, and the same one that was sent again with it.
            was_taken = partial(self._taken.includes, writer, stream, number)
            hold = partial(self._hold_insert, count, was_taken)
            held_s = self._room.admit(writer, "insert", hold, _seconds(timeout), gone) if count else 0.0
            if not count or was_taken():
                return InsertResult(0, np.zeros(0, np.int64), len(self._items), held_s)
            indices = self._items.insert(ready, writer)
            self._taken.note(writer, stream, number)
            self._limiter.count_inserts(count)
            self._room.wake()
            size = len(self._items)
        return InsertResult(steps, indices, size, held_s)

    def taken(self, writer: str, stream: str = "") -> int:
        """Return the number of the last fragment that was taken from a stream of a writer; 0 if there is none."""
        with self._lock:
            return self._taken.last(writer, stream)

    def _hold_insert(self, count: int, was_taken: Callable[[], bool]) -> Hold | None:
        if was_taken():
            return None
        why = "" if self._room.needs_items else self._limiter.why_not_insert(len(self._items))
        return Hold(why) if why else self._items.hold_insert(count)

    def sample(
        self,
        batch_size: int,
        *,
        mode: Mode | None = None,
        timeout: float | None = None,
        seed: int | None = None,
        reader: str = "",
        gone: Gone | None = None,
        **options: Any,
    ) -> Sample:
        """Sample steps, sequences, episodes or fragments.

        Draws are with replacement, as those of the replay buffers, save from fifo and lifo tables, which give the
        oldest or newest fragments. The limiter counts the steps or fragments that a sample has.

        Parameters
        ----------
        batch_size
            How many.
        mode
            `"steps"`, `"sequences"` or `"episodes"` of a table of steps, `"fragments"` of one of fragments. By default
            the first.
        timeout
            Seconds to wait while a limit holds it back; None for any number, 0 for not at all.
        seed
            Of a generator for this sample alone; None for the table's own.
        reader
            Who samples, for `info`.
        gone
            As for `insert`; nothing is sampled then.
        **options
            Of steps `n_step` and `gamma`, as `ReplayBuffer.sample` takes them; of sequences `length`, `burn_in` and
            `padded`, as `ReplayBuffer.sample_sequences` does; of episodes `unfinished`, as
            `ReplayBuffer.sample_episodes` does; of fragments `key`, in a table by key. `beta`, in a prioritized one,
            in place of the table's.

        Raises
        ------
        LimitTimeoutError
            If it is still held back then; says why.
        TableClosedError
            If the table is closed, or is meanwhile.
        ArgumentError
            If the table has no such mode, an option is unknown or not of its values, or `batch_size` is no whole number
            from 1, or more than the table can ever give.
        EmptyBufferError
            If there is no episode, or no stretch of that length, to draw from.
        SampleBatchError
            As the methods of `ReplayBuffer` do.
        """
        request = self._request(batch_size, mode, seed, options)
        with self._lock:
            held_s = self._room.admit(reader, "sample", lambda: self._hold_sample(request), _seconds(timeout), gone)
            drawn, count = self._items.draw(request)
            self._limiter.count_samples(count)
            self._room.wake()
        found = self._items.finish(drawn)
        return replace(found, held_s=held_s) if held_s else found

    def _request(self, batch_size: int, mode: Mode | None, seed: Any, options: Mapping[str, Any]) -> Request:
        modes = self._items.modes
        if mode is not None and mode not in modes:
            raise ArgumentError(f"mode must be one of a table of {self.unit}, {', '.join(modes)}; got {mode!r}")
        if seed is not None:
            whole("seed", seed)
        return self._items.request(whole("batch_size", batch_size, 1), mode or modes[0], options, seed)

    def _hold_sample(self, request: Request) -> Hold | None:
        why = self._limiter.why_not_sample(len(self._items))
        return Hold(why) if why else self._items.hold_sample(request)

    def update_weight(self, indices: Any, weights: Any, generations: Any = None) -> int:
        """Give items new priorities, and return how many of them were there.

        Parameters
        ----------
        indices
            Which items, as samples have them; n of them.
        weights
            Their priorities, shape (n,).
        generations
            The generations that the sample had, shape (n,). Steps that were written over since are left as they are.

        Raises
        ------
        PriorityError
            If nothing looks at priorities, or one is no finite number. Nothing has changed then.
        SampleBatchError
            As `PrioritizedReplayBuffer.update_weight` does.
        """
        with self._lock:
            return self._items.update_weight(indices, weights, generations)

    def reset(self) -> None:
        """Remove all items, and count from the beginning."""
        with self._lock:
            self._items.reset()
            self._limiter.reset()
            self._room.wake()

    # Limits

    def set_limits(self, **limits: Any) -> None:
        """Change limits while writers and learners are at work, and wake the requests that wait.

        Parameters
        ----------
        **limits
            `min_size`, `samples_per_insert`, `error_buffer`, as `RateLimiter` takes them, and `max_times_sampled`. A
            new ratio counts from now on.

        Raises
        ------
        ArgumentError
            If there is no such limit, or it is not of its values. Nothing has changed then.
        """
        for name in limits:
            if name not in _LIMITS:
                raise ArgumentError(f"a table has no limit {name!r}; {near_names(name, _LIMITS)}")
        with self._lock:
            times = whole("max_times_sampled", limits.pop("max_times_sampled", self._items.max_times))
            self._check_limits(self._limiter.changed(limits), times)
            self._limiter.set_limits(len(self._items), limits)
            if times != self._items.max_times:
                self._items.set_max_times(times)
            self._room.wake()

    def info(self) -> dict[str, Any]:
        """Return as plain values how things stand.

        Returns
        -------
        dict
            `name`, `kind`, `items`, `remover`, `size`, `capacity`, `nbytes`; `weight`, the sum of the weights by which
            items are drawn; `inserted` and `sampled` items so far; the `limits`; `closed`; and `held_back`, requests
            with `who`, `action`, `why`, and `since`, in seconds of Unix time.
        """
        with self._lock:
            return {
                "name": self.name,
                "kind": self.kind,
                "items": self.unit,
                "remover": self.remover,
                "size": len(self._items),
                "capacity": self.capacity,
                "nbytes": int(self._items.nbytes),
                "weight": self._items.weight,
                "inserted": self._limiter.inserted,
                "sampled": self._limiter.sampled,
                "limits": {**self._limiter.limits, "max_times_sampled": self._items.max_times},
                "held_back": self._room.held_back(),
                "closed": self._room.closed,
            }

    @property
    def item_nbytes(self) -> int:
        """Bytes of one item, about: of a step those of its slot, of fragments the mean."""
        return int(self._items.nbytes) // max(1, self.capacity if self.unit == "steps" else len(self))

    @property
    def closed(self) -> bool:
        """Whether the table is closed."""
        return self._room.closed

    def close(self) -> None:
        """Refuse all inserts and samples from now on, and end those that wait with TableClosedError."""
        with self._lock:
            self._room.close()

    # Carrying on elsewhere

    def state_dict(self) -> dict[str, Any]:
        """Return the items, limits, counts and generator, with which a table of the same arguments carries on."""
        with self._lock:
            return self._own_state() | self._items.state_dict()

    def freeze(self) -> dict[str, Any]:
        """Return the state of this moment without copying the rows, for `Checkpoints`, which reads them in parts."""
        with self._lock:
            return self._own_state() | self._items.freeze()

    def _own_state(self) -> dict[str, Any]:
        """Return the state of all but the items; the numbers of fragments are those that the items are of."""
        limiter, taken = self._limiter.state_dict(), self._taken.state()
        return {"limiter": limiter, "max_times": self._items.max_times, "taken": taken}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Carry on exactly as the table that had this state, limits included.

        Raises
        ------
        ColumnMismatchError, FormatError
            If it is of a table of other arguments, or not whole; says which part is missing.
        """
        with self._lock, name_damage("the state of a table"):
            limiter, taken = RateLimiter.from_state_dict(state["limiter"]), TakenNumbers.from_state(state["taken"])
            self._items.set_max_times(whole("max_times", state["max_times"]))
            self._items.load_state_dict(state)
            self._limiter, self._taken = limiter, taken
            self._room.wake()


def _seconds(timeout: float | None) -> float | None:
    """Return a time to wait; 0 for none, None for any."""
    return timeout if not timeout else positive("timeout", timeout)
