"""ReplayTable: experience that many writers insert and many learners sample, under limits."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from dataclasses import replace
from functools import partial
from typing import Any, Final, Literal, cast

import numpy as np

from samplebatch.arguments import choice, count_of, positive, suggest_names, whole
from samplebatch.errors import ArgumentError, near_names
from samplebatch.service.declared_columns import DeclaredColumns
from samplebatch.service.fragment_items import FragmentItems
from samplebatch.service.items import InsertResult, Items, Mode, Request, Sample, take_options
from samplebatch.service.limiter import Hold, IsCancelled, RateLimiter, WaitingRoom
from samplebatch.service.protocol import TakenNumbers
from samplebatch.service.row_table import RowTable
from samplebatch.service.selectors import REMOVERS
from samplebatch.service.step_items import StepItems, step_options
from samplebatch.storage.foreign.damage import name_damage

Kind = Literal["uniform", "prioritized", "queue", "fifo", "lifo", "key"]
Unit = Literal["steps", "fragments"]

KINDS: tuple[Kind, ...] = ("uniform", "prioritized", "queue", "fifo", "lifo", "key")
"""How tables choose the items that they sample."""

_OF_STEPS = ("uniform", "prioritized")
_LIMITS = ("min_size", "samples_per_insert", "error_buffer", "max_times_sampled")


class ReplayTable:
    """A replay buffer of the service with its limits, filled by writers and drawn from by learners.

    An item is a step in a replay buffer, or an entire fragment. Threads share a table: limits may block an insert or a
    sample, and `info` reports who is blocked, why and since when.

    Parameters
    ----------
    name
        Its name.
    kind
        How items are sampled: `"uniform"` or `"prioritized"`. Fragments also first in first out, either once,
        `"queue"`, or any number of times, `"fifo"`; last in first out, `"lifo"`; or by key, `"key"`, where a new
        fragment replaces the previous one with its key.
    items
        `"steps"` or `"fragments"`; by default steps, where the kind is one for steps.
    capacity
        How many items there may be; of steps rounded up, so that all rings have as many.
    limiter
        Its limits, which the table uses up; by default sampling needs one item.
    remover
        Which item is removed to make room: `"fifo"`, `"lifo"`, `"uniform"`, `"lowest_priority"`, `"most_sampled"`, or
        `"none"`, where inserts are held back while the table is full. Steps are removed by `"fifo"` only. By default
        `"none"` for a queue, and a fifo table whose items are sampled a number of times, else `"fifo"`.
    max_times_sampled
        How often each item may be sampled; 0 for any number of times. Fragments are removed then; steps are not drawn
        any more. By default once in a queue, else any number of times.
    streams
        Number of rings in a table of steps. Each environment of each writer has its own ring while there are enough, so
        that episodes sent in fragments are contiguous.
    seed
        Seed of the generator for all draws; random if None.
    columns
        Columns that fragments must have: by name a dtype, or a pair of dtype and row shape, also as text:
        `{"obs": ("float32", (4,)), "actions": "int64", "tokens": "int32[?]", "prompt": "text", "infos": "object"}` or
        `"obs:float32[4]+actions:int64"`; for fragments of several policies such mappings by policy. Fragments with
        missing, additional or other columns are rejected. Tables of steps accept fragments without infos, and ids and
        times of int64 without a declaration. By default the first fragment declares the columns.
    **options
        For a table of steps, options of its replay buffer, a `PrioritizedReplayBuffer` or a `ReplayBuffer`, or with
        several rings a `PrioritizedVectorReplayBuffer` or a `VectorReplayBuffer`; and the default `n_step` and `gamma`
        of samples. For prioritized fragments `alpha` and `beta`.

    Raises
    ------
    ArgumentError
        If a word is unknown, a number not of its values, or arguments do not go together; if a declared column has no
        such dtype or row shape, or two have one name.
    PriorityError
        If alpha or beta is negative or no number.

    Attributes
    ----------
    name, kind, unit, remover
        As given; `unit` is `"steps"` or `"fragments"`, and the kind of a queue is `"fifo"`.
    capacity
        How many items there may be.

    Examples
    --------
    >>> from samplebatch import SampleBatch
    >>> table = ReplayTable("replay", capacity=100, seed=7, limiter=RateLimiter(3))
    >>> rows = SampleBatch(obs=[1, 2, 3], actions=[0, 0, 0], rewards=[0.0, 0.0, 1.0], terminateds=[False, False, True])
    >>> table.extend(rows).inserted, len(table)
    (3, 3)
    >>> sample = table.sample(2)
    >>> sample.batch.obs - 1 == sample.indices
    array([ True,  True])

    A queue between machines:

    >>> queue = ReplayTable("queue", kind="queue", capacity=8)
    >>> inserted = queue.extend(rows)
    >>> queue.sample(1).batch["obs"], len(queue)
    (array([1, 2, 3]), 0)
    """

    @suggest_names(size="capacity", max_size="capacity")
    def __init__(
        self,
        name: str,
        *,
        kind: Kind = "uniform",
        capacity: int,
        items: Unit | None = None,
        limiter: RateLimiter | None = None,
        remover: str | None = None,
        max_times_sampled: int | None = None,
        streams: int = 1,
        seed: Any = None,
        columns: Mapping[Any, Any] | str | None = None,
        **options: Any,
    ) -> None:
        self.name = name
        is_queue = choice("kind", kind, KINDS) == "queue"
        self.kind: Kind = "fifo" if is_queue else kind
        self.unit = choice("items", items or ("steps" if kind in _OF_STEPS else "fragments"), ("steps", "fragments"))
        times = int(is_queue) if max_times_sampled is None else whole("max_times_sampled", max_times_sampled)
        self.remover = remover or ("none" if self.kind == "fifo" and times else "fifo")
        choice("remover", self.remover, (*REMOVERS, "none"))
        declared = None if columns is None else DeclaredColumns(columns)
        self._items = self._make_items(
            whole("capacity", capacity, 1), times, whole("streams", streams, 1), seed, options, declared
        )
        self.capacity = self._items.capacity
        self._limiter = RateLimiter() if limiter is None else limiter
        self._check_limits(self._limiter.limits, times)
        self._lock = self._items.lock
        self._room = WaitingRoom(name, self._lock)
        self._taken = TakenNumbers()

    def _make_items(
        self,
        capacity: int,
        times: int,
        streams: int,
        seed: Any,
        options: dict[str, Any],
        columns: DeclaredColumns | None,
    ) -> Items:
        if self.unit == "steps":
            if self.kind not in _OF_STEPS:
                raise ArgumentError(f"a table of kind {self.kind!r} holds fragments; leave out items={self.unit!r}")
            if self.remover != "fifo":
                raise ArgumentError(
                    f"a table of steps writes over its oldest ones, and cannot remove by {self.remover!r}; give "
                    "items='fragments'"
                )
            return StepItems(self.kind, capacity, streams, times, seed, options, columns)
        if streams != 1:
            raise ArgumentError(f"streams are rings of steps, and table {self.name!r} holds fragments; leave them out")
        defaults = {"alpha": 0.6, "beta": 0.4} if self.kind == "prioritized" else {}
        options = take_options(options, defaults, f"tables of fragments of kind {self.kind!r}")
        return FragmentItems(self.kind, capacity, self.remover, times, seed, **options, columns=columns)

    def _check_limits(self, limits: Mapping[str, Any], times: int) -> None:
        if limits["min_size"] > self.capacity:
            raise ArgumentError(
                f"min_size must be at most the capacity, {self.capacity} {self.unit}, got {limits['min_size']}"
            )
        ratio = limits["samples_per_insert"]
        if times and ratio is not None and ratio > times:
            raise ArgumentError(f"samples_per_insert must be at most max_times_sampled, {times}, got {ratio:g}")
        if self.remover == "none" and ratio is not None and ratio != times:
            # Each removal takes `times` samples and each insert earns `ratio`: once the table is full, the samples that
            # are earned run out before one is removed.
            raise ArgumentError(
                f"samples_per_insert must be max_times_sampled, {times}, where sampling alone removes fragments, got "
                f"{ratio:g}: writers and readers would both wait for good once the table is full; give a remover such "
                "as 'fifo', or leave out samples_per_insert"
            )

    def __len__(self) -> int:
        with self._lock:
            return len(self._items)

    def __repr__(self) -> str:
        return f"ReplayTable({self.name!r}, {self.kind}, {len(self)} of {self.capacity} {self.unit})"

    # Items

    def extend(
        self,
        rows: Any,
        *,
        writer: str = "",
        stream: str = "",
        number: int = 0,
        priorities: Any = None,
        keys: str | None = None,
        timeout_s: float | None = None,
        is_cancelled: IsCancelled | None = None,
    ) -> InsertResult:
        """Insert a fragment: its steps one by one, or the entire fragment.

        A fragment without rows is not added, and never held back.

        Parameters
        ----------
        rows
            A batch. A table of steps copies what `ReplayBuffer.extend` accepts. A table of fragments retains the
            columns without copying: do not write to them afterwards.
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
        timeout_s
            Seconds to wait while a limit holds it back; None for any number, 0 for not at all.
        is_cancelled
            Returns whether the caller no longer waits; called periodically while the insert is blocked. AbandonedError
            is raised then, and nothing is inserted.

        Raises
        ------
        LimitTimeoutError
            If it is still blocked after `timeout_s`; names the limit.
        TableClosedError
            If the table is closed, or is meanwhile.
        ArgumentError
            If a key is missing, or there is one in a table of another kind.
        CapacityError
            If there are more steps than a ring has slots.
        PriorityError
            If priorities are none, or nothing looks at them.
        SampleBatchError
            As `ReplayBuffer.extend` does; ColumnMismatchError if a fragment has other columns than the table declares,
            or than those before.
        """
        ready, count, steps = self._items.prepare(rows, priorities, keys)
        with self._lock:
            # A fragment of a lost connection may be held back here, and the same one that was sent again with it.
            was_taken = partial(self._taken.includes, writer, stream, number)
            hold = partial(self._hold_insert, ready, was_taken)
            held_s = self._room.admit(writer, "insert", hold, _seconds(timeout_s), is_cancelled) if count else 0.0
            if not count or was_taken():
                return InsertResult(0, np.zeros(0, np.int64), len(self._items), held_s)
            indices = self._items.insert(ready, writer)
            self._taken.note(writer, stream, number)
            self._limiter.count_inserts(count)
            self._room.wake()
            size = len(self._items)
        return InsertResult(steps, indices, size, held_s)

    def taken(self, writer: str, stream: str = "") -> int:
        """Return the number of the last inserted fragment of a stream; 0 if there is none."""
        with self._lock:
            return self._taken.last(writer, stream)

    def _hold_insert(self, ready: Any, was_taken: Callable[[], bool]) -> Hold | None:
        if was_taken():
            return None
        why = "" if self._room.needs_items else self._limiter.why_not_insert(len(self._items))
        return Hold(why) if why else self._items.hold_insert(ready)

    def sample(
        self,
        batch_size: int,
        *,
        mode: Mode | None = None,
        timeout_s: float | None = None,
        seed: int | None = None,
        reader: str = "",
        is_cancelled: IsCancelled | None = None,
        max_nbytes: int | None = None,
        **options: Any,
    ) -> Sample:
        """Sample steps, sequences, episodes or fragments.

        Draws are with replacement, as in replay buffers, except in fifo and lifo tables, which return the oldest or
        newest fragments. The limiter counts the steps or fragments of a sample.

        Parameters
        ----------
        batch_size
            How many.
        mode
            `"steps"`, `"sequences"` or `"episodes"` of a table of steps, `"fragments"` of one of fragments. By default
            the first.
        timeout_s
            Seconds to wait while a limit holds it back; None for any number, 0 for not at all.
        seed
            Of a generator for this sample alone; None for the table's own.
        reader
            Who samples, for `info`.
        is_cancelled
            As for `extend`; nothing is sampled then.
        max_nbytes
            Bytes that the sample may have, known before its rows are gathered; None for any number.
        **options
            For steps `n_step` and `gamma`, as for `ReplayBuffer.sample`; for sequences `length`, `burn_in` and
            `padded`, as for `ReplayBuffer.sample_sequences`; for episodes `unfinished`, as for
            `ReplayBuffer.sample_episodes`; for fragments in a table by key, `key`. In a prioritized table `beta`
            replaces the table's.

        Raises
        ------
        LimitTimeoutError
            If it is still blocked after `timeout_s`; names the limit.
        TableClosedError
            If the table is closed, or is meanwhile.
        ArgumentError
            If the table has no such mode, an option is unknown or out of range, or `batch_size` is no integer from 1 up
            to what the table can ever return.
        CapacityError
            If the sample would have more than `max_nbytes`; nothing is sampled then.
        EmptyBufferError
            If there is no episode, or no stretch of that length, to draw from; or if the table is emptied while the
            lock is free between two portions of a large sample of fragments.
        SampleBatchError
            As the methods of `ReplayBuffer` do.
        """
        request = replace(self._request(batch_size, mode, seed, options), max_nbytes=max_nbytes)
        with self._lock:
            held_s = self._room.admit(
                reader, "sample", lambda: self._hold_sample(request), _seconds(timeout_s), is_cancelled
            )
            drawn = self._draw(request, is_cancelled)
            self._room.wake()
        sample = self._items.finish(drawn)
        sample.held_s = held_s
        return sample

    def _draw(self, request: Request, is_cancelled: IsCancelled | None) -> Any:
        """Draw and count a sample; the lock is released between portions of a large one."""
        counted = 0

        def pause(count: int) -> None:
            nonlocal counted
            counted += count
            self._limiter.count_samples(count)
            self._room.pause(is_cancelled)

        try:
            drawn, count = self._items.draw(request, pause)
        except BaseException:
            # A table that was emptied meanwhile counts from 0.
            self._limiter.count_samples(-min(counted, self._limiter.sampled))
            raise
        self._limiter.count_samples(count - counted)
        return drawn

    def _request(self, batch_size: int, mode: Mode | None, seed: Any, options: Mapping[str, Any]) -> Request:
        modes = self._items.modes
        if mode is not None and mode not in modes:
            raise ArgumentError(f"mode must be one of a table of {self.unit}, {', '.join(modes)}; got {mode!r}")
        if seed is not None:
            whole("seed", seed)
        return self._items.request(whole("batch_size", batch_size, 1), mode or modes[0], options, seed)

    def _hold_sample(self, request: Request) -> Hold | None:
        # In a full table from which only sampling removes items, writers wait for samples, whatever the ratio.
        is_full = self._room.needs_room and len(self._items) >= self.capacity
        why = "" if is_full else self._limiter.why_not_sample(len(self._items))
        return Hold(why) if why else self._items.hold_sample(request)

    def update_weight(self, indices: Any, weights: Any, generations: Any = None) -> int:
        """Set new priorities of items, and return how many of them still exist.

        Parameters
        ----------
        indices
            Indices of n items, as in samples.
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

    def set_limits(self, /, **limits: Any) -> None:
        """Change limits while writers and learners are at work, and wake the requests that wait.

        Parameters
        ----------
        **limits
            `min_size`, `samples_per_insert` and `error_buffer` of `RateLimiter`, and `max_times_sampled`. A new ratio
            applies from now on.

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
        """Return the state of the table as plain values.

        Returns
        -------
        dict
            `name`, `kind`, `items`, `remover`, `size`, `capacity`, `nbytes`; `weight`, the sum of the weights by which
            items are drawn; `inserted` and `sampled` items so far; the `limits`; `columns`, the declared dtypes and row
            shapes by name, or by policy and name, None if none are declared; `closed`; and `held_back`, requests with
            `who`, `action`, `why`, and `since`, in seconds of Unix time.
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
                "columns": None if self._items.declared is None else self._items.declared.describe(),
                "held_back": self._room.held_back(),
                "closed": self._room.closed,
            }

    @property
    def closed(self) -> bool:
        """Whether the table is closed."""
        return self._room.closed

    def close(self) -> None:
        """Reject all further inserts and samples; blocked ones raise TableClosedError."""
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
        """Return the state of everything except the items."""
        limiter, taken = self._limiter.state_dict(), self._taken.state()
        columns = None if self._items.declared is None else self._items.declared.state()
        return {"limiter": limiter, "max_times": self._items.max_times, "taken": taken, "columns": columns}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Carry on exactly as the table that had this state, limits included.

        A table without declared columns adopts the declaration of the state; other tables keep theirs.

        Raises
        ------
        ColumnMismatchError, FormatError
            If the state belongs to a table with other arguments, or is incomplete; names the missing part. If its rows
            have other columns than this table declares; names one.
        """
        with self._lock, name_damage("the state of a table"):
            limiter, taken = RateLimiter.from_state_dict(state["limiter"]), TakenNumbers.from_state(state["taken"])
            times = count_of("max_times", state["max_times"])
            self._check_limits(limiter.limits, times)
            declared = self._items.declared
            columns = DeclaredColumns.from_state(state.get("columns"))
            self._items.set_max_times(times)
            try:
                if declared is None:
                    self._items.declare(columns)
                self._items.load_state_dict(state)
            except BaseException:
                self._items.declared = declared
                raise
            self._limiter, self._taken = limiter, taken
            self._room.wake()


def _seconds(timeout_s: float | None) -> float | None:
    return timeout_s if not timeout_s else positive("timeout_s", timeout_s)


_LIMITER_OPTIONS = ("min_size", "samples_per_insert", "error_buffer")
_ARGUMENTS = ("items", "remover", "max_times_sampled", "streams", "seed", "columns")
_ROW_ARGUMENTS = (
    "consumers",
    "max_nbytes",
    "remover",
    "group",
    "group_size",
    "version",
    "max_lag",
    "length",
    "ragged",
    "seed",
)
_FORM = "NAME=KIND:CAPACITY,OPTION=VALUE,..."


def parse_table(text: str) -> ReplayTable | RowTable:
    """Create a table from its description in one word.

    Parameters
    ----------
    text
        `NAME=KIND:CAPACITY`, then comma-separated options `OPTION=VALUE`. The kind is one of `ReplayTable`, with its
        arguments and those of `RateLimiter` as options, or `rows`, with the arguments of `RowTable`. Numbers may be
        written as `1e6`. Several names are joined by `+`, and so are declared columns, each `NAME:DTYPE[SHAPE]` with
        the extents of a row joined by `x`, and columns of `ragged`, each `NAME` or `NAME:DTYPE`.

    Raises
    ------
    ArgumentError
        If the text has another form, or an unknown kind or option; suggests near names.
    SampleBatchError
        As `ReplayTable`, `RateLimiter` and `RowTable` do.

    Examples
    --------
    >>> parse_table("prio=prioritized:1e6,alpha=0.7,samples_per_insert=4")
    ReplayTable('prio', prioritized, 0 of 1000000 steps)
    >>> parse_table("rollouts=queue:64").info()["limits"]["max_times_sampled"]
    1
    >>> parse_table("frames=uniform:1e5,columns=obs:uint8[84x84]+actions:int64").info()["columns"]
    {'obs': 'uint8[84x84]', 'actions': 'int64'}
    >>> parse_table("rollouts=rows:4096,consumers=judge+trainer,ragged=ids:int32+mask")
    RowTable('rollouts', 0 of 4096 rows)
    >>> parse_table("replay=unifrom:1e6")
    Traceback (most recent call last):
    samplebatch.errors.ArgumentError: table 'replay' must be of a kind that there is, got 'unifrom'; did you mean
        'uniform'?
    """
    match = re.fullmatch(r"(?P<name>[^=,:]+)=(?P<kind>[^:,]+):(?P<capacity>[^,]+)(?:,(?P<options>.*))?", text)
    if match is None:
        raise ArgumentError(f"a table must be given as {_FORM}, got {text!r}")
    name, kind = match["name"], match["kind"]
    kinds = (*KINDS, "rows")
    if kind not in kinds:
        raise ArgumentError(f"table {name!r} must be of a kind that there is, got {kind!r}; {near_names(kind, kinds)}")
    arguments: dict[str, Any] = {"capacity": _value(match["capacity"])}
    limits: dict[str, Any] = {}
    option_names = _ROW_ARGUMENTS if kind == "rows" else (*_LIMITER_OPTIONS, *_ARGUMENTS, *_options_of(kind))
    for part in filter(None, (match["options"] or "").split(",")):
        option, equals, value = part.partition("=")
        if not equals or not value:
            raise ArgumentError(f"options of table {name!r} must be given as OPTION=VALUE, got {part!r}")
        if option not in option_names:
            raise ArgumentError(
                f"table {name!r} of kind {kind!r} has no option {option!r}; {near_names(option, option_names)}"
            )
        target = limits if option in _LIMITER_OPTIONS else arguments
        target[option] = _TEXT_OPTIONS.get(option, _value)(value)
    try:
        if kind == "rows":
            return RowTable(name, **arguments)
        return ReplayTable(name, kind=cast(Kind, kind), limiter=RateLimiter(**limits), **arguments)
    except ArgumentError as error:
        raise ArgumentError(f"table {name!r}: {error}") from error


def _options_of(kind: str) -> tuple[str, ...]:
    return tuple(step_options(kind)) if kind in ("uniform", "prioritized") else ()


def _ragged(text: str) -> dict[str, str | None]:
    """Parse columns and the dtypes of their elements.

    >>> _ragged("ids:int32+mask")
    {'ids': 'int32', 'mask': None}
    """
    parts = [part.partition(":") for part in text.split("+")]
    return {name: dtype or None for name, _, dtype in parts}


def _value(text: str) -> Any:
    """Parse a value by its form: a flag, a number, an integer if possible, names, or a word.

    >>> [_value(text) for text in ("1e6", "0.5", "true", "lifo", "obs+new_obs", "none")]
    [1000000, 0.5, True, 'lifo', ['obs', 'new_obs'], 'none']
    """
    if text in ("true", "false"):
        return text == "true"
    try:
        number = float(text)
    except ValueError:
        return text.split("+") if "+" in text else text
    return int(number) if number.is_integer() else number  # inf and NaN are not


_TEXT_OPTIONS: Final[Mapping[str, Callable[[str], Any]]] = {
    "columns": str,
    "consumers": lambda text: text.split("+"),
    "ragged": _ragged,
    **dict.fromkeys(("group", "version", "length"), str),
}
"""Parsers of options that are not numbers, flags or words, by option."""
