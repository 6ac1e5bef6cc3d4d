"""ShownRows: the rows of a buffer as people and other tools look at them."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from samplebatch.batch import summary
from samplebatch.batch.nested.batch import Batch
from samplebatch.batch.nested.conversions import as_sample_batch
from samplebatch.batch.sample_batch import SampleBatch
from samplebatch.buffer.rows import Rows

if TYPE_CHECKING:
    import pandas as pd
    import pyarrow as pa

_HEADINGS = (*summary.HEADINGS, "memory")
_MAX_OBJECTS = 100
"""Rows of columns without an array that are looked at: each of them is an object."""


class ShownRows(Rows):
    """Summaries of a `ReplayBuffer`, and its rows as tables of other tools."""

    def __repr__(self) -> str:
        return summary.as_text(self._title(), self._lines(), _HEADINGS) if len(self) else self._title()

    def _repr_html_(self) -> str:
        return summary.as_html(self._title(), self._lines(), _HEADINGS)

    def _title(self) -> str:
        rings = self._table.rings.n if self._ring is None else 1
        parts = f" in {rings} rings" if rings > 1 else ""
        size = summary.show_bytes(self.nbytes * self._share())
        return f"{type(self).__name__}({len(self)} of {self.maxsize} steps{parts}, {size})"

    def _share(self) -> float:
        """Return which part of the table's slots are this buffer's own."""
        return self.maxsize / max(self._table.rings.capacity, 1)

    def _lines(self) -> list[summary.Line]:
        """Summarise the columns by rows that are there, in time order."""
        with self._table.lock:
            slots = self._table.rings.chronological(self._ring)
            share = self._share()
            lines = []
            for path, store in self._table.columns.leaves():
                chosen = summary.rows_to_read(len(slots), store.row_shape or ())
                if store.dtype is None:
                    chosen = chosen[:_MAX_OBJECTS]
                kept = store.to_column(slots[chosen])
                lines.append(summary.describe_column(".".join(path), kept, len(slots), int(store.nbytes * share)))
        return lines

    def to_sample_batch(self) -> SampleBatch:
        """Copy all rows into a flat batch, in time order, ring by ring; names are kept.

        Examples
        --------
        >>> from samplebatch import ReplayBuffer
        >>> buf = ReplayBuffer(4)
        >>> added = buf.add(Batch(obs=7, act=0, rew=1.0, terminated=False, truncated=False))
        >>> buf.to_sample_batch()["obs"]
        array([7])
        """
        rows: Batch = self[:] if len(self) else Batch()
        return as_sample_batch(rows)

    def to_arrow(self) -> pa.Table:
        """Return an Arrow table of all rows, in time order, ring by ring: a column per leaf, under its dotted name."""
        return self.to_sample_batch().to_arrow()

    def to_pandas(self) -> pd.DataFrame:
        """Return a data frame of all rows, in time order, ring by ring; see `SampleBatch.to_pandas`."""
        return self.to_sample_batch().to_pandas()

    def __arrow_c_schema__(self) -> Any:
        return self.to_arrow().schema.__arrow_c_schema__()

    def __arrow_c_stream__(self, requested_schema: Any = None) -> Any:
        return self.to_arrow().__arrow_c_stream__(requested_schema)
