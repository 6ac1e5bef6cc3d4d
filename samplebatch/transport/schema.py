"""Schema of a message: names, types and shapes of the columns, without numbers of rows.

A schema is sent to the other process once; later messages refer to the schema by number. Columns whose rows have equal
shapes are fixed columns: the offsets of fixed columns in a block depend only on the number of rows (`Plan`). All
columns other than fixed columns are variable columns, and each message describes its variable columns.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from math import prod
from typing import Any, Final, NamedTuple

import numpy as np
import numpy.typing as npt

from samplebatch import names
from samplebatch.batch.action_unit import ActionUnit
from samplebatch.batch.flags import Flags, flags_of_unit
from samplebatch.batch.tree import Structure, leaf_names
from samplebatch.column.memory import ALIGNMENT
from samplebatch.column.types import check_torch_name, named_dtype
from samplebatch.errors import FormatError, SampleBatchError
from samplebatch.names import PolicyID

SAMPLE_BATCH: Final = "SampleBatch"
MULTI_AGENT_BATCH: Final = "MultiAgentBatch"
NESTED_BATCH: Final = "Batch"

WHOLE: Final = "0"
"""Form of a column without a row axis: a 0-dimensional array."""
SCALAR: Final = "s"
"""Form of a NumPy scalar, sent as a 0-dimensional array."""
GRADIENT: Final = "g"
"""Form of a tensor that requires a gradient."""

BARE: Final = "e"
"""Form of a column of empty dicts, such as empty infos; its rows have no bytes."""

_MAX_NBYTES = 1 << 62
"""Maximum number of rows of an array, even of one without bytes."""

_MAX_PLANS = 64
_MAX_TARGETS = 256
_UP = ALIGNMENT - 1
_ndarray = np.ndarray

Rows = tuple[Any, ...]
"""Number of rows of each part of a schema, or of each counted column if they differ."""


def align(nbytes: int) -> int:
    """Round up to the next offset at which a column can start.

    >>> align(0), align(1), align(64)
    (0, 64, 64)
    """
    return nbytes + _UP & ~_UP


class Fixed(NamedTuple):
    """Description of a column with rows of equal shape.

    - `name`: dotted name; empty in a nested batch, because the structure of a nested batch contains the names.
    - `dtype`: dtype of the values in the block.
    - `row_shape`: shape of one row, or of a value without a row axis.
    - `torch`: name of the torch dtype if the column is a tensor.
    - `form`: any combination of `WHOLE`, `SCALAR` and `GRADIENT`, or only `BARE`; empty for an ordinary column.
    """

    name: str
    dtype: np.dtype[Any]
    row_shape: tuple[int, ...]
    torch: str | None = None
    form: str = ""

    @property
    def counted(self) -> bool:
        """Whether the column has a row axis."""
        return WHOLE not in self.form and SCALAR not in self.form


class Variable(NamedTuple):
    """Schema entry of a variable column: only its name, because each message describes the column."""

    name: str


class Part(NamedTuple):
    """Description of the columns of one batch of a message.

    - `label`: policy id in a `MultiAgentBatch`, otherwise empty.
    - `columns`: descriptions of the columns, in order.
    - `structure`: nesting of the columns. For a `SampleBatch`, the structure is the JSON of its nested columns. For a
      `Batch`, the structure consists of (name, substructure) pairs; a substructure is None for a leaf (the next
      column), otherwise nested pairs.
    - `nested`: decoded structure of a `SampleBatch`'s nested columns.
    - `has_variable`: whether any column is variable.
    - `flags`: flags of the batch, including the action unit; a message may override the flags.
    """

    label: PolicyID
    columns: tuple[Fixed | Variable, ...]
    structure: Any
    nested: dict[str, Structure]
    has_variable: bool
    flags: Flags

    @classmethod
    def of(
        cls, label: PolicyID, columns: tuple[Fixed | Variable, ...], structure: Any, unit: ActionUnit | None = None
    ) -> Part:
        """Create a part.

        Raises ValueError if the structure does not match the columns.
        """
        nested = _nested(structure, columns) if isinstance(structure, str) and structure else {}
        has_variable = any(isinstance(column, Variable) for column in columns)
        return cls(label, columns, structure, nested, has_variable, flags_of_unit(unit))


class Place(NamedTuple):
    """Offset, shape and description of a fixed column in its block."""

    column: Fixed
    shape: tuple[int, ...]
    offset: int


class Plan:
    """Aligned offsets of the fixed columns of a message in its block.

    - `parts`: offsets of each part's fixed columns, in order.
    - `nbytes`: number of bytes from the start of the block to the end of the last fixed column, rounded up.
    - `roomy_nbytes`: `nbytes` plus space for short metadata.
    - `names`: offsets of each part's fixed columns, by column name or, in a nested batch, by column number.
    - `by_name`: offsets by column name if the message is one `SampleBatch` of equally long arrays without sequences.
    """

    __slots__ = ("_targets", "by_name", "names", "nbytes", "parts", "roomy_nbytes")

    def __init__(self, parts: list[list[Place]], nbytes: int, names: list[dict[str, Place]], *, is_plain: bool) -> None:
        self.parts = parts
        self.nbytes = nbytes
        # The metadata of partly used rows are usually not longer.
        self.roomy_nbytes = nbytes + ALIGNMENT * (1 + len(parts))
        self.names = names
        self.by_name = names[0] if is_plain else None
        self._targets: dict[int, list[npt.NDArray[Any]]] = {}

    def arrays(self, memory: npt.NDArray[np.uint8], start: int) -> list[npt.NDArray[Any]]:
        """Create an array for each fixed column in a block that starts at the offset `start`."""
        return [
            _ndarray(shape, column.dtype, memory, start + offset)
            for places in self.parts
            for column, shape, offset in places
        ]

    def targets(self, memory: npt.NDArray[np.uint8], start: int) -> list[npt.NDArray[Any]]:
        """Return the cached result of `arrays`; blocks are reused, so the same `start` values recur."""
        targets = self._targets.get(start)
        if targets is None:
            if len(self._targets) >= _MAX_TARGETS:
                self._targets.clear()
            targets = self._targets[start] = self.arrays(memory, start)
        return targets

    def forget_targets(self) -> None:
        """Clear the cache of `targets`."""
        self._targets.clear()


class Schema:
    """Description of a message: the kind of batch and its parts.

    - `kind`: `SAMPLE_BATCH`, `MULTI_AGENT_BATCH` or `NESTED_BATCH`.
    - `parts`: descriptions of the columns, one per policy of a `MultiAgentBatch`, otherwise one description.
    - `number`: number by which messages refer to the schema after the other process has received it.
    - `is_plain`: whether the message is a `SampleBatch` of arrays without sequences.
    """

    __slots__ = ("_plans", "_simple_plans", "is_plain", "kind", "number", "parts")

    def __init__(self, kind: str, parts: Sequence[Part]) -> None:
        self.kind = kind
        self.parts = tuple(parts)
        self.number: int | None = None
        self.is_plain = kind == SAMPLE_BATCH and all(
            isinstance(column, Fixed) and column.torch is None and column.form != BARE and column.name != names.SEQ_LENS
            for column in self.parts[0].columns
        )
        if self.is_plain:
            # A batch of only infos and states has rows, but no steps.
            self.is_plain = any(names.counts_steps(column.name) for column in self.parts[0].columns)
        self._plans: dict[tuple[Rows, Rows], Plan] = {}
        self._simple_plans: dict[int, Plan] = {}

    def simple_plan(self, rows: int) -> Plan:
        """Compute the layout of a single part whose columns all have `rows` rows and no spare rows."""
        plan = self._simple_plans.get(rows)
        if plan is None:
            if len(self._simple_plans) >= _MAX_PLANS:
                self._simple_plans.clear()
            plan = self._simple_plans[rows] = self._lay_out((rows,), (rows,))
        return plan

    def plan(self, rooms: Rows, rows: Rows) -> Plan:
        """Compute the layout of a message's columns.

        - `rooms`: number of rows to allocate for each part.
        - `rows`: number of rows in use in each part, counted from the part's first row.
        """
        plan = self._plans.get((rooms, rows))
        if plan is None:
            if len(self._plans) >= _MAX_PLANS:
                self._plans.clear()
            plan = self._plans[rooms, rows] = self._lay_out(rooms, rows)
        return plan

    def _lay_out(self, rooms: Rows, rows: Rows) -> Plan:
        parts = []
        at = 0
        for part, room, used in zip(self.parts, rooms, rows, strict=True):
            part_columns = []
            columns = [column for column in part.columns if isinstance(column, Fixed)]
            for column, max_count, count in zip(columns, _counts(columns, room), _counts(columns, used), strict=True):
                shape = (count, *column.row_shape) if column.counted else column.row_shape
                if (
                    count > max_count
                    or prod([max(1, extent) for extent in shape]) * column.dtype.itemsize > _MAX_NBYTES
                ):
                    raise ValueError(f"rows must be at most {max_count}, got {count}")
                part_columns.append(Place(column, shape, at))
                at += align(max_count * prod(column.row_shape) * column.dtype.itemsize)
            parts.append(part_columns)
        nested = self.kind == NESTED_BATCH
        names = [
            {
                str(i) if nested else column_place.column.name: column_place
                for i, column_place in enumerate(part_columns)
            }
            for part_columns in parts
        ]
        return Plan(parts, at, names, is_plain=self.is_plain and type(rows[0]) is int)

    def forget_targets(self) -> None:
        """Release cached references to the memory to which columns were copied."""
        for plan in (*self._plans.values(), *self._simple_plans.values()):
            plan.forget_targets()

    def describe(self) -> dict[str, Any]:
        """Convert the schema to JSON-serializable values; `read` is the inverse."""
        return {
            "kind": self.kind,
            "parts": [
                [_plain_label(part.label), [_plain(column) for column in part.columns], part.structure, *_unit(part)]
                for part in self.parts
            ],
        }

    @classmethod
    def read(cls, described: Any) -> Schema:
        """Create a schema from a description that another process sent.

        Raises FormatError if the description is not a result of `describe`.
        """
        try:
            kind = described["kind"]
            label_of = _policy if kind == MULTI_AGENT_BATCH else _string
            parts = [
                Part.of(label_of(label), tuple(map(_column, columns)), structure, *map(_read_unit, units))
                for label, columns, structure, *units in described["parts"]
            ]
            if kind == NESTED_BATCH:
                for part in parts:
                    _check_tree(part.structure, len(part.columns))
        except (SampleBatchError, TypeError, ValueError, LookupError, RecursionError) as error:
            raise FormatError(f"a message's schema must describe its columns: {error}") from error
        if kind not in (SAMPLE_BATCH, MULTI_AGENT_BATCH, NESTED_BATCH) or (
            kind != MULTI_AGENT_BATCH and len(parts) != 1
        ):
            raise FormatError(f"a message must contain a batch of a known kind, got {len(parts)} parts of {kind!r}")
        if len({part.label for part in parts}) < len(parts):
            raise FormatError("a message must have one part per policy, got several for one policy")
        return cls(kind, parts)


def _unit(part: Part) -> list[Any]:
    """Return the action unit of a part, which is the optional last entry of the part's description."""
    unit = part.flags.action_unit
    return [] if unit is None else [unit.describe()]


