"""FragmentItems: fragments of a replay table, sampled intact."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Mapping
from itertools import islice
from typing import Any, Final

import numpy as np

from samplebatch import errors
from samplebatch.arguments import count_of, describe_value, finite
from samplebatch.batch.action_unit import ActionUnit, common_unit
from samplebatch.batch.concat import concat_samples
from samplebatch.batch.multi_agent import MultiAgentBatch
from samplebatch.batch.sample_batch import SampleBatch
from samplebatch.buffer.extending import as_flat
from samplebatch.buffer.table import new_lock
from samplebatch.column.convert import match_ragged
from samplebatch.column.objects import ObjectColumn, value_nbytes
from samplebatch.service.declared_columns import DeclaredColumns
from samplebatch.service.items import Items, Pause, Request, Sample, take_options
from samplebatch.service.limiter import Hold
from samplebatch.service.selectors import REMOVERS, AnyItem, ByPriority, Item, Newest, Oldest, Selector
from samplebatch.service.selectors import Items as ItemsByNumber
from samplebatch.storage.buffers.state import generator_from_state, generator_state

_PORTION: Final = 1024
"""Number of fragments drawn between two releases of the lock."""

Fragment = SampleBatch[Any] | MultiAgentBatch[Any]
_Schema = dict[Any, Any]
_Units = dict[Any, ActionUnit | None]


class _Portion:
    """Fragments drawn so far for a sample of limited size."""

    def __init__(self, max_nbytes: int | None) -> None:
        self.items: list[Item] = []
        self.weights: list[float] = []
        self._nbytes, self._max_nbytes = 0, max_nbytes

    def add(self, item: Item, weight: float | None = None) -> None:
        """Add a fragment; raises CapacityError if the total size of the added fragments exceeds `max_nbytes`."""
        self._nbytes += item.nbytes
        if self._max_nbytes is not None and self._nbytes > self._max_nbytes:
            raise errors.CapacityError(
                f"a sample must have at most {self._max_nbytes} bytes, got {self._nbytes} or more"
            )
        self.items.append(item)
        if weight is not None:
            self.weights.append(weight)


class FragmentItems(Items):
    """Fragments of a replay table, in insertion order.

    - `kind`: sampling policy: `"fifo"`, `"lifo"`, `"key"`, `"uniform"` or `"prioritized"`.
    - `capacity`: maximum number of fragments.
    - `remover`: eviction policy: a key of `REMOVERS`, or `"none"` to block inserts into a full table.
    - `max_times`: number of samples after which a fragment is removed; 0 for no limit.
    - `seed`: seed of the generator.
    - `alpha`, `beta`: exponent of the priorities, and exponent of the importance weights.
    - `columns`: required columns; None if the first fragment determines them.

    Raises PriorityError if alpha or beta is negative or not a number.
    """

    unit = "fragments"
    modes = ("fragments",)

    def __init__(
        self,
        kind: str,
        capacity: int,
        remover: str,
        max_times: int,
        seed: Any,
        alpha: float = 0.6,
        beta: float = 0.4,
        columns: DeclaredColumns | None = None,
    ) -> None:
        self.declare(columns)
        self.lock = new_lock()
        self.capacity = capacity
        self.max_times = max_times
        self._kind, self._remover_word = kind, remover
        self._alpha, self._beta = alpha, beta
        self._rng = np.random.default_rng(seed)
        self._next = 0
        self._clear()

    def _clear(self) -> None:
        """Remove all fragments; numbering continues."""
        self._items: ItemsByNumber = OrderedDict()
        self._by_key: dict[str, Item] = {}
        self._schema: _Schema | None = None
        self._units: _Units = {}
        self._nbytes = self._times = 0
        self._largest = 1.0
        self._remover = None if self._remover_word == "none" else REMOVERS[self._remover_word](self._items)
        self._sampler = self._make_sampler()
        selectors = (self._remover, self._sampler)
        self._selectors = [selector for selector in selectors if selector is not None]

    def _make_sampler(self) -> Selector | None:
        """Create the item selection policy for samples; return None for a table of kind `"key"`."""
        if self._kind == "prioritized":
            return ByPriority(self._items, self.capacity, self._alpha, self._beta)
        kinds: dict[str, type[Selector]] = {"fifo": Oldest, "lifo": Newest, "uniform": AnyItem}
        return kinds[self._kind](self._items) if self._kind in kinds else None

    def __len__(self) -> int:
        return len(self._items)

    # Inserting

    def prepare(self, rows: Any, priorities: Any, key: Any) -> tuple[Any, int, int]:
        """Validate a fragment, its priority and its key.

        Raises ArgumentError if the key is missing for a table of kind `"key"`, or a key is passed to another table.
        Raises ColumnMismatchError if the fragment's columns differ from the declared columns. Raises ColumnTypeError if
        the fragment is not a batch. Raises PriorityError if the priority is not a finite number, or a priority is
        passed to a table that does not use priorities.
        """
        fragment = rows if isinstance(rows, MultiAgentBatch) else as_flat(rows)
        if (self._kind == "key") != (key is not None):
            requirement = "must have a key, got none" if key is None else f"must have no key, got {key!r}"
            raise errors.ArgumentError(f"a fragment for a table of kind {self._kind!r} {requirement}")
        if key is not None and not isinstance(key, str):
            raise errors.ArgumentError(f"the key of a fragment must be a string, got a {type(key).__name__}")
        if self.declared is not None:
            fragment = self.declared.match_fragment(fragment)
        priority = None if priorities is None else self._priority(priorities)
        steps = fragment.agent_steps()
        return (fragment, priority, key, _nbytes_of(fragment)), 1 if steps else 0, steps

    def _priority(self, value: Any) -> float:
        if not any(selector.by_priority for selector in self._selectors):
            raise errors.PriorityError(
                f"fragments of a table of kind {self._kind!r} with remover {self._remover_word!r} have no priorities"
            )
        size = np.asarray(value)
        if size.size != 1 or size.dtype.kind not in "biuf" or not np.isfinite(size).all():
            actual = describe_value(size.item()) if size.size == 1 else f"{size.dtype} of shape {size.shape}"
            raise errors.PriorityError(f"the priority of a fragment must be one finite number, got {actual}")
        return abs(float(size.reshape(-1)[0]))

    def hold_insert(self, prepared: Any) -> Hold | None:
        """Return why an insert into a full table must wait; None if eviction or an existing key frees space."""
        if self._remover is not None or len(self) < self.capacity or prepared[2] in self._by_key:
            return None
        return Hold(f"it is full with {self.capacity} fragments, and only sampling removes them", needs_room=True)

    def insert(self, prepared: Any, writer: str) -> Any:
        """Insert a fragment; return its sequence number, shape (1,).

        Raises ColumnMismatchError if the fragment's columns differ from the columns of earlier fragments.
        """
        fragment, priority, key, nbytes = prepared
        schema = _schema_of(fragment)
        if self._schema is not None and self.declared is None:
            if schema != self._schema:
                fragment = _match(fragment, self._schema)
                schema, nbytes = _schema_of(fragment), _nbytes_of(fragment)
            _check_alike(schema, self._schema)
        units = _merge_units(self._units, fragment)
        if key in self._by_key:
            self._remove(self._by_key[key])
        if self._remover is not None and len(self) >= self.capacity:
            self._remove(self._remover.pick(self._rng))
        self._schema = schema if self._schema is None else {**self._schema, **schema}
        self._units = units
        if priority is not None and priority > self._largest:
            self._largest = priority
        item = Item(self._next, fragment, self._largest if priority is None else priority, key, nbytes=nbytes)
        self._next += 1
        self._add(item)
        return np.array([item.number])

    def _add(self, item: Item) -> None:
        self._items[item.number] = item
        self._nbytes += item.nbytes
        self._times += item.times
        if item.key is not None:
            self._by_key[item.key] = item
        for selector in self._selectors:
            selector.add(item)

    def _remove(self, item: Item, *, is_drawn: bool = False) -> None:
        """Remove a fragment; `is_drawn` is true if the sampler has already removed the fragment."""
        del self._items[item.number]
        self._nbytes -= item.nbytes
        self._times -= item.times
        if item.key is not None:
            del self._by_key[item.key]
        for selector in self._selectors:
            if not is_drawn or selector is not self._sampler:
                selector.remove(item)

    # Sampling

    def request(self, batch_size: int, mode: Any, options: Mapping[str, Any], seed: int | None) -> Request:
        """Validate a request for fragments.

        Options are `key` for a table of kind `"key"` and `beta` for a prioritized table.

        Raises ArgumentError if the table can never return `batch_size` fragments, an option is unknown, or a required
        key is missing.
        """
        defaults: dict[str, Any] = {}
        if self._kind == "key":
            defaults = {"key": None}
        elif self._kind == "prioritized":
            defaults = {"beta": self._beta}
        merged = take_options(options, defaults, f"fragments of a table of kind {self._kind!r}")
        if self._kind == "key" and (not isinstance(merged["key"], str) or batch_size != 1):
            raise errors.ArgumentError("a sample of a table of kind 'key' requires batch_size=1 and key=, a string")
        at_once = self.capacity * max(self.max_times, 1)
        if self._kind in ("fifo", "lifo") or self._remover_word in ("none", "lifo", "lowest_priority"):
            # A table that always evicts the newest fragment may retain fragments with a single remaining draw.
            at_once = self.capacity
        elif not self.max_times:
            at_once = batch_size
        if batch_size > at_once:
            raise errors.ArgumentError(
                f"batch_size must be at most {at_once}, the fragments of a full table, got {batch_size}"
            )
        return Request(batch_size, mode, merged, seed)

    def hold_sample(self, request: Request) -> Hold | None:
        """Return why a request must wait for fragments; None if enough fragments are available."""
        if self._kind == "key":
            key = request.options["key"]
            return None if key in self._by_key else Hold(f"no fragment has the key {key!r}", needs_items=True)
        available = len(self)
        if self._kind not in ("fifo", "lifo") and self.max_times:
            available = available * self.max_times - self._times
        required = request.batch_size if self._kind in ("fifo", "lifo") or self.max_times else 1
        if available >= required:
            return None
        return Hold(f"{required} fragments are requested, and {available} may be sampled", needs_items=True)

    def draw(self, request: Request, pause: Pause) -> tuple[Any, int]:
        """Draw fragments individually and remove fragments that have been sampled `max_times` times.

        In uniform and prioritized tables without `max_times`, the lock is released between portions of 1,024 fragments.
        A fragment that is removed while the lock is released remains in the sample.

        Raises CapacityError if the sample would exceed `max_nbytes` of the request; nothing is sampled. Raises
        EmptyBufferError if another thread empties the table between two portions.
        """
        rng = self._rng if request.seed is None else np.random.default_rng(request.seed)
        portion = _Portion(request.max_nbytes)
        exhausted: dict[int, Item] = {}
        paused = 0
        if self._sampler is None:
            portion.add(self._by_key[request.options["key"]])
        elif self._kind in ("fifo", "lifo"):
            ordered = self._items.values() if self._kind == "fifo" else reversed(self._items.values())
            for item in islice(ordered, request.batch_size):
                portion.add(item)
        elif self.max_times:
            exhausted = self._draw_counted(request, rng, portion)
        else:
            while len(portion.items) < request.batch_size:
                if len(portion.items) - paused >= _PORTION:
                    pause(len(portion.items) - paused)
                    paused = len(portion.items)
                    if not self._items:
                        raise errors.EmptyBufferError(
                            "the table must have fragments, got none: it was reset during the sample"
                        )
                portion.add(*self._pick(request, rng))
        for item in portion.items:
            if item.number in self._items:
                self._count(item, is_drawn=item.number in exhausted)
        weights = portion.weights
        return (portion.items, np.array(weights) / max(weights) if weights else None), len(portion.items)

    def _pick(self, request: Request, rng: np.random.Generator) -> tuple[Item, float | None]:
        """Draw a fragment; return the fragment and its importance weight (None without priorities)."""
        assert self._sampler is not None
        item = self._sampler.pick(rng)
        if not isinstance(self._sampler, ByPriority):
            return item, None
        return item, self._sampler.weight(item, request.options["beta"])

    def _draw_counted(self, request: Request, rng: np.random.Generator, portion: _Portion) -> dict[int, Item]:
        """Draw fragments from a table with `max_times`; return a dict of the exhausted fragments, keyed by number."""
        assert self._sampler is not None
        times: dict[int, int] = {}
        exhausted: dict[int, Item] = {}
        try:
            for _ in range(request.batch_size):
                item, weight = self._pick(request, rng)
                portion.add(item, weight)
                times[item.number] = times.get(item.number, item.times) + 1
                if times[item.number] >= self.max_times:
                    self._sampler.remove(item)
                    exhausted[item.number] = item
        except BaseException:
            for item in reversed(exhausted.values()):
                self._sampler.add(item)
            raise
        return exhausted

    def _count(self, item: Item, *, is_drawn: bool) -> None:
        """Count a draw of a fragment; remove the fragment if it is exhausted."""
        item.times += 1
        self._times += 1
        if self.max_times and item.times >= self.max_times:
            self._remove(item, is_drawn=is_drawn)
        elif self._remover is not None:
            self._remover.change(item)

    def finish(self, selection: Any) -> Sample:
        """Concatenate the drawn fragments; a single fragment is returned without a copy."""
        items, weights = selection
        fragments = [item.fragment for item in items]
        return Sample(
            fragments[0] if len(fragments) == 1 else concat_samples(fragments),
            np.array([item.number for item in items]),
            np.zeros(len(items), np.int64),
            weights,
            np.array([fragment.agent_steps() for fragment in fragments]),
        )

    # Changing

    def update_weight(self, indices: Any, weights: Any, generations: Any) -> int:
        """Set new priorities of fragments; return the number of fragments that still exist.

        Raises PriorityError if a priority is not finite, the number of priorities differs from the number of indices,
        or the table does not use priorities.
        """
        numbers, values = np.asarray(indices).reshape(-1), np.asarray(weights).reshape(-1)
        if len(values) != len(numbers):
            raise errors.PriorityError(
                f"priorities must have {len(numbers)} values, one per fragment, got {len(values)}"
            )
        priorities = [self._priority(value) for value in values]
        count = 0
        for number, priority in zip(numbers.tolist(), priorities, strict=True):
            item = self._items.get(number)
            if item is not None:
                count += 1
                item.priority = priority
                self._largest = max(self._largest, priority)
                for selector in self._selectors:
                    if selector.by_priority:
                        selector.change(item)
        return count

    def set_max_times(self, times: int) -> None:
        """Change how often each fragment may be sampled and remove fragments that have reached the new maximum."""
        self.max_times = times
        for item in list(self._items.values()):
            if times and item.times >= times:
                self._remove(item)

    def reset(self) -> None:
        """Remove all fragments; later fragments may have other columns."""
        self._clear()

    @property
    def nbytes(self) -> int:
        """Size of all fragments in bytes."""
        return self._nbytes

    # Checkpoints

    def state_dict(self) -> dict[str, Any]:
        """Return the fragments, without copies, and all state that later samples depend on."""
        items = list(self._items.values())
        return {
            "fragments": [item.fragment for item in items],
            "numbers": [item.number for item in items],
            "priorities": [item.priority for item in items],
            "keys": [item.key for item in items],
            "times": [item.times for item in items],
            "next": self._next,
            "largest": self._largest,
            "selectors": [selector.state_dict() for selector in self._selectors],
            "generator": generator_state(self._rng),
        }

    def _check_item(self, number: Any, priority: Any, key: Any, times: Any, last: int) -> None:
        """Validate number, priority, key and times of a saved fragment; raises ArgumentError or FormatError."""
        if len(self) >= self.capacity:
            raise errors.FormatError(f"the number of fragments must be at most {self.capacity}, got more")
        if count_of("number", number) <= last:
            raise errors.FormatError(f"number must be greater than the previous number, {last}, got {number}")
        finite("priority", priority)
        if count_of("times", times) >= self.max_times > 0:
            raise errors.FormatError(f"times must be below max_times, {self.max_times}, got {times}")
        if (self._kind == "key") != isinstance(key, str) or (key is not None and key in self._by_key):
            raise errors.FormatError(
                f"key must be a unique string in a table by key, and null in others, got {key!r:.80}"
            )

    def load_state_dict(self, state: Mapping[str, Any], max_times: int) -> None:
        """Restore a state; see `Items.load_state_dict`."""
        before = dict(vars(self))
        try:
            self._load(state, max_times)
        except BaseException:
            # The containers and selectors of the previous fragments have been replaced, not modified.
            vars(self).update(before)
            raise

    def _load(self, state: Mapping[str, Any], max_times: int) -> None:
        parts = [state[name] for name in ("numbers", "fragments", "priorities", "keys", "times")]
        if self.declared is not None:
            parts[1] = [self.declared.match_fragment(fragment) for fragment in parts[1]]
        rng = generator_from_state(state["generator"])
        self._clear()
        self.max_times = max_times
        last = -1
        for number, fragment, priority, key, times in zip(*parts, strict=True):
            self._check_item(number, priority, key, times, last)
            last = number
            self._schema = {**(self._schema or {}), **_schema_of(fragment)}
            self._units = _merge_units(self._units, fragment)
            self._add(Item(number, fragment, float(priority), key, times, nbytes=_nbytes_of(fragment)))
        self._next, self._rng = count_of("next", state["next"]), rng
        if self._next <= last:
            raise errors.FormatError(
                f"next must be greater than the number of the last fragment, {last}, got {self._next}"
            )
        self._largest = finite("largest", state["largest"])
        for selector, selector_state in zip(self._selectors, state["selectors"], strict=True):
            selector.load_state_dict(selector_state)


def _nbytes_of(fragment: Fragment) -> int:
    """Return the size of a fragment in bytes, including nested Python objects."""
    if isinstance(fragment, MultiAgentBatch):
        return sum(_nbytes_of(part) for part in fragment.policy_batches.values())
    columns = fragment._all().values()
    return sum(
        value_nbytes(column.to_numpy()) if isinstance(column, ObjectColumn) else column.nbytes for column in columns
    )


def _schema_of(fragment: Fragment) -> _Schema:
    """Return the kind, dtype and row shape of each column that later fragments must have, by policy."""
    if isinstance(fragment, MultiAgentBatch):
        return {("policy", policy): _columns_of(part) for policy, part in fragment.policy_batches.items()}
    return {"flat": _columns_of(fragment)}


def _ragged_hint(form: Any, previous: Any) -> str:
    """Return a hint if a column's row shape may vary between fragments, else an empty string."""
    was_array = isinstance(previous, tuple) and previous[0] in ("tensor", "torch") and bool(previous[2])
    is_array = isinstance(form, tuple) and form[0] in ("tensor", "torch", "ragged", "ragged_torch") and bool(form[2])
    return "; rows of varying shape are declared in every fragment: ragged=" if was_array and is_array else ""


