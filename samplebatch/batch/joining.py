"""Concatenation of flat batches, including columns that exist only in some batches."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any, Literal, TypeVar

import numpy as np

from samplebatch import names
from samplebatch.batch import bulk
from samplebatch.batch.action_unit import common_unit
from samplebatch.batch.flags import Flags, flags_of_unit
from samplebatch.batch.sequences import stored_rows
from samplebatch.column import threads
from samplebatch.column.compressed import CompressedColumn
from samplebatch.column.convert import as_column, as_ragged
from samplebatch.column.interface import Column
from samplebatch.column.ragged import RaggedColumn
from samplebatch.column.tensor import TensorColumn
from samplebatch.column.text import TextColumn
from samplebatch.column.torch_tensor import RaggedTorchColumn, TorchColumn
from samplebatch.column.varying_rows import VaryingRows
from samplebatch.errors import ColumnMismatchError, SequenceError

if TYPE_CHECKING:
    from samplebatch.batch.sample_batch import SampleBatch

B = TypeVar("B", bound="SampleBatch[Any]")

_JOINED_AS_RAGGED: tuple[set[type[Column]], ...] = (
    {RaggedColumn, TensorColumn},
    {RaggedTorchColumn, TorchColumn},
)
"""Column types that concatenate to a ragged column: rows that happened to have equal shapes were read as arrays."""

_MIN_SHARED_NBYTES = 1 << 19
"""Bytes per batch above which two threads are faster than one: they alternate after every piece."""


def join(samples: Sequence[B], empty: Callable[[], B], missing: Missing = "error") -> B:
    """Concatenate the non-empty batches.

    If all batches are empty, the result is `empty()`, as in RLlib. If one of the empty batches has a ragged column, the
    result has the columns of the first batch that has columns. A column that is ragged in an empty batch is ragged in
    the result. `missing` specifies how columns that exist only in some batches are handled. Raises ColumnMismatchError
    if a column is missing or has incompatible row shapes or dtypes. Raises SequenceError if only some batches have
    sequences, or sequence layouts differ.
    """
    parts = [sample for sample in samples if sample.count]
    if not parts:
        # Infos and states alone have rows but no steps.
        parts = [part for part in samples if not part._has_sequences and any(map(len, part._all().values()))]
    if not parts:
        candidates = [part for part in samples if part._all() and not part._has_sequences]
        has_ragged = any(isinstance(column, VaryingRows) for part in candidates for column in part._all().values())
        return candidates[0].copy() if has_ragged else empty()
    flags = _merge_flags(parts)
    groups = [part._all() for part in parts]
    order = list(groups[0])
    for group in groups:
        if list(group) != order and group.keys() != groups[0].keys():
            parts = level(parts, missing, flags.per_sequence)
            groups = [part._all() for part in parts]
            break
    first = parts[0]
    for part in parts:
        if part._nested is not first._nested and part._nested != first._nested:
            tops = {**first._nested, **part._nested}
            differing = next(top for top in tops if first._nested.get(top) != part._nested.get(top))
            raise ColumnMismatchError(
                f"nested column {differing!r} must have the same structure in all concatenated batches, got several "
                "structures"
            )
    if first._has_sequences:
        _check_states(parts, flags)
    count = sum([part.count for part in parts])
    tensors = [column.values.nbytes for column in groups[0].values() if type(column) is TensorColumn]
    nbytes = sum(tensors) * count // max(first.count, 1)
    shared = nbytes >= max(threads.WORTHWHILE, _MIN_SHARED_NBYTES * len(groups))
    columns = None
    if count and not (shared or first._has_sequences or flags.time_major):
        columns = bulk.join_small(groups, count, nbytes)
    if columns is None:
        columns = _join_columns(groups, first, shared=shared)
    if len(parts) < len(samples):
        _keep_ragged(columns, samples)
    joined = first._with(columns, flags)
    joined.count = count
    return joined


def _keep_ragged(columns: dict[str, Column], samples: Sequence[SampleBatch[Any]]) -> None:
    """Convert a column to a ragged column if the column with the same name is ragged in an empty batch."""
    for sample in samples:
        if sample.count:
            continue
        for name, column in sample._all().items():
            joined = columns.get(name)
            if (
                isinstance(column, VaryingRows)
                and isinstance(joined, TensorColumn | TorchColumn)
                and joined.values.ndim > 1
            ):
                columns[name] = as_ragged(joined, name)


def _join_columns(groups: Sequence[dict[str, Column]], first: SampleBatch[Any], *, shared: bool) -> dict[str, Column]:
    """Concatenate columns with equal names, on two threads if `shared` is true."""
    pieces = {name: [group[name] for group in groups] for name in groups[0]}
    if first._flags.time_major:
        return {
            name: _concat(columns_of_name, name, time_major=not first._is_per_sequence(name))
            for name, columns_of_name in pieces.items()
        }
    if not shared:
        return {name: _concat(columns_of_name, name) for name, columns_of_name in pieces.items()}
    return bulk.join_large(pieces, _concat)


def _concat(pieces: Sequence[Column], name: str, *, time_major: bool = False) -> Column:
    """Concatenate columns with equal names; if types are mixed, arrays become ragged and objects become text."""
    if len({*map(type, pieces)}) > 1:
        pieces = TextColumn.unite(pieces) or pieces
    kind = type(pieces[0])
    types = {*map(type, pieces)}
    if types in _JOINED_AS_RAGGED and all(isinstance(piece, VaryingRows) or piece.values.ndim > 1 for piece in pieces):
        pieces = [as_ragged(piece, name) for piece in pieces]
        kind = type(pieces[0])
    elif len(types) > 1:
        kinds = " and ".join(dict.fromkeys(piece.kind for piece in pieces))
        raise ColumnMismatchError(f"column {name!r} must be of one kind to be concatenated, got {kinds}")
    return _concat_time_major(pieces, name) if time_major else kind.concat(pieces, name)


def _check_states(parts: Sequence[SampleBatch[Any]], flags: Flags) -> None:
    """Raise an error unless each state and declared column has one row per sequence in all batches or in no batch.

    If every sequence has one row, one row per step and one row per sequence are identical layouts.
    """
    counts = [(part, len(part.column(names.SEQ_LENS))) for part in parts]
    distinct = [part for part, sequences in counts if stored_rows(part, sequences) != sequences]
    for name in parts[0].column_names:
        if not (names.is_state_in(name) or flags.declares(name)):
            continue
        if len({part._is_per_sequence(name) for part in distinct}) > 1:
            raise ColumnMismatchError(
                f"column {name!r} must have one row per sequence in all batches or in none, got both"
            )


def _merge_flags(parts: Sequence[SampleBatch[Any]]) -> Flags:
    """Merge the flags of batches after validating that the batches' layouts match."""
    first = parts[0]._flags
    # With sequences, max_seq_len is the maximum.
    if first.max_seq_len is None and len({id(part._flags) for part in parts}) == 1:
        return first
    for part in parts:
        flags = part._flags
        if part._has_sequences != parts[0]._has_sequences:
            raise SequenceError(f"all concatenated batches or none must have {names.SEQ_LENS!r}, got both")
        if flags.zero_padded != first.zero_padded or bool(flags.time_major) != bool(first.time_major):
            layouts = [
                f"zero_padded={flags.zero_padded}, time_major={bool(flags.time_major)}" for flags in (first, flags)
            ]
            raise SequenceError(
                f"concatenated batches must have equal zero_padded and time_major, got {' and '.join(layouts)}"
            )
        if flags.zero_padded and flags.max_seq_len != first.max_seq_len:
            raise SequenceError(
                f"concatenated padded batches must have equal max_seq_len, got {first.max_seq_len} and "
                f"{flags.max_seq_len}; pad them alike first"
            )
    longest = max([part._flags.max_seq_len or 0 for part in parts]) if parts[0]._has_sequences else first.max_seq_len
    updates_by_steps = [
        (part.count, part._flags.num_grad_updates) for part in parts if part._flags.num_grad_updates is not None
    ]
    steps = sum([count for count, _ in updates_by_steps])
    if steps:
        updates: float | None = sum([count * updates for count, updates in updates_by_steps]) / steps
    else:
        updates = (
            sum([updates for _, updates in updates_by_steps]) / len(updates_by_steps) if updates_by_steps else None
        )
    unit = common_unit([part._flags.action_unit for part in parts])
    declared = tuple(sorted({name for part in parts for name in part._flags.per_sequence}))
    merged = replace(first, max_seq_len=longest, num_grad_updates=updates, action_unit=unit, per_sequence=declared)
    return flags_of_unit(unit) if merged == flags_of_unit(unit) else merged