def _read_unit(described: Any) -> ActionUnit:
    return ActionUnit.from_description(described)


def _counts(columns: Sequence[Fixed], rows: Any) -> list[int]:
    counted = [column.counted for column in columns]
    if isinstance(rows, int):
        return [rows if is_counted else 1 for is_counted in counted]
    if len(rows) != sum(counted):
        raise ValueError(f"there must be {sum(counted)} row counts, one per column, got {len(rows)}")
    counts = iter(rows)
    return [next(counts) if is_counted else 1 for is_counted in counted]


def _plain(column: Fixed | Variable) -> list[Any]:
    if isinstance(column, Variable):
        return [column.name]
    return [column.name, column.dtype.str, column.row_shape, column.torch, column.form]


def _column(plain: Any) -> Fixed | Variable:
    if len(plain) == 1:
        return Variable(_string(plain[0]))
    name, dtype, row_shape, torch, form = plain
    if not all(type(extent) is int and extent >= 0 for extent in row_shape):
        raise ValueError(f"row shapes must consist of integers from 0, got {row_shape!r:.80}")
    elements = named_dtype(_string(dtype))
    if torch is not None and (itemsize := check_torch_name(torch)) != elements.itemsize:
        raise ValueError(f"torch dtype {torch!r} must have elements of {elements.itemsize} bytes, got {itemsize} bytes")
    return Fixed(_string(name), elements, tuple(row_shape), torch, _string(form))


