"""ReplayTable: replay table of steps or fragments, with limits on inserts and samples."""

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
"""Values of `kind` of a `ReplayTable`."""

_STEP_KINDS = ("uniform", "prioritized")
_LIMITS = ("min_size", "samples_per_insert", "error_buffer", "max_times_sampled")


class ReplayTable:
    """Replay table of the service, with limits that can block inserts and samples.

    An item is a step or an entire fragment. A table is thread-safe; `info` lists blocked requests with their reasons.

    Parameters
    ----------
    name
        Name of the table.
    kind
        Sampling order: `"uniform"` or `"prioritized"`. Tables of fragments also support `"queue"` (first in, first out;
        each fragment is sampled once), `"fifo"` (first in, first out; fragments are sampled repeatedly), `"lifo"` (last
        in, first out) and `"key"` (lookup by key; a new fragment replaces the fragment with the same key).
    items
        `"steps"` (default for the kinds `"uniform"` and `"prioritized"`) or `"fragments"` (default for other kinds).
    capacity
        Maximum number of items. The capacity of a table of steps is rounded up to a multiple of `streams`.
    limiter
        Limits of this table; a limiter must not be shared between tables. By default, sampling requires one item.
    remover
        Eviction policy of a full table: `"fifo"`, `"lifo"`, `"uniform"`, `"lowest_priority"`, `"most_sampled"`, or
        `"none"`, which blocks inserts. Tables of steps require `"fifo"`. The default policy is `"none"` for a queue and
        for a fifo table with `max_times_sampled`, otherwise `"fifo"`.
    max_times_sampled
        Maximum number of times that each item is sampled; 0 for no limit. A fragment that reaches the limit is removed;
        a step that reaches the limit is no longer sampled. The default number is 1 for a queue, otherwise 0.
    streams
        Number of rings in a table of steps. Each environment of each writer is assigned its own ring while rings are
        free, so an episode that is sent in several fragments is stored contiguously.
    seed
        Seed of the table's random generator; None for a random seed.
    columns
        Required columns of fragments: a mapping of column names to dtypes or (dtype, row shape) pairs, such as
        `{"obs": ("float32", (4,)), "actions": "int64", "tokens": "int32[?]", "prompt": "text", "infos": "object"}`, or
        equivalent text such as `"obs:float32[4]+actions:int64"`. Fragments of several policies require one mapping per
        policy. Fragments are rejected if a column is missing, is undeclared, or differs from the declared dtype or row
        shape. Tables of steps also accept fragments without infos, or with undeclared columns `eps_id`, `env_id`,
        `agent_index`, `t`, `unroll_id` and `weights_version` (int64) and `eps_done` (bool). By default, the first
        fragment determines the columns.
    **options
        For a table of steps: options of the table's replay buffer, and the default `n_step` and `gamma` of samples. The
        buffer is a `ReplayBuffer` or `PrioritizedReplayBuffer`, or a `VectorReplayBuffer` or
        `PrioritizedVectorReplayBuffer` if `streams` is greater than 1. For a prioritized table of fragments: `alpha`
        and `beta`.

    Raises
    ------
    ArgumentError
        If an option is unknown, a number is out of range, arguments are incompatible, a declared dtype or row shape is
        invalid, or a column is declared twice.
    PriorityError
        If alpha or beta is negative or not a number.

    Attributes
    ----------
    name, kind, unit, remover, capacity
        Values of the arguments; `unit` is the value of `items`. The `kind` of a queue is `"fifo"`.

    Examples
    --------
    >>> from samplebatch import SampleBatch
    >>> table = ReplayTable("replay", capacity=100, seed=7, limiter=RateLimiter(3))
    >>> rows = SampleBatch(
    ...     obs=[1, 2, 3],
    ...     actions=[0, 0, 0],
    ...     rewards=[0.0, 0.0, 1.0],
    ...     terminateds=[False, False, True],
    ... )
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
        self.unit = choice("items", items or ("steps" if kind in _STEP_KINDS else "fragments"), ("steps", "fragments"))
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
        self._stored_numbers = TakenNumbers()

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
            if self.kind not in _STEP_KINDS:
                raise ArgumentError(f"items must be 'fragments' for kind {self.kind!r}, got {self.unit!r}")
            if self.remover != "fifo":
                raise ArgumentError(
                    f"remover must be 'fifo' for a table of steps, got {self.remover!r}; tables of fragments "
                    "(items='fragments') accept other removers"
                )
            return StepItems(self.kind, capacity, streams, times, seed, options, columns)
        if streams != 1:
            raise ArgumentError(f"streams must be 1 for table {self.name!r} of fragments, got {streams}")
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
            # Each removal requires `times` samples, and each insert earns `ratio` samples. In a full table, the earned
            # samples are exhausted before an item is removed.
            raise ArgumentError(
                f"samples_per_insert must equal max_times_sampled, {times}, if only sampling removes fragments, got "
                f"{ratio:g}: writers and readers of a full table would wait for each other forever; pass a remover "
                "such as 'fifo', or omit samples_per_insert"
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
        """Insert a fragment, either as one item or as one item per step.

        A fragment without rows is ignored, even if a limit blocks inserts.

        Parameters
        ----------
        rows
            The fragment. A table of steps accepts the same rows as `ReplayBuffer.extend`, and copies the rows. A table
            of fragments requires a batch and stores the columns without copying; do not modify the columns afterwards.
        writer
            Name of the writer. `info` lists the name of a blocked writer, and tables of steps assign rings by writer
            name.
        stream, number
            Name of a stream of the writer, and the fragment's sequence number in this stream; 0 for a fragment without
            a number. A fragment is ignored as a duplicate if its number is not greater than the stream's last number.
        priorities
            Priority of the fragment, or one priority per step. Priorities require a prioritized table or the remover
            `"lowest_priority"`. The default priority is the largest priority so far.
        keys
            Key of the fragment, for a table of kind `"key"`.
        timeout_s
            Maximum waiting time in seconds while the insert is blocked; None to wait without limit, 0 not to wait.
        is_cancelled
            Function that returns whether the caller has cancelled the insert; called periodically while the insert is
            blocked. If the function returns True, AbandonedError is raised and nothing is inserted.

        Raises
        ------
        LimitTimeoutError
            If the insert is still blocked after `timeout_s`; the message contains the reason.
        TableClosedError
            If the table was closed before the call, or is closed during the wait.
        ArgumentError
            If a fragment for a table of kind `"key"` has no key, or a key is passed to a table of another kind.
        CapacityError
            If the fragment has more steps than a ring has slots.
        PriorityError
            If priorities are invalid, or are passed to a table that does not use priorities.
        SampleBatchError
            In the same cases as `ReplayBuffer.extend`. In particular, ColumnMismatchError is raised if the columns
            differ from the declared columns or from the columns of earlier fragments.
        """
        prepared, count, steps = self._items.prepare(rows, priorities, keys)
        with self._lock:
            # A fragment of a lost connection may be blocked here, together with the copy that was sent again.
            was_taken = partial(self._stored_numbers.includes, writer, stream, number)
            hold = partial(self._hold_insert, prepared, was_taken)
            held_s = self._room.admit(writer, "insert", hold, _seconds(timeout_s), is_cancelled) if count else 0.0
            if not count or was_taken():
                return InsertResult(0, np.zeros(0, np.int64), len(self._items), held_s)
            indices = self._items.insert(prepared, writer)
            self._stored_numbers.note(writer, stream, number)
            self._limiter.count_inserts(count)
            self._room.wake()
            size = len(self._items)
        return InsertResult(steps, indices, size, held_s)

    def taken(self, writer: str, stream: str = "") -> int:
        """Return the sequence number of the last inserted fragment of a stream; 0 if the stream is unknown."""
        with self._lock:
            return self._stored_numbers.last(writer, stream)

    def _hold_insert(self, prepared: Any, was_taken: Callable[[], bool]) -> Hold | None:
        if was_taken():
            return None
        why = "" if self._room.needs_items else self._limiter.why_not_insert(len(self._items))
        return Hold(why) if why else self._items.hold_insert(prepared)

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

        Items are drawn with replacement, except in fifo tables (the oldest fragments) and lifo tables (the newest
        fragments). The limiter counts each step or fragment of a sample as one sample.

        Parameters
        ----------
        batch_size
            Number of steps, sequences, episodes or fragments, as selected by `mode`.
        mode
            `"steps"` (default), `"sequences"` or `"episodes"` for a table of steps; otherwise `"fragments"`.
        timeout_s
            Maximum waiting time in seconds while the sample is blocked; None to wait without limit, 0 not to wait.
        seed
            Seed of a random generator for this sample only; None to use the table's generator.
        reader
            Name of the reader, which `info` lists for blocked samples.
        is_cancelled
            As in `extend`. If the function returns True, AbandonedError is raised and nothing is sampled.
        max_nbytes
            Maximum size of the sample in bytes, checked before its rows are gathered; None for no limit.
        **options
            Options of the mode. Steps: `n_step` and `gamma`, as in `ReplayBuffer.sample`. Sequences: `length`,
            `burn_in`, `padded` and `per_sequence`, as in `ReplayBuffer.sample_sequences`. Episodes: `unfinished`, as in
            `ReplayBuffer.sample_episodes`. Fragments of a table of kind `"key"`: `key`, which is required. For a
            prioritized table, `beta` overrides the table's exponent of importance weights.

        Raises
        ------
        LimitTimeoutError
            If the sample is still blocked after `timeout_s`; the message contains the reason.
        TableClosedError
            If the table was closed before the call, or is closed during the wait.
        ArgumentError
            If the table does not support the mode, an option is unknown or out of range, or `batch_size` is not an
            integer from 1 to the size of the largest possible sample.
        CapacityError
            If the sample would exceed `max_nbytes`; nothing is sampled.
        EmptyBufferError
            If the table contains no complete episode, or no episode of `length` steps for unpadded sequences.
            EmptyBufferError is also raised if another thread empties the table while a large sample of fragments is
            drawn.
        SampleBatchError
            In the same cases as the sampling method of `ReplayBuffer`.
        """
        request = replace(self._request(batch_size, mode, seed, options), max_nbytes=max_nbytes)
        with self._lock:
            held_s = self._room.admit(
                reader, "sample", lambda: self._hold_sample(request), _seconds(timeout_s), is_cancelled
            )
            selection = self._draw(request, is_cancelled)
            self._room.wake()
        sample = self._items.finish(selection)
        sample.held_s = held_s
        return sample

    def _draw(self, request: Request, is_cancelled: IsCancelled | None) -> Any:
        """Draw a sample and count it in the limiter; the lock is released between portions of a large sample."""
        counted = 0

        def pause(count: int) -> None:
            nonlocal counted
            counted += count
            self._limiter.count_samples(count)
            self._room.pause(is_cancelled)

        try:
            selection, count = self._items.draw(request, pause)
        except BaseException:
            # A reset of the table during a pause also resets the limiter's counts to 0.
            self._limiter.count_samples(-min(counted, self._limiter.sampled))
            raise
        self._limiter.count_samples(count - counted)
        return selection

    def _request(self, batch_size: int, mode: Mode | None, seed: Any, options: Mapping[str, Any]) -> Request:
        modes = self._items.modes
        if mode is not None and mode not in modes:
            raise ArgumentError(f"mode of a table of {self.unit} must be one of {', '.join(modes)}; got {mode!r}")
        if seed is not None:
            whole("seed", seed)
        return self._items.request(whole("batch_size", batch_size, 1), mode or modes[0], options, seed)

    def _hold_sample(self, request: Request) -> Hold | None:
        # If only sampling removes items from a full table, writers wait for samples regardless of the ratio.
        is_full = self._room.needs_room and len(self._items) >= self.capacity
        why = "" if is_full else self._limiter.why_not_sample(len(self._items))
        return Hold(why) if why else self._items.hold_sample(request)

    def update_weight(self, indices: Any, weights: Any, generations: Any = None) -> int:
        """Set new priorities of items; return the number of items that still exist.

        An error leaves all priorities unchanged.

        Parameters
        ----------
        indices
            Indices of n items, from `indices` of a sample.
        weights
            New priorities, shape (n,).
        generations
            Generations from `generation` of the sample, shape (n,); steps that were overwritten after sampling are
            skipped. Tables of fragments ignore the generations.

        Raises
        ------
        PriorityError
            If the table does not use priorities, or a priority is not finite.
        SampleBatchError
            In the same cases as `PrioritizedReplayBuffer.update_weight`.
        """
        with self._lock:
            return self._items.update_weight(indices, weights, generations)

    def reset(self) -> None:
        """Remove all items and reset all counts."""
        with self._lock:
            self._items.reset()
            self._limiter.reset()
            self._room.wake()

    # Limits

    def set_limits(self, /, **limits: Any) -> None:
        """Change limits at run time; blocked requests are re-checked.

        Parameters
        ----------
        **limits
            `min_size`, `samples_per_insert` and `error_buffer` of `RateLimiter`, and `max_times_sampled`. A new value
            of `samples_per_insert` applies only to later inserts and samples.

        Raises
        ------
        ArgumentError
            If a limit is unknown or out of range; all limits then remain unchanged.
        """
        for name in limits:
            if name not in _LIMITS:
                raise ArgumentError(f"a table has no limit {name!r}; {near_names(name, _LIMITS)}")
        with self._lock:
            times = whole("max_times_sampled", limits.pop("max_times_sampled", self._items.max_times))
            self._check_limits(self._limiter.changed(limits), times)
            size = len(self._items)
            if times != self._items.max_times:
                self._items.set_max_times(times)
            self._limiter.set_limits(size, limits)
            self._room.wake()

    def info(self) -> dict[str, Any]:
        """Return the state of the table as plain values.

        Returns
        -------
        dict
            `name`, `kind`, `items`, `remover`, `size`, `capacity`, `nbytes`, `limits` and `closed`, and these entries:
            Entry `weight` is the sum of all sampling weights. Entries `inserted` and `sampled` count items. Entry
            `columns` maps names, or policies and names, to declared dtypes and row shapes, or is None if no columns are
            declared. Entry `held_back` lists blocked requests with the client's name (`who`), `action`, reason (`why`)
            and start (`since`, in Unix seconds).
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
        """Close the table; blocked and later inserts and samples raise TableClosedError."""
        with self._lock:
            self._room.close()

    # Checkpoints

    def state_dict(self) -> dict[str, Any]:
        """Return items, limits, counts and generator state; a table with the same arguments can restore them."""
        with self._lock:
            return self._own_state() | self._items.state_dict()

    def freeze(self) -> dict[str, Any]:
        """Return the current state without copying the rows; `Checkpoints` reads the rows in parts."""
        with self._lock:
            return self._own_state() | self._items.freeze()

    def _own_state(self) -> dict[str, Any]:
        limiter, numbers = self._limiter.state_dict(), self._stored_numbers.state()
        columns = None if self._items.declared is None else self._items.declared.state()
        return {"limiter": limiter, "max_times": self._items.max_times, "taken": numbers, "columns": columns}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Restore a result of `state_dict`, including limits and counts.

        A table without declared columns adopts the declared columns of the state.

        Raises
        ------
        ColumnMismatchError, FormatError
            If the state belongs to a table with different arguments, is incomplete, or contains undeclared columns. The
            table remains unchanged.
        """
        with self._lock, name_damage("the state of a table"):
            limiter, numbers = RateLimiter.from_state_dict(state["limiter"]), TakenNumbers.from_state(state["taken"])
            times = count_of("max_times", state["max_times"])
            self._check_limits(limiter.limits, times)
            declared = self._items.declared
            columns = DeclaredColumns.from_state(state.get("columns"))
            try:
                if declared is None:
                    self._items.declare(columns)
                self._items.load_state_dict(state, times)
            except BaseException:
                self._items.declared = declared
                raise
            self._limiter, self._stored_numbers = limiter, numbers
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
    """Create a table from a text description such as `replay=prioritized:1e6,alpha=0.7`.

    Parameters
    ----------
    text
        `NAME=KIND:CAPACITY`, followed by comma-separated options `OPTION=VALUE`. KIND is a kind of `ReplayTable` or
        `rows`. Options are the arguments of `ReplayTable` and `RateLimiter`, or for `rows` the arguments of `RowTable`.
        Numbers may be written as `1e6`. The entries of a list (names, declared columns or ragged columns) are joined by
        `+`. A declared column is `NAME:DTYPE[SHAPE]`, with extents joined by `x`. A ragged column is `NAME` or
        `NAME:DTYPE`.

    Raises
    ------
    ArgumentError
        If the text does not have this form, or the kind or an option is unknown; the message suggests similar names.
    SampleBatchError
        In the same cases as `ReplayTable`, `RateLimiter` and `RowTable`.

    Examples
    --------
    >>> parse_table("prio=prioritized:1e6,alpha=0.7,samples_per_insert=4")
    ReplayTable('prio', prioritized, 0 of 1000000 steps)
    >>> parse_table("rollouts=queue:64").info()["limits"]["max_times_sampled"]
    1
    >>> table = parse_table("frames=uniform:1e5,columns=obs:uint8[84x84]+actions:int64")
    >>> table.info()["columns"]
    {'obs': 'uint8[84x84]', 'actions': 'int64'}
    >>> parse_table("rollouts=rows:4096,consumers=judge+trainer,ragged=ids:int32+mask")
    RowTable('rollouts', 0 of 4096 rows)
    >>> parse_table("replay=unifrom:1e6")
    Traceback (most recent call last):
    samplebatch.errors.ArgumentError: kind of table 'replay' must be known, got 'unifrom';
        did you mean 'uniform'?
    """
    match = re.fullmatch(r"(?P<name>[^=,:]+)=(?P<kind>[^:,]+):(?P<capacity>[^,]+)(?:,(?P<options>.*))?", text)
    if match is None:
        raise ArgumentError(f"a table must have the form {_FORM}, got {text!r}")
    name, kind = match["name"], match["kind"]
    kinds = (*KINDS, "rows")
    if kind not in kinds:
        raise ArgumentError(f"kind of table {name!r} must be known, got {kind!r}; {near_names(kind, kinds)}")
    arguments: dict[str, Any] = {"capacity": _value(match["capacity"])}
    limits: dict[str, Any] = {}
    option_names = _ROW_ARGUMENTS if kind == "rows" else (*_LIMITER_OPTIONS, *_ARGUMENTS, *_options_of(kind))
    for part in filter(None, (match["options"] or "").split(",")):
        option, equals, value = part.partition("=")
        if not equals or not value:
            raise ArgumentError(f"options of table {name!r} must have the form OPTION=VALUE, got {part!r}")
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
    """Parse ragged columns with optional element dtypes.

    >>> _ragged("ids:int32+mask")
    {'ids': 'int32', 'mask': None}
    """
    parts = [part.partition(":") for part in text.split("+")]
    return {name: dtype or None for name, _, dtype in parts}


def _value(text: str) -> Any:
    """Parse the value of an option: a flag, an integer, a float, a list of names, or a string.

    >>> [_value(text) for text in ("1e6", "0.5", "true", "lifo", "obs+new_obs", "none")]
    [1000000, 0.5, True, 'lifo', ['obs', 'new_obs'], 'none']
    """
    if text in ("true", "false"):
        return text == "true"
    try:
        number = float(text)
    except ValueError:
        return text.split("+") if "+" in text else text
    return int(number) if number.is_integer() else number  # inf and NaN are not integers


_TEXT_OPTIONS: Final[Mapping[str, Callable[[str], Any]]] = {
    "columns": str,
    "consumers": lambda text: text.split("+"),
    "ragged": _ragged,
    **dict.fromkeys(("group", "version", "length"), str),
}
"""Parser of each option that `_value` cannot parse."""