def _concat_time_major(columns: Sequence[Column], name: str) -> Column:
    heights = {len(column) for column in columns}
    if len(heights) > 1:
        raise ColumnMismatchError(
            f"time-major column {name!r} must have equal lengths T to be concatenated, got {sorted(heights)}"
        )
    if isinstance(columns[0], TorchColumn):
        import torch

        return TorchColumn(torch.cat([column.to_torch() for column in columns], 1))
    swapped = [as_column(column.to_numpy().swapaxes(0, 1), name) for column in columns]
    joined = type(swapped[0]).concat(swapped, name)
    return as_column(joined.to_numpy().swapaxes(0, 1), name)


Missing = Literal["error", "drop", "zero"]
"""Handling of columns that only some batches have."""


def level(parts: Sequence[B], missing: Missing, per_sequence: tuple[str, ...] = ()) -> list[B]:
    """Return views of the batches with equal columns: the common columns, or with `"zero"` the columns of any batch.

    Missing columns are filled with zeros.

    `per_sequence` contains the columns that any batch declares to have one row per sequence. Filled rows are None in
    object columns and empty in ragged columns.

    Raises ColumnMismatchError if `missing` is `"error"` and the columns differ; the message contains the columns that
    exist only in some batches. Raises ColumnMismatchError if `missing` is `"zero"` and batches are time-major or a
    nested column is incomplete.
    """
    groups = [part._all() for part in parts]
    models: dict[str, Column] = {}
    for group in groups:
        for name, column in group.items():
            if isinstance(column, VaryingRows) or name not in models:
                models[name] = column
    some = sorted(name for name in models if not all(name in group for group in groups))
    if missing == "error":
        raise ColumnMismatchError(
            f"concatenated batches must have the same columns, only some have {', '.join(map(repr, some))}; "
            "missing='drop' removes these, missing='zero' fills them"
        )
    if missing == "drop":
        tops = {name for part in parts for name in part if not all(name in other for other in parts)}
        return [part.drop(*(name for name in part if name in tops)) for part in parts]
    nested = {top: structure for part in parts for top, structure in part._nested.items()}
    if parts[0]._flags.time_major or any(top in group for top in nested for group in groups):
        raise ColumnMismatchError(
            f"column {some[0]!r} must be in all batches, got batches without it; columns of time-major batches and "
            "incomplete nested columns cannot be filled"
        )
    levelled = []
    for part, group in zip(parts, groups, strict=True):
        flags = replace(part._flags, per_sequence=per_sequence) if per_sequence else part._flags
        columns = {
            name: group[name] if name in group else _fill(models[name], _rows_of(part, name, flags)) for name in models
        }
        new = part._with(columns, flags)
        if nested:
            new._nested = {**nested, **part._nested}
        levelled.append(new)
    return levelled


def _rows_of(part: SampleBatch[Any], name: str, flags: Flags) -> int:
    if not part._has_sequences:
        return part.count
    sequences = len(part.column(names.SEQ_LENS))
    return sequences if names.is_state_in(name) or flags.declares(name) else stored_rows(part, sequences)


def _fill(model: Column, rows: int) -> Column:
    empty, no_positions = model.slice(0, 0), np.empty(0, np.intp)
    if isinstance(empty, CompressedColumn):
        # `spread` returns uncompressed rows, which cannot be joined to compressed rows.
        return CompressedColumn.compress(empty.spread(rows, no_positions))
    return empty.spread(rows, no_positions)
