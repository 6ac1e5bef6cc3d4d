"""ReservationSpec: which columns of a batch like a given one can be filled in place, and which cannot."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any, NamedTuple
from weakref import ref

import numpy as np
import numpy.typing as npt

from samplebatch import names
from samplebatch.batch.flags import DEFAULT, Flags
from samplebatch.batch.multi_agent import MultiAgentBatch
from samplebatch.batch.nested.batch import Batch
from samplebatch.batch.sample_batch import SampleBatch
from samplebatch.batch.tree import Structure
from samplebatch.column.interface import Column
from samplebatch.column.tensor import TensorColumn
from samplebatch.column.torch_tensor import TorchColumn
from samplebatch.errors import ColumnMismatchError, ColumnTypeError, RowIndexError
from samplebatch.names import PolicyID
from samplebatch.transport.encode import PartEncoder, take_tree
from samplebatch.transport.schema import MULTI_AGENT_BATCH, NESTED_BATCH, SAMPLE_BATCH, SCALAR, WHOLE, freeze

Like = SampleBatch | MultiAgentBatch | Batch | Mapping[str, Any]
"""A batch of the same columns, of any number of rows; or for each name a dtype, a pair of dtype and row shape, or a
dict of these."""


_UNCHANGING = (str, tuple, type, *{type(np.dtype(code)) for code in np.typecodes["All"]})


class PartSpec(NamedTuple):
    """The columns of one batch.

    Attributes
    ----------
    label
        The policy's id, if it is one of several.
    key
        The schema's entries for the columns that can be filled in place.
    given
        Names of the others.
    nested, flags
        Of the batch.
    structure
        Of a `Batch`.
    """

    label: PolicyID
    key: tuple[tuple[Any, ...], ...]
    given: tuple[str, ...]
    nested: Mapping[str, Structure]
    flags: Flags
    structure: Any


def _structure(kind: str, part: PartSpec) -> Any:
    if kind == NESTED_BATCH:
        return part.structure
    return "" if part.given else freeze(part.nested)


class SeenColumns:
    """The columns that a batch had, recognised by identity, without a look into each.

    A column keeps its dtype and the shape of its rows for as long as it lives. The batch itself may change, and is not
    kept.
    """

    __slots__ = ("_columns", "_flags", "_names", "_nested", "_references")

    def __init__(self, batch: SampleBatch) -> None:
        columns = batch._all()
        self._names = [*columns]
        self._columns = [*map(id, columns.values())]
        self._nested = batch._nested
        self._flags = batch._flags
        # Another column may get the number of one that is gone.
        self._references = [ref(column, self._forget) for column in columns.values()]

    def _forget(self, _: ref[Column]) -> None:
        self._columns = []

    def has(self, batch: SampleBatch) -> bool:
        """Tell whether a batch has the very same columns, and as many of them."""
        columns = batch._columns
        return (
            batch._window is None
            and bool(self._columns)
            and [*map(id, columns.values())] == self._columns
            and [*columns] == self._names
            and batch._nested is self._nested
            and batch._flags is self._flags
        )


class ReservationSpec:
    """The kind of a batch and the columns of its parts, from which `Producer.reserve` lays a block out.

    Attributes
    ----------
    kind, parts
        As of a schema.
    is_simple
        Whether there is nothing to be said or given beside the columns in the block.
    schema
        The parts as `Encoder.intern` takes them: without nesting if there are columns to be given.
    """

    __slots__ = ("_described", "_seen", "is_simple", "kind", "parts", "schema")

    def __init__(
        self,
        kind: str,
        parts: tuple[PartSpec, ...],
        seen: Sequence[SeenColumns] = (),
        described: dict[str, Any] | None = None,
    ) -> None:
        self._seen = seen
        self._described = described
        self.kind = kind
        self.parts = parts
        self.is_simple = kind != MULTI_AGENT_BATCH and not parts[0].given and parts[0].flags == DEFAULT
        self.schema = tuple([(part.label, part.key, _structure(kind, part)) for part in parts])

    def fits(self, like: Like) -> bool:
        """Tell quickly whether this is the spec of a batch; it may be told that it is not."""
        if isinstance(like, SampleBatch):
            return self.kind == SAMPLE_BATCH and bool(self._seen) and self._seen[0].has(like)
        if isinstance(like, MultiAgentBatch):
            own = like.policy_batches
            return (
                self.kind == MULTI_AGENT_BATCH
                and list(own) == [part.label for part in self.parts]
                and all(map(SeenColumns.has, self._seen, own.values()))
            )
        return self._described is not None and type(like) is dict and _are_same(like, self._described)

    @classmethod
    def of(cls, like: Like) -> ReservationSpec:
        """Find the columns of a batch.

        Raises
        ------
        ColumnTypeError
            If it is no batch and no mapping; or if it is a `Batch` with a value that has no rows of numbers.
        """
        if isinstance(like, SampleBatch):
            return cls(SAMPLE_BATCH, (_part("", like),), [SeenColumns(like)])
        if isinstance(like, MultiAgentBatch):
            parts = tuple(_part(policy, batch) for policy, batch in like.items())
            return cls(MULTI_AGENT_BATCH, parts, list(map(SeenColumns, like.policy_batches.values())))
        if isinstance(like, Batch):
            return cls(NESTED_BATCH, (_nested_part(like),))
        if isinstance(like, Mapping):
            return cls(SAMPLE_BATCH, (_part("", SampleBatch(_without_rows(like))),), described=dict(like))
        raise ColumnTypeError(
            f"a reservation must be like a batch or a mapping of dtypes, got a {type(like).__name__}; give it a batch"
        )


def _are_same(mine: dict[str, Any], theirs: dict[str, Any]) -> bool:
    """Tell whether two mappings of dtypes are equal, in values that cannot be changed."""
    if len(mine) != len(theirs):
        return False
    return all(
        name == other and type(value) in _UNCHANGING and value == own
        for (name, value), (other, own) in zip(mine.items(), theirs.items(), strict=True)
    )


def _part(label: PolicyID, batch: SampleBatch) -> PartSpec:
    key: list[tuple[Any, ...]] = []
    given = []
    for name, column in batch._all().items():
        if batch._is_per_sequence(name) or name == names.SEQ_LENS:
            given.append(name)
        elif isinstance(column, TensorColumn):
            key.append((name, column.values.dtype, column.values.shape[1:], None, ""))
        elif isinstance(column, TorchColumn):
            (_, dtype_name, shape), (values,) = column.dump()
            key.append((name, values.dtype, tuple(shape[1:]), dtype_name, ""))
        else:
            given.append(name)
    return PartSpec(label, tuple(key), tuple(given), batch._nested, batch._flags, None)


def _nested_part(batch: Batch) -> PartSpec:
    taken = PartEncoder(allow_pickle=False)
    structure = take_tree(batch, taken)
    if taken.variable or any(form in key[4] for key in taken.key for form in (WHOLE, SCALAR)):
        raise ColumnTypeError(
            "a Batch must have nothing but arrays and tensors with rows to be filled in place, and this one has other "
            "values; leave them out"
        )
    return PartSpec("", tuple(taken.key), (), {}, DEFAULT, structure)


def _without_rows(described: Mapping[str, Any]) -> dict[str, Any]:
    """Make columns without rows of a mapping of dtypes."""
    return {name: _empty(value) for name, value in described.items()}


def _empty(value: Any) -> Any:
    if isinstance(value, Mapping):
        return _without_rows(value)
    if isinstance(value, np.ndarray):
        return value[:0]
    dtype, row_shape = value if isinstance(value, tuple) else (value, ())
    return np.empty((0, *row_shape), dtype)


def rows_of(rows: Any, spec: ReservationSpec) -> tuple[int, ...]:
    """Take a number of rows for every part: one number, or one by the policy's id.

    Raises
    ------
    RowIndexError
        If one is negative, or missing.
    """
    if type(rows) is int and rows >= 0 and len(spec.parts) == 1:
        return (rows,)
    if isinstance(rows, Mapping):
        missing = [part.label for part in spec.parts if part.label not in rows]
        if missing or len(rows) != len(spec.parts):
            raise RowIndexError(
                f"rows must be given for the policies {[part.label for part in spec.parts]}, got {list(rows)}"
            )
        found = tuple([int(rows[part.label]) for part in spec.parts])
    else:
        found = (int(rows),) * len(spec.parts)
    if min(found, default=0) < 0:
        raise RowIndexError(f"a number of rows must not be negative, got {min(found)}")
    return found


class CompletePart(NamedTuple):
    """The columns of one batch, those included that were not filled in place.

    Attributes
    ----------
    schema
        The part as `Encoder.intern` takes it.
    flags
        Of the batch.
    variable, buffers
        The descriptions of the columns beside those in the block, and their bytes.
    """

    schema: tuple[PolicyID, tuple[Any, ...], Any]
    flags: Flags
    variable: list[Any]
    buffers: list[npt.NDArray[np.uint8]]


def complete(
    part: PartSpec, filled: Mapping[str, Column], extra: Mapping[str, Any], *, allow_pickle: bool = False
) -> CompletePart:
    """Add columns to the ones that were filled in place.

    Parameters
    ----------
    part
        The spec of these.
    filled
        These, cut to the rows in use.
    extra
        Further columns.
    allow_pickle
        Whether Python objects may be pickled.

    Raises
    ------
    ColumnMismatchError
        If a column that has to be given is missing, or one was filled in place already; names it.
    ColumnLengthError, SequenceError
        If they do not fit the rows.
    UntrustedPickleError
        If a column has to be pickled and that is not allowed; names it.
    """
    added = SampleBatch(extra)
    for name in part.given:
        if name not in added.column_names:
            raise ColumnMismatchError(
                f"column {name!r} of the batch that the reservation is like cannot be filled in place; "
                f"give it to commit: extra={{{name!r}: ...}}"
            )
    for name in added.column_names:
        if name in filled:
            raise ColumnMismatchError(f"column {name!r} lies in the block, and must be filled there, not given as well")
    taken = PartEncoder(allow_pickle=allow_pickle)
    for name, column in added._all().items():
        taken.key.append((name,))
        taken.variable.append(taken.dump(name, column))
    nested = {**part.nested, **added._nested}
    # Columns that do not fit each other are refused here, and not where they arrive.
    whole = SampleBatch._of({**filled, **added._all()}, nested, replace(part.flags, max_seq_len=_width(part.flags)))
    return CompletePart(
        (part.label, part.key + tuple(taken.key), freeze(nested)), whole._flags, taken.variable, taken.buffers
    )


def _width(flags: Flags) -> int | None:
    """Return the rows that each sequence occupies if that is fixed; otherwise the longest of them says."""
    return flags.max_seq_len if flags.zero_padded else None