def _describe_mismatch(name: str, form: Any, previous: Any) -> str:
    """Return the error message for a column that differs from the column in earlier fragments."""
    if previous is None:
        return f"a fragment must have the columns of earlier fragments, got the new column {name!r}"
    expected, actual = (
        value if isinstance(value, str) else f"{value[0]} of {value[1]} with rows of shape {value[2]}"
        for value in (previous, form)
    )
    return f"column {name!r} must be {expected}, as in earlier fragments, got {actual}{_ragged_hint(form, previous)}"


def _merge_units(units: _Units, fragment: Fragment) -> _Units:
    """Merge action units by policy; raises ColumnMismatchError if the units of a policy differ."""
    parts = fragment.policy_batches if isinstance(fragment, MultiAgentBatch) else {None: fragment}
    return units | {policy: common_unit([units.get(policy), part.action_unit]) for policy, part in parts.items()}


def _columns_of(batch: SampleBatch[Any]) -> _Schema:
    flags = batch._flags
    schema: _Schema = {
        name: (column.kind, str(column.dtype), column.row_shape) if column.kind != "object" else column.kind
        for name, column in batch._all().items()
    }
    return schema | {None: (flags.time_major, flags.zero_padded, flags.per_sequence)}


def _match(fragment: Fragment, schema: _Schema) -> Fragment:
    """Convert columns to ragged columns if the columns of the same name were ragged in earlier fragments."""
    if isinstance(fragment, MultiAgentBatch):
        parts = {
            policy: _match_columns(part, schema.get(("policy", policy), {}))
            for policy, part in fragment.policy_batches.items()
        }
        return MultiAgentBatch(parts, fragment.env_steps())
    return _match_columns(fragment, schema.get("flat", {}))