def _plain_label(label: PolicyID) -> str | int:
    """Convert a policy id to a JSON-serializable value; NumPy integers become Python integers."""
    return label if isinstance(label, str) else int(label)


def _policy(value: Any) -> PolicyID:
    return value if type(value) is int else _string(value)


def _string(value: Any) -> str:
    if not isinstance(value, str):
        raise TypeError(f"names, labels and dtypes must be strings, got a {type(value).__name__}")
    return value


def _nested(structure: str, columns: Sequence[Fixed | Variable]) -> dict[str, Structure]:
    nested = json.loads(structure)
    if not isinstance(nested, dict):
        raise TypeError(f"nested columns must be a mapping from names, got a {type(nested).__name__}")
    leaves = [leaf for top, substructure in nested.items() for leaf in leaf_names(top, substructure)]
    if not set(leaves) <= {column.name for column in columns} or len(set(leaves)) < len(leaves):
        raise ValueError(f"nested columns must be different columns of the batch, got {leaves!r:.80}")
    return nested


def _check_tree(structure: Any, count: int) -> None:
    """Check that the structure of a nested batch consists of pairs with string names and has `count` leaves."""
    leaves, inner = 0, [structure]
    while inner:
        pairs = inner.pop()
        if not isinstance(pairs, list):
            raise TypeError(f"the structure of a nested batch must consist of lists, got a {type(pairs).__name__}")
        for name, under in pairs:
            _string(name)
            if under is None:
                leaves += 1
            else:
                inner.append(under)
    if leaves != count:
        raise ValueError(f"there must be {count} names, one per column, got {leaves}")


def freeze(nested: Mapping[str, Any]) -> str:
    """Convert the structure of nested columns to JSON text that can be compared; empty if no columns are nested.

    >>> freeze({}), freeze({"obs": {"camera": None}})
    ('', '{"obs": {"camera": null}}')
    """
    return json.dumps(dict(nested)) if nested else ""
