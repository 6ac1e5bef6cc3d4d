"""Steps: what environments did, in the order in which they did it, made into a batch environment by environment."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import numpy.typing as npt

from samplebatch import names
from samplebatch.batch.episodes import by_stream
from samplebatch.batch.sample_batch import SampleBatch
from samplebatch.column import memory
from samplebatch.env.infos import Infos, Rows, empty_infos, rows_of
from samplebatch.env.spaces import Columns, Layout, Leaf
from samplebatch.rollout.episode_count import Counted, EpisodeCount
from samplebatch.rollout.rows import GrowingRows

_ORDER = (
    names.OBS,
    names.NEXT_OBS,
    names.ACTIONS,
    names.REWARDS,
    names.TERMINATEDS,
    names.TRUNCATEDS,
    names.INFOS,
    names.EPS_ID,
    names.ENV_ID,
    names.T,
    names.AGENT_INDEX,
    names.UNROLL_ID,
)
"""The order of the columns that all batches have; the others follow."""


class Steps:
    """Steps of n environments.

    Parameters
    ----------
    num_envs
        How many environments there are.
    layouts
        How the leaves of nested columns are put together, by column.

    Attributes
    ----------
    kept
        Steps since the last `take`, those left out not counted.

    Examples
    --------
    >>> steps, zero, no = Steps(2), np.zeros(2), np.zeros(2, bool)
    >>> for turn in range(3):
    ...     steps.append({"act": np.full(2, turn), "rewards": zero, "terminateds": no, "truncateds": no}, {})
    >>> batch, returns, lens = steps.take()
    >>> batch["env_id"].tolist(), batch["act"].tolist(), batch["t"].tolist()
    ([0, 0, 0, 1, 1, 1], [0, 1, 2, 0, 1, 2], [0, 1, 2, 0, 1, 2])
    """

    def __init__(self, num_envs: int, layouts: Mapping[str, Layout] | None = None) -> None:
        self._all = np.arange(num_envs)
        self._layouts = layouts or {}
        self._rows = GrowingRows()
        self._count = EpisodeCount(num_envs)
        self._start()

    def _start(self) -> None:
        self.kept = 0
        self._rows.clear()
        self._counted_rows = 0
        self._envs: list[Rows] = []
        self._drops: list[Rows] = []
        self._infos: list[tuple[int, list[dict[str, Any]]]] = []
        self._portions: list[tuple[Rows, Counted]] = []

    def reserve(self, rows: int) -> None:
        """Make room for so many steps."""
        self._rows.reserve(rows)

    def append(
        self,
        values: Columns,
        infos: Infos,
        envs: Rows | None = None,
        drop: Rows | None = None,
    ) -> None:
        """Take down a step of some environments.

        Parameters
        ----------
        values
            Arrays of shape (k, ...) by column, `rewards` (float64), `terminateds` and `truncateds` (bool) among them.
        infos
            What the environments said.
        envs
            The environments that made it, shape (k,); None for all.
        drop
            Those of the k rows that do not count; None for none.

        Raises
        ------
        ColumnMismatchError, ColumnLengthError
            As `GrowingRows.append` does.
        """
        rows, count = self._rows, len(values[names.REWARDS])
        start = rows.rows
        rows.append(values, count)
        self.kept += count
        self._envs.append(self._all if envs is None else envs)
        if drop is not None:
            self._drops.append(drop + start)
            self.kept -= len(drop)
        if infos:
            self._infos.append((start, rows_of(infos, count)))

    def extend(
        self,
        parts: Mapping[str, Sequence[Leaf]],
        infos: Mapping[int, Infos],
        drop: Rows | None = None,
        later: Mapping[str, tuple[Rows, Leaf]] | None = None,
    ) -> None:
        """Take down several steps of all environments, as `append` does it one by one.

        Parameters
        ----------
        parts
            By column, the arrays of each step.
        infos
            What the environments said, by step.
        drop
            Those rows of all of them, one step after the other, that do not count; None for none.
        later
            By column, rows of all of them, and what to write there in the end.

        Raises
        ------
        ColumnMismatchError, ColumnLengthError
            As `GrowingRows.extend` does.
        """
        start, count = self._rows.rows, len(self._all)
        self._rows.extend(parts, count)
        rows = self._rows.rows - start
        for name, (where, values) in (later or {}).items():
            self._rows.columns()[name][where + start] = values
        self._envs.append(np.resize(self._all, rows))
        self.kept += rows
        if drop is not None:
            self._drops.append(drop + start)
            self.kept -= len(drop)
        self._infos += [(start + place * count, rows_of(said, count)) for place, said in infos.items()]

    def count(self) -> tuple[Rows, npt.NDArray[np.int64]]:
        """Count the steps since the last count.

        Returns
        -------
        envs, lens
            The environments whose episodes ended with these steps, and the lengths of these episodes.
        """
        start, stop = self._counted_rows, self._rows.rows
        self._counted_rows = stop
        columns = self._rows.columns()
        if start == stop:
            return self._all[:0], self._all[:0]
        env_id = _joined(self._envs, np.intp)
        rows = None
        if self._drops:
            keep = np.ones(stop - start, np.bool_)
            keep[np.concatenate(self._drops) - start] = False
            rows = keep.nonzero()[0]
        self._envs, self._drops = [], []
        done = columns[names.TERMINATEDS][start:] | columns[names.TRUNCATEDS][start:]
        counted = self._count.add(env_id, done, columns[names.REWARDS][start:], rows)
        self._portions.append((counted.rows + start, counted))
        return counted.ended, counted.lens

    def begin(self) -> None:
        """Count the steps, and start an episode in every environment."""
        self.count()
        self._count.begin()

    def take(
        self, *, batch: bool = True, **constants: int
    ) -> tuple[SampleBatch | None, npt.NDArray[Any], npt.NDArray[Any]]:
        """Start anew, and return the steps, those of an environment together, and the episodes that ended.

        Parameters
        ----------
        batch
            Whether to make a batch of the steps.
        **constants
            Further columns, of one number each.

        Returns
        -------
        batch
            The steps, if asked for.
        returns, lens
            Rewards and steps of each episode that ended, in the order in which they did.
        """
        self.count()
        portions = [counted for _, counted in self._portions]
        returns = _joined([counted.returns for counted in portions], np.float64)
        lens = _joined([counted.lens for counted in portions], np.int64)
        made = self._batch(constants) if batch else None
        self._start()
        return made, returns, lens

    def _batch(self, constants: Mapping[str, int]) -> SampleBatch:
        rows = _joined([rows for rows, _ in self._portions], np.intp)
        portions = [counted for _, counted in self._portions]
        env_id, eps_id, t = (
            _joined([counted[place] for counted in portions], np.int64)
            for place in map(Counted._fields.index, ("env_id", "eps_id", "t"))
        )
        if len(portions) > 1:
            order = by_stream(env_id)
            rows, env_id, eps_id, t = rows[order], env_id[order], eps_id[order], t[order]
        data = {name: _gathered(column, rows) for name, column in self._rows.columns().items()}
        whole = self._nested(data)
        whole[names.INFOS] = self._infos_of(rows)
        whole |= {names.EPS_ID: eps_id, names.ENV_ID: env_id, names.T: t}
        whole |= {name: np.full(len(rows), number) for name, number in constants.items()}
        return SampleBatch({name: whole[name] for name in (*_ORDER, *whole) if name in whole})

    def _infos_of(self, rows: Rows) -> npt.NDArray[Any]:
        if not self._infos:
            return empty_infos(len(rows))
        infos = empty_infos(self._rows.rows)
        for start, said in self._infos:
            infos[start : start + len(said)] = said
        return infos[rows]

    def _nested(self, data: Columns) -> dict[str, Any]:
        """Put the leaves of nested columns together."""
        whole: dict[str, Any] = {}
        for name, values in data.items():
            top, dot, path = name.partition(".")
            if not dot:
                whole[name] = values
            elif top not in self._layouts:
                *folders, leaf = path.split(".")
                folder = whole.setdefault(top, {})
                for key in folders:
                    folder = folder.setdefault(key, {})
                folder[leaf] = values
            elif top not in whole:
                layout = self._layouts[top]
                whole[top] = layout.nest([data[f"{top}.{leaf}"] for leaf in layout.names])
        return whole


def _joined(arrays: list[npt.NDArray[Any]], dtype: Any) -> npt.NDArray[Any]:
    if len(arrays) == 1:
        return arrays[0]
    return np.concatenate(arrays) if arrays else np.empty(0, dtype)


def _gathered(column: Leaf, rows: Rows) -> Leaf:
    """Gather rows into memory of their own."""
    if column.dtype.hasobject:
        return column[rows]
    # Out of bounds cannot happen here; NumPy gathers by way of a copy if it must check.
    return column.take(rows, 0, memory.empty((len(rows), *column.shape[1:]), column.dtype), "clip")
