"""ShownBatch: a batch as people look at it, in terminals, notebooks, pictures and data frames."""

from __future__ import annotations

from dataclasses import make_dataclass
from keyword import iskeyword
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt

from samplebatch import names
from samplebatch.batch import summary
from samplebatch.batch.data_frame import data_frame
from samplebatch.batch.device_batch import DeviceBatch
from samplebatch.batch.episodes import ends_by_change, ends_by_flag
from samplebatch.batch.plot import Part, draw_columns
from samplebatch.errors import ColumnTypeError

if TYPE_CHECKING:
    import pandas as pd
    from matplotlib.figure import Figure


class ShownBatch(DeviceBatch):
    """Summaries, pictures and data frames: the part of `SampleBatch` that people look at."""

    def __repr__(self) -> str:
        return f"{self._title()[:-1]}: {list(self)})"

    def __str__(self) -> str:
        return summary.as_text(self._title(), summary.describe(self._all()))

    def _repr_html_(self) -> str:
        return summary.as_html(self._title(), summary.describe(self._all()))

    def _title(self) -> str:
        parts = f" in {len(self.column(names.SEQ_LENS))} sequences" if self._has_sequences else ""
        return f"SampleBatch({self.count} steps{parts})"

    def plot(self, *columns: str) -> Figure:
        """Draw columns over time, an axis each, with a line where an episode ends.

        Rows of a few numbers have a line for each, larger ones their mean. Long batches are drawn by evenly spaced
        steps.

        Parameters
        ----------
        *columns
            The columns, by dotted name; by default all of numbers, ids aside, but no more than twelve.

        Returns
        -------
        matplotlib.figure.Figure
            The picture, which notebooks show and `savefig` writes.

        Raises
        ------
        MissingExtraError
            If matplotlib is not installed.
        ColumnNotFoundError
            If a column is not there; lists the near names.
        ColumnTypeError
            If one is not of numbers; names it.

        Examples
        --------
        >>> from samplebatch import SampleBatch
        >>> figure = SampleBatch(rewards=[0.0, 1.0, 0.5], eps_id=[0, 0, 1]).plot("rewards")
        >>> [axes.get_ylabel() for axes in figure.axes]
        ['rewards']
        """
        for name in columns:
            self.column(name)
        rows = self._rowwise()
        part = Part("", {name: rows[name] for name in columns or rows}, self._ends())
        return draw_columns([part], chosen=bool(columns))

    def _ends(self) -> npt.NDArray[Any]:
        """Return where episodes end: the steps after their last ones."""
        rows = self._rowwise()
        if names.EPS_ID in rows:
            ends = ends_by_change(np.asarray(rows[names.EPS_ID].to_numpy()))
        elif names.DONES in self or names.TERMINATEDS in rows or names.TRUNCATEDS in rows:
            flags = [rows[n].to_numpy() for n in (names.DONES, names.TERMINATEDS, names.TRUNCATEDS) if n in rows]
            ends = ends_by_flag(np.logical_or.reduce(flags))
        else:
            ends = []
        return np.asarray(ends, np.intp)

    def to_pandas(self) -> pd.DataFrame:
        """Return a data frame with a row per step and a column per dotted name.

        Columns of numbers share their memory. Where rows are arrays, a cell holds one; states of sequences stand with
        every step of theirs.

        Raises
        ------
        MissingExtraError
            If pandas is not installed.

        Examples
        --------
        >>> from samplebatch import SampleBatch
        >>> SampleBatch(obs=[[1, 2], [3, 4]], rewards=[0.5, 1.0]).to_pandas()
              obs  rewards
        0  [1, 2]      0.5
        1  [3, 4]      1.0
        """
        return data_frame(self._rowwise())

    def __array__(self, dtype: Any = None, copy: bool | None = None) -> npt.NDArray[Any]:
        """Return the steps as an array of records, which `pandas.DataFrame(batch)` asks for; shape (n,), of objects.

        Raises
        ------
        ColumnTypeError
            If the name of a column cannot be that of a field; names it.
        """
        columns = list(self._rowwise())
        for name in self:
            if not name.isidentifier() or iskeyword(name):
                raise ColumnTypeError(f"column {name!r} must have a name that fields can have; call to_pandas()")
        record = make_dataclass("Record", list(self)) if columns else None
        made = [] if record is None else [record(**row) for row in self.rows()]
        return np.fromiter(made, object, len(made))
