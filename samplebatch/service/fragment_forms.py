"""Fragments of a form that came before: from batches to record batches and back, without Arrow looking at each."""

from __future__ import annotations

from typing import Any, Final, NamedTuple

import pyarrow as pa

from samplebatch.batch.flags import Flags
from samplebatch.batch.multi_agent import MultiAgentBatch
from samplebatch.batch.sample_batch import SampleBatch
from samplebatch.batch.tree import Structure
from samplebatch.column.rows_layout import RowsLayout
from samplebatch.column.tensor import TensorColumn
from samplebatch.service.fragments import as_record_batch, fragment_rows
from samplebatch.service.samples import read_fragment, with_batch_text

_MAX_FORMS: Final = 8
"""Forms of fragments that a client remembers."""


class _Form(NamedTuple):
    """A form of fragments: batches with these parts beside their columns have record batches of this layout."""

    nested: dict[str, Structure]
    flags: Flags
    layout: RowsLayout


class FragmentEncoder:
    """Encoder of a client's fragments, which are much like the ones before. Threads may share one.

    Examples
    --------
    >>> encoder = FragmentEncoder()
    >>> for rows in (2, 3):
    ...     print(encoder.encode(SampleBatch(obs=list(range(rows)))).to_pydict())
    {'obs': [0, 1]}
    {'obs': [0, 1, 2]}
    """

    def __init__(self) -> None:
        self._forms: tuple[_Form, ...] = ()
        """The newest one first."""

    def encode(self, batch: Any, priorities: Any = None) -> pa.RecordBatch:
        """View a batch as a fragment; parameters as of `fragment_rows`.

        Raises
        ------
        SampleBatchError
            As `fragment_rows` and `SampleBatch.to_arrow` do.
        """
        rows = fragment_rows(batch, priorities)
        if isinstance(rows, MultiAgentBatch):
            return as_record_batch(rows.to_arrow())
        columns = rows._all()
        if not all(type(column) is TensorColumn for column in columns.values()):
            return as_record_batch(rows.to_arrow())
        arrays = {name: column.to_numpy() for name, column in columns.items()}
        for nested, flags, layout in self._forms:
            if layout.fits(arrays) and rows._flags == flags and rows._nested == nested:
                return layout.write(arrays)
        made = as_record_batch(rows.to_arrow())
        found = RowsLayout.find(made, columns)
        if found is not None:
            self._forms = (_Form(dict(rows._nested), rows._flags, found), *self._forms[: _MAX_FORMS - 1])
        return made


class FragmentDecoder:
    """Decoder of the fragments of one stream, which have one schema, for the service.

    The first one is read by Arrow and checked. Of the others, only the sizes of buffers are checked.

    Examples
    --------
    >>> encoder, decoder = FragmentEncoder(), FragmentDecoder()
    >>> for rows in (2, 3):
    ...     print(decoder.decode(encoder.encode(SampleBatch(obs=list(range(rows)))), None)["obs"])
    [0 1]
    [0 1 2]
    """

    def __init__(self) -> None:
        self._form: _Form | None = None

    def decode(self, rows: pa.RecordBatch, text: str | None) -> SampleBatch | MultiAgentBatch:
        """View a record batch as a fragment.

        Parameters
        ----------
        rows
            The record batch.
        text
            The description of the batch, where it is another than in the schema; None where it is the same.

        Raises
        ------
        SampleBatchError
            As `read_fragment` does.
        pyarrow.ArrowException
            If the buffers do not fit the schema.
        """
        form = self._form
        if form is not None and text is None:
            arrays = form.layout.read(rows)
            if arrays is not None:
                columns: dict[str, Any] = {name: TensorColumn(values) for name, values in arrays.items()}
                return SampleBatch._of(columns, dict(form.nested), form.flags)
        rows.validate()
        found = read_fragment(with_batch_text(rows, text))
        if text is None and isinstance(found, SampleBatch):
            layout = RowsLayout.find(rows, found._all())
            self._form = None if layout is None else _Form(dict(found._nested), found._flags, layout)
        return found