def _match_columns(batch: SampleBatch[Any], forms: _Schema) -> SampleBatch[Any]:
    columns = batch._all()
    matched = {}
    for name, column in columns.items():
        form = forms.get(name)
        if (
            isinstance(form, tuple)
            and form[0] in ("ragged", "ragged_torch")
            and form[:2] != (column.kind, str(column.dtype))
        ):
            dtype = np.dtype(form[1]) if form[0] == "ragged" else column.dtype
            matched[name] = match_ragged(column, dtype, len(form[2]), name)
    return batch._with({**columns, **matched}) if matched else batch


def _check_alike(schema: _Schema, previous: _Schema) -> None:
    """Check that a fragment has the same columns as earlier fragments."""
    if ("flat" in schema) != ("flat" in previous):
        actual = "a flat one after" if "flat" in schema else "one with policies after"
        raise errors.ColumnMismatchError(
            f"fragments of a table must all be flat or all have policies, got {actual} the other kind"
        )
    for part, columns in schema.items():
        for name, form in columns.items() if part in previous else ():
            if previous[part].get(name) != form:
                raise errors.ColumnMismatchError(
                    "fragments of a table must have equal time_major, zero_padded and per_sequence, got another layout"
                    if name is None
                    else _describe_mismatch(name, form, previous[part].get(name))
                )
        absent = previous[part].keys() - columns.keys() if part in previous else ()
        if absent:
            raise errors.ColumnMismatchError(
                f"a fragment must have column {min(absent)!r}, as earlier fragments have, got none"
            )
