"""EpisodeBatch: rows that belong to episodes, split where these end and cut into sequences."""

from __future__ import annotations

from dataclasses import replace
from itertools import pairwise
from typing import Any, Self

import numpy as np
import numpy.typing as npt

from samplebatch import names
from samplebatch.arguments import whole
from samplebatch.batch import sequences
from samplebatch.batch.episodes import ends_by_change, ends_by_flag, run_starts
from samplebatch.batch.sequence_batch import SequenceBatch
from samplebatch.column.tensor import TensorColumn
from samplebatch.errors import RowIndexError, SequenceError

_FLAG_COLUMNS = frozenset({names.DONES, names.TERMINATEDS, names.TRUNCATEDS})

_STREAM_COLUMNS = (names.EPS_ID, names.AGENT_INDEX, names.ENV_ID, names.UNROLL_ID)
"""Columns that change where one sequence cannot go on in the next row."""


class EpisodeBatch(SequenceBatch):
    """Rows that belong to episodes: the part of `SampleBatch` that sees to where episodes end."""

    def _derive(self, name: str) -> Any:
        if name != names.DONES:
            return None
        known = [self[flag] for flag in (names.TERMINATEDS, names.TRUNCATEDS) if flag in self]
        if len(known) < 2:
            return known[0] if known else None
        terminated, truncated = known if type(known[0]) is type(known[1]) else map(np.asarray, known)
        return (terminated != 0) | (truncated != 0)

    def is_terminated_or_truncated(self) -> bool:
        """Tell whether the last step ends its episode.

        Raises
        ------
        RowIndexError
            If there are no steps.
        ColumnNotFoundError
            If the batch has no column that says so.
        """
        if not self.count:
            raise RowIndexError("a batch without steps has no last one")
        return bool(self._done_flags()[-1])

    def is_single_trajectory(self) -> bool:
        """Tell whether no step but the last ends an episode.

        Raises
        ------
        ColumnNotFoundError
            If the batch has no column that says so.
        """
        return not self._done_flags()[:-1].any()

    def _done_flags(self) -> npt.NDArray[Any]:
        """Return one flag per step, padding left out: whether the step ends its episode."""
        batch = self._unpad() if self._flags.zero_padded else self
        return np.asarray(batch[names.DONES])

    def split_by_episode(self, key: str | None = None) -> list[Self]:
        """Split into one view per episode, the last one even if it has not ended.

        Parameters
        ----------
        key
            Column to split by: after each true flag for `dones`, `terminateds` and `truncateds`, else wherever the
            value changes. By default `eps_id`, or `dones` where there is none.

        Raises
        ------
        ColumnNotFoundError
            If the column is not there.

        Examples
        --------
        >>> from samplebatch import SampleBatch
        >>> [part["a"].tolist() for part in SampleBatch(a=[1, 2, 3], eps_id=[0, 0, 1]).split_by_episode()]
        [[1, 2], [3]]
        >>> [part["a"].tolist() for part in SampleBatch(a=[1, 2, 3, 4, 5], dones=[0, 0, 1, 0, 0]).split_by_episode()]
        [[1, 2, 3], [4, 5]]
        """
        if key is None:
            key = names.EPS_ID if names.EPS_ID in self else names.DONES
        batch = self._unpad() if self._flags.zero_padded else self
        values = np.asarray(batch[key])
        ends = ends_by_flag(values) if key in _FLAG_COLUMNS else ends_by_change(values)
        part = self.slice if self._has_sequences else self._view
        return [part(start, stop) for start, stop in pairwise([0, *ends])]

    def to_sequences(self, max_seq_len: int) -> Self:
        """View the steps as sequences for a recurrent model, each with the state that it begins with.

        A sequence ends where `eps_id`, `agent_index`, `env_id` or `unroll_id` change and where `t` does not go on by 1,
        in as far as these columns are there; without `eps_id` also after a step that ends its episode. The rows of each
        agent must lie together, as collectors hand them out. Of `state_in_*`, a row for each step, the first row of
        each sequence is kept; all other columns are shared. `right_zero_pad` pads the sequences.

        Parameters
        ----------
        max_seq_len
            Steps in a sequence at the most; longer runs of steps are cut.

        Returns
        -------
        SampleBatch
            A batch with `seq_lens`; of a batch without steps, a shallow copy.

        Raises
        ------
        ArgumentError
            If `max_seq_len` is no whole number from 1 on.
        SequenceError
            If the batch has sequences already.

        Examples
        --------
        >>> from samplebatch import SampleBatch
        >>> steps = SampleBatch(a=[1, 2, 3, 4, 5], eps_id=[7, 7, 7, 8, 8], state_in_0=[0.0, 0.1, 0.2, 0.0, 0.3])
        >>> recurrent = steps.to_sequences(max_seq_len=2)
        >>> recurrent["seq_lens"].tolist(), recurrent["state_in_0"].tolist()
        ([2, 1, 2], [0.0, 0.2, 0.0])
        >>> recurrent.right_zero_pad(2)["a"].tolist()
        [1, 2, 3, 0, 4, 5]
        """
        whole("max_seq_len", max_seq_len, 1)
        if self._has_sequences:
            raise SequenceError("to_sequences needs a row for each step, and the batch has sequences already")
        if not self.count:
            return self.copy(shallow=True)
        lengths = sequences.chop(self._stream_starts(), self.count, max_seq_len)
        firsts = lengths.cumsum() - lengths
        columns = {
            name: column.take(firsts) if names.is_state_in(name) else column for name, column in self._all().items()
        }
        columns[names.SEQ_LENS] = TensorColumn(lengths.astype(np.int32))
        new = self._with(columns, replace(self._flags, max_seq_len=None))
        new._count_rows()
        return new

    def _stream_starts(self) -> npt.NDArray[np.intp]:
        """Return the rows that do not go on with the steps of the row before, shape (k,)."""
        keys = [np.asarray(self[name]) for name in _STREAM_COLUMNS if name in self]
        if names.T in self:
            keys.append(np.asarray(self[names.T]) - np.arange(self.count))
        if names.EPS_ID not in self:
            done = self.get(names.DONES)
            if done is not None:
                keys.append(np.append(0, np.cumsum(np.asarray(done) != 0)[:-1]))
        return run_starts(*keys) if keys else np.zeros(1, np.intp)
