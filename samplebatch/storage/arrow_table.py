"""Tables in Arrow IPC files, viewed where they lie."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import cached_property
from typing import Any

import pyarrow as pa

from samplebatch.batch.arrow import Parts, make_reader, metadata_of
from samplebatch.batch.arrow_plan import ViewPlan
from samplebatch.column.arrow_bodies import ArrowLayout
from samplebatch.column.memory_bound import MemoryBound
from samplebatch.column.recent import Recent
from samplebatch.storage.table_file import TableFile, name_file_damage, places_of

_MAX_SCHEMA_NBYTES = 1 << 16


class _FileSchema:
    """A schema of Arrow files with its metadata and plans, kept for the next file that has it."""

    def __init__(self, schema: pa.Schema, *, is_native: bool) -> None:
        self.schema = schema
        self._is_native = is_native
        self._plans = Recent[tuple[str, ...], ViewPlan | None](limit=8)

    @cached_property
    def about(self) -> dict[str, Any] | None:
        return metadata_of(self.schema)

    def plan(self, names: Sequence[str], about: Mapping[str, Any]) -> ViewPlan | None:
        """Return the plan by which columns of a flat batch are viewed; None if there is none."""

        def make() -> ViewPlan | None:
            if not self._is_native:
                return None
            chosen = pa.schema([self.schema.field(name) for name in names])
            return ViewPlan.make(self.schema, make_reader(chosen, dict(about)))

        return self._plans.get(tuple(names), make)


_schemas = Recent[bytes, _FileSchema](limit=32)
"""The schemas that were seen last, by their bytes in the files' footers."""


class ArrowTable(TableFile):
    """A table in an Arrow IPC file, viewed where it lies unless its buffers are compressed.

    Parameters
    ----------
    data, name
        As of every file.
    layout
        Layout of the file.
    """

    form = "Arrow"

    def __init__(self, data: pa.Buffer, name: str, layout: ArrowLayout) -> None:
        super().__init__(data, name)
        self._layout = layout
        self.num_groups = layout.num_batches
        remembered = len(layout.schema) <= _MAX_SCHEMA_NBYTES
        self._known = _schemas.get(layout.schema, self._read_schema) if remembered else self._read_schema()
        self.schema = self._known.schema

    def _read_schema(self) -> _FileSchema:
        return _FileSchema(self._file.schema, is_native=self._layout.is_native())

    @cached_property
    def _file(self) -> Any:
        with name_file_damage(self.name, self.form):
            return pa.ipc.open_file(self.data)

    @cached_property
    def about(self) -> dict[str, Any] | None:
        """The metadata of a batch or buffer, None if there is none; `metadata_of` says how it may fail."""
        return self._known.about

    @cached_property
    def group_rows(self) -> list[int]:
        """Rows of each record batch."""
        with name_file_damage(self.name, self.form):
            return self._layout.rows()

    def view(self, names: Sequence[str]) -> Parts | None:
        """View columns of a flat batch where they lie, without a table; None if they must be read as one."""
        about = self.about
        if about is None or about.get("type") != "SampleBatch" or self.num_groups != 1:
            return None
        plan, body = self._known.plan(names, about), self._layout.body(0)
        return None if plan is None or body is None else plan.view(self.data, body)

    def read(self, groups: Sequence[int], names: Sequence[str], bound: MemoryBound) -> pa.Table:
        """Read columns of some record batches; those that are not compressed are viewed."""
        with name_file_damage(self.name, self.form):
            file, places = self._file, places_of(self.schema, names)
            if self._layout.decompressed_nbytes and len(places) < len(self.schema):
                # What is compressed and not asked for stays so. With this option Arrow copies what is not compressed.
                file = pa.ipc.open_file(self.data, options=pa.ipc.IpcReadOptions(included_fields=places))
            table = pa.Table.from_batches([file.get_batch(i) for i in groups], file.schema)
            if len(names) < len(table.schema):
                table = table.select(places)
            # What becomes objects is validated once it is known how much that is.
            table.validate()
            return table
