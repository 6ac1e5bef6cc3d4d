"""FragmentItems: whole fragments in a replay table, each sampled as it was inserted."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterator, Mapping
from itertools import islice
from typing import Any

import numpy as np

from samplebatch.arguments import whole
from samplebatch.batch.concat import concat_samples
from samplebatch.batch.multi_agent import MultiAgentBatch
from samplebatch.batch.sample_batch import SampleBatch
from samplebatch.buffer.extending import as_flat
from samplebatch.buffer.locks import new_lock
from samplebatch.errors import ArgumentError, ColumnMismatchError, PriorityError
from samplebatch.service.items import Items, Request, Sample, take_options
from samplebatch.service.selectors import REMOVERS, AnyItem, ByPriority, Item, Newest, Oldest, Selector
from samplebatch.service.selectors import Items as ItemsByNumber
from samplebatch.service.waiting import Hold
from samplebatch.storage.buffer_state import generator_from_state, generator_state

Fragment = SampleBatch[Any] | MultiAgentBatch[Any]
_Schema = dict[Any, Any]


class FragmentItems(Items):
    """The fragments of a replay table, in the order in which they were inserted.

    Parameters
    ----------
    kind
        How fragments are sampled: `"fifo"`, `"lifo"`, `"key"`, `"uniform"` or `"prioritized"`.
    capacity
        How many there may be.
    remover
        Which is removed to make room: a word of `REMOVERS`, or `"none"` to hold inserts back instead.
    max_times
        How often each may be sampled before it is removed; 0 for any number of times.
    seed
        Of the generator.
    alpha, beta
        The exponents of priorities and of importance weights.

    Raises
    ------
    PriorityError
        If alpha or beta is negative or no number.
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
    ) -> None:
        self.lock = new_lock()
        self.capacity = capacity
        self.max_times = max_times
        self._kind, self._remover_word = kind, remover
        self._alpha, self._beta = alpha, beta
        self._rng = np.random.default_rng(seed)
        self._next = 0
        self._clear()

    def _clear(self) -> None:
        """Begin without fragments; the numbers go on."""
        self._items: ItemsByNumber = OrderedDict()
        self._by_key: dict[str, Item] = {}
        self._schema: _Schema | None = None
        self._nbytes = self._times = 0
        self._largest = 1.0
        self._remover = None if self._remover_word == "none" else REMOVERS[self._remover_word](self._items)
        self._sampler = self._make_sampler()
        found = (self._remover, self._sampler)
        self._selectors = [one for one in found if one is not None]

    def _make_sampler(self) -> Selector | None:
        """Make the selector that samples are drawn by; None where keys say which."""
        if self._kind == "prioritized":
            return ByPriority(self._items, self.capacity, self._alpha, self._beta)
        kinds: dict[str, type[Selector]] = {"fifo": Oldest, "lifo": Newest, "uniform": AnyItem}
        return kinds[self._kind](self._items) if self._kind in kinds else None

    def __len__(self) -> int:
        return len(self._items)

    # Inserting

    def prepare(self, rows: Any, priorities: Any, key: Any) -> tuple[Any, int, int]:
        """Check a fragment, its priority and its key.

        Raises
        ------
        ArgumentError
            If a table by key gets a fragment without one, or any other a fragment with one.
        ColumnTypeError
            If it is no batch.
        PriorityError
            If the priority is no finite number, or nothing looks at priorities.
        """
        fragment = rows if isinstance(rows, MultiAgentBatch) else as_flat(rows)
        if (self._kind == "key") != (key is not None):
            must = "must have a key" if key is None else "has no keys"
            raise ArgumentError(f"a fragment for a table of kind {self._kind!r} {must}; see the table's kind")
        if key is not None and not isinstance(key, str):
            raise ArgumentError(f"the key of a fragment must be a string, got a {type(key).__name__}")
        priority = None if priorities is None else self._priority(priorities)
        steps = fragment.agent_steps()
        return (fragment, priority, key), 1 if steps else 0, steps

    def _priority(self, value: Any) -> float:
        """Return the size of one priority."""
        if not any(selector.by_priority for selector in self._selectors):
            raise PriorityError(
                f"fragments of a table of kind {self._kind!r} with remover {self._remover_word!r} have no priorities"
            )
        found = np.asarray(value)
        if found.size != 1 or found.dtype.kind not in "biuf" or not np.isfinite(found).all():
            raise PriorityError("the priority of a fragment must be one finite number")
        return abs(float(found.reshape(-1)[0]))

    def hold_insert(self, count: int) -> Hold | None:
        """Say that the table is full, if nothing is removed to make room."""
        if self._remover is not None or len(self) < self.capacity:
            return None
        return Hold(f"it is full with {self.capacity} fragments, and none is removed to make room")

    def insert(self, ready: Any, writer: str) -> Any:
        """Insert a fragment, and return its number, shape (1,).

        Raises
        ------
        ColumnMismatchError
            If it has other columns than those before; names one.
        """
        fragment, priority, key = ready
        schema = _schema_of(fragment)
        if self._schema is not None:
            _check_alike(schema, self._schema)
        if key in self._by_key:
            self._remove(self._by_key[key])
        if self._remover is not None and len(self) >= self.capacity:
            self._remove(self._remover.pick(self._rng))
        self._schema = schema if self._schema is None else {**self._schema, **schema}
        if priority is not None and priority > self._largest:
            self._largest = priority
        item = Item(self._next, fragment, self._largest if priority is None else priority, key)
        self._next += 1
        self._add(item)
        return np.array([item.number])

    def _add(self, item: Item) -> None:
        self._items[item.number] = item
        self._nbytes += item.fragment.size_bytes()
        self._times += item.times
        if item.key is not None:
            self._by_key[item.key] = item
        for selector in self._selectors:
            selector.add(item)

    def _remove(self, item: Item) -> None:
        del self._items[item.number]
        self._nbytes -= item.fragment.size_bytes()
        self._times -= item.times
        if item.key is not None:
            del self._by_key[item.key]
        for selector in self._selectors:
            selector.remove(item)

    # Sampling

    def request(self, batch_size: int, mode: Any, options: Mapping[str, Any], seed: int | None) -> Request:
        """Check a request for fragments; options are `key`, in a table by key, and `beta`, in one by priority.

        Raises
        ------
        ArgumentError
            If there are never as many at once, an option is unknown, or a key is missing.
        """
        known: dict[str, Any] = {}
        if self._kind == "key":
            known = {"key": None}
        elif self._kind == "prioritized":
            known = {"beta": self._beta}
        taken = take_options(options, known, f"fragments of a table of kind {self._kind!r}")
        if self._kind == "key" and (not isinstance(taken["key"], str) or batch_size != 1):
            raise ArgumentError("a sample of a table of kind 'key' is of one fragment; give batch_size=1 and its key")
        at_once = self.capacity * max(self.max_times, 1)
        if self._kind in ("fifo", "lifo") or self._remover is None:
            at_once = self.capacity
        elif not self.max_times:
            at_once = batch_size
        if batch_size > at_once:
            raise ArgumentError(f"batch_size must be at most {at_once} here, which a full table has, got {batch_size}")
        return Request(batch_size, mode, taken, seed)

    def hold_sample(self, request: Request) -> Hold | None:
        """Say which fragments a request lacks."""
        if self._kind == "key":
            key = request.options["key"]
            return None if key in self._by_key else Hold(f"no fragment has the key {key!r}", needs_items=True)
        there = len(self)
        if self._kind not in ("fifo", "lifo") and self.max_times:
            there = there * self.max_times - self._times
        wanted = request.batch_size if self._kind in ("fifo", "lifo") or self.max_times else 1
        if there >= wanted:
            return None
        return Hold(f"{wanted} fragments are asked for, and {there} may be sampled", needs_items=True)

    def draw(self, request: Request) -> tuple[Any, int]:
        """Draw fragments one after the other; those that were sampled often enough are removed."""
        rng = self._rng if request.seed is None else np.random.default_rng(request.seed)
        found, weights = [], []
        for item in self._choose(request, rng):
            found.append(item)
            if isinstance(self._sampler, ByPriority):
                weights.append(self._sampler.weight(item, request.options["beta"]))
            item.times += 1
            self._times += 1
            if self.max_times and item.times >= self.max_times:
                self._remove(item)
            elif self._remover is not None:
                self._remover.change(item)
        scaled = np.array(weights) / max(weights) if weights else None
        return (found, scaled), len(found)

    def _choose(self, request: Request, rng: np.random.Generator) -> Iterator[Item]:
        """Go over the fragments of a sample; each may be removed before the next is asked for."""
        if self._sampler is None:
            yield self._by_key[request.options["key"]]
        elif self._kind in ("fifo", "lifo"):
            ordered = self._items.values() if self._kind == "fifo" else reversed(self._items.values())
            yield from list(islice(ordered, request.batch_size))
        else:
            for _ in range(request.batch_size):
                yield self._sampler.pick(rng)

    def finish(self, drawn: Any) -> Sample:
        """Join the fragments; a single one is handed out as it was inserted."""
        found, weights = drawn
        fragments = [item.fragment for item in found]
        return Sample(
            fragments[0] if len(fragments) == 1 else concat_samples(fragments),
            np.array([item.number for item in found]),
            np.zeros(len(found), np.int64),
            weights,
            np.array([fragment.agent_steps() for fragment in fragments]),
        )

    # Changing

    def update_weight(self, indices: Any, weights: Any, generations: Any) -> int:
        """Give fragments new priorities, and return how many were there.

        Raises
        ------
        PriorityError
            If a priority is no finite number, there are not as many as fragments, or nothing looks at priorities.
        """
        numbers, given = np.asarray(indices).reshape(-1), np.asarray(weights).reshape(-1)
        if len(given) != len(numbers):
            raise PriorityError(f"priorities must be {len(numbers)}, one for each fragment, got {len(given)}")
        priorities = [self._priority(value) for value in given]
        there = 0
        for number, priority in zip(numbers.tolist(), priorities, strict=True):
            item = self._items.get(number)
            if item is not None:
                there += 1
                item.priority = priority
                self._largest = max(self._largest, priority)
                for selector in self._selectors:
                    if selector.by_priority:
                        selector.change(item)
        return there

    def set_max_times(self, times: int) -> None:
        """Change how often each may be sampled; those that were so often are removed."""
        self.max_times = times
        for item in list(self._items.values()):
            if times and item.times >= times:
                self._remove(item)

    def reset(self) -> None:
        """Remove all fragments; columns may be others afterwards."""
        self._clear()

    @property
    def nbytes(self) -> int:
        """Bytes of all fragments."""
        return self._nbytes

    # Carrying on elsewhere

    def state_dict(self) -> dict[str, Any]:
        """Return the fragments themselves, and all that the table needs to carry on as it would have."""
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

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Carry on from a state."""
        parts = [state[name] for name in ("numbers", "fragments", "priorities", "keys", "times")]
        rng = generator_from_state(state["generator"])
        self._clear()
        for number, fragment, priority, key, times in zip(*parts, strict=True):
            self._schema = {**(self._schema or {}), **_schema_of(fragment)}
            self._add(Item(whole("number", number), fragment, float(priority), key, whole("times", times)))
        self._next, self._largest, self._rng = whole("next", state["next"]), float(state["largest"]), rng
        for selector, own in zip(self._selectors, state["selectors"], strict=True):
            selector.load_state_dict(own)


def _schema_of(fragment: Fragment) -> _Schema:
    """Return the columns of a fragment, by policy, that others must have, too: kinds, dtypes and row shapes."""
    if isinstance(fragment, MultiAgentBatch):
        return {("policy", policy): _columns_of(part) for policy, part in fragment.policy_batches.items()}
    return {"flat": _columns_of(fragment)}


def _columns_of(batch: SampleBatch[Any]) -> _Schema:
    flags = batch._flags
    found: _Schema = {
        name: (column.kind, str(column.dtype), column.row_shape) if column.kind != "object" else column.kind
        for name, column in batch._all().items()
    }
    return found | {None: (flags.time_major, flags.zero_padded)}


def _check_alike(schema: _Schema, known: _Schema) -> None:
    """Check that a fragment has the columns of those before it."""
    if ("flat" in schema) != ("flat" in known):
        raise ColumnMismatchError("fragments of a table must all be flat, or all have policies, one is otherwise")
    for part, columns in schema.items():
        for name, form in columns.items() if part in known else ():
            if known[part].get(name) != form:
                raise ColumnMismatchError(
                    "fragments of a table must lie in memory alike, as sequences or not"
                    if name is None
                    else f"column {name!r} must be as in the fragments before, it is of another dtype or shape, or new"
                )
        absent = known[part].keys() - columns.keys() if part in known else ()
        if absent:
            raise ColumnMismatchError(f"column {min(absent)!r} is missing, and the fragments before have it")
