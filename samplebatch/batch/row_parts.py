"""RowParts: the methods of a batch that divide its rows, repeat them or put them together."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import TYPE_CHECKING, Any, Self, overload

import numpy as np
import numpy.typing as npt

from samplebatch.arguments import whole
from samplebatch.batch import delivery
from samplebatch.errors import ArgumentError

if TYPE_CHECKING:
    import torch

    from samplebatch.batch.delivery import Device, Floats
    from samplebatch.batch.sample_batch import SampleBatch
    from samplebatch.tokens import Groups, PackedBatch, Parts

Lengths = str | npt.ArrayLike | None
"""Name of a column that has or counts the tokens, or a number per row; None for the lengths of the ragged columns."""


class RowParts:
    """Minibatches, packed bins, parts for several learners and groups: a batch's rows, divided.

    The functions of `samplebatch.tokens` do the work; their pages have every argument and error.
    """

    @overload
    def minibatches(
        self,
        size: int | None = None,
        epochs: int = 1,
        shuffle: bool = True,
        rng: np.random.Generator | int | None = None,
        *,
        max_tokens: int | None = None,
        lengths: Lengths = None,
        device: None = None,
        floats: Floats | None = None,
    ) -> Iterator[Self]: ...
    @overload
    def minibatches(
        self,
        size: int | None = None,
        epochs: int = 1,
        shuffle: bool = True,
        rng: np.random.Generator | int | None = None,
        *,
        max_tokens: int | None = None,
        lengths: Lengths = None,
        device: Device,
        floats: Floats | None = None,
        prefetch: int = 0,
    ) -> Iterator[SampleBatch[torch.Tensor]]: ...
    def minibatches(
        self,
        size: int | None = None,
        epochs: int = 1,
        shuffle: bool = True,
        rng: np.random.Generator | int | None = None,
        *,
        max_tokens: int | None = None,
        lengths: Lengths = None,
        device: Device | None = None,
        floats: Floats | None = None,
        prefetch: int = 0,
    ) -> Any:
        """Yield the batch in parts of `size` steps, every step once an epoch; the last part of an epoch may be smaller.

        Where there are sequences, parts consist of whole ones: as many as fit in `size` steps, but at least one.

        Parameters
        ----------
        size, epochs
            Steps per part, and passes over the batch.
        shuffle
            Whether each pass has a random order of its own. If not, parts are views.
        rng
            A generator or a seed; by default, fresh entropy.
        max_tokens
            The most tokens in a part, instead of `size`: parts have as many rows as fit.
        lengths
            The name of a column with or of tokens, or a number per row; by default the lengths of the ragged columns.
        device, floats
            The device of tensors and the dtype of floating-point columns; None for columns as they are.
        prefetch
            How many parts to make ahead. On a GPU they are copied from page-locked memory, on a stream of their own,
            while the learner computes.

        Raises
        ------
        ArgumentError, DeviceError
            If not exactly one of `size` and `max_tokens` is given, a number is too small, a row has more than
            `max_tokens` tokens, `floats` is no floating-point dtype, parts are made ahead for no device, or torch
            cannot use it.

        Examples
        --------
        >>> from samplebatch import SampleBatch
        >>> [len(part) for part in SampleBatch(a=[1, 2, 3, 4, 5]).minibatches(2, epochs=2, rng=0)]
        [2, 2, 1, 2, 2, 1]
        >>> rollouts = SampleBatch(ids=[[1, 2, 3], [4], [5, 6], [7]])
        >>> [part["ids"].lengths.tolist() for part in rollouts.minibatches(max_tokens=4, shuffle=False)]
        [[3, 1], [2, 1]]
        """
        batch: Any = self
        if (size is None) == (max_tokens is None):
            raise ArgumentError(f"one of size and max_tokens must be given, got {'none' if size is None else 'both'}")
        if max_tokens is None:
            if lengths is not None:
                raise ArgumentError("lengths must be given with max_tokens, got lengths alone")
            size = whole("size", size, 1)
        epochs = whole("epochs", epochs)
        deliver = delivery.Delivery(device, floats, prefetch)
        parts: Iterator[Any]
        if max_tokens is None:
            generator = np.random.default_rng(rng) if shuffle else None
            parts = (part for _ in range(epochs) for part in batch._epoch(size, generator))
        else:
            from samplebatch.tokens import token_minibatches

            parts = token_minibatches(batch, max_tokens, lengths, epochs, shuffle, rng)
        return deliver.each(parts, type(batch)._to)

    def pack(self, max_tokens: int, lengths: Lengths = None) -> PackedBatch[Any]:
        """Pack rows into as few bins of at most `max_tokens` tokens as first-fit decreasing finds.

        See `samplebatch.tokens.pack`.

        >>> from samplebatch import SampleBatch
        >>> SampleBatch(ids=[[1, 2, 3], [4], [5, 6]]).pack(max_tokens=4)
        PackedBatch(3 rows in 2 bins, 75.0% full)
        """
        from samplebatch.tokens import pack

        batch: Any = self
        return pack(batch, max_tokens, lengths)

    def balance(self, k: int, weights: Lengths = None, *, equal_size: bool = False) -> Parts[Any]:
        """Distribute rows over `k` parts of nearly equal weight, by default of tokens; the result joins them again.

        See `samplebatch.tokens.balance`.

        >>> from samplebatch import SampleBatch
        >>> parts = SampleBatch(ids=[[1, 2, 3], [4], [5, 6]]).balance(2)
        >>> parts.totals.tolist(), parts.imbalance
        ([3.0, 3.0], 1.0)
        """
        from samplebatch.tokens import balance

        batch: Any = self
        return balance(batch, k, weights, equal_size=equal_size)

    def chunk(self, n: int, *, pad_to_divisor: bool = False) -> Parts[Any]:
        """Split into `n` consecutive parts, as equal as possible, or equal by repeating rows; the result joins them.

        See `samplebatch.tokens.chunk`.

        >>> from samplebatch import SampleBatch
        >>> parts = SampleBatch(a=[1, 2, 3]).chunk(2, pad_to_divisor=True)
        >>> [part["a"].tolist() for part in parts], parts.join()["a"].tolist()
        ([[1, 2], [3, 1]], [1, 2, 3])
        """
        from samplebatch.tokens import chunk

        batch: Any = self
        return chunk(batch, n, pad_to_divisor=pad_to_divisor)

    def group_by(self, key: str | npt.ArrayLike) -> Groups[Any]:
        """Group rows by a column of numbers or strings, for figures of each group.

        See `samplebatch.tokens.group_by`.

        >>> from samplebatch import SampleBatch
        >>> groups = SampleBatch(uid=[7, 7, 8, 8], rewards=[0.0, 1.0, 3.0, 5.0]).group_by("uid")
        >>> groups.mean("rewards"), groups.normalize("rewards", scale=False)
        (array([0.5, 4. ]), array([-0.5,  0.5, -1. ,  1. ]))
        """
        from samplebatch.tokens import group_by

        batch: Any = self
        return group_by(batch, key)

    def repeat(self, k: int, *, interleave: bool = True) -> Self:
        """Repeat every row `k` times, one copy after the other, or in blocks of all rows.

        >>> from samplebatch import SampleBatch
        >>> SampleBatch(uid=[7, 8]).repeat(2)["uid"].tolist()
        [7, 7, 8, 8]
        """
        from samplebatch.tokens import repeat

        batch: Any = self
        repeated: Self = repeat(batch, k, interleave=interleave)
        return repeated

    def union(self, other: SampleBatch[Any] | Mapping[str, Any]) -> Self:
        """Return a batch with the columns of both, over the same memory; columns that both have must be equal.

        Raises ColumnLengthError if `other` has another number of rows, ColumnMismatchError if a common column differs.

        >>> from samplebatch import SampleBatch
        >>> list(SampleBatch(ids=[1, 2]).union(SampleBatch(rewards=[0.5, 1.0])))
        ['ids', 'rewards']
        """
        from samplebatch.tokens import union

        batch: Any = self
        united: Self = union(batch, other)
        return united

    def assign(self, **columns: Any) -> Self:
        """Return a batch with more or other columns, over the same memory; this batch keeps its own.

        >>> from samplebatch import SampleBatch
        >>> list(SampleBatch(rewards=[1.0, 3.0]).assign(advantages=[-1.0, 1.0]))
        ['rewards', 'advantages']
        """
        from samplebatch.tokens import assign

        batch: Any = self
        assigned: Self = assign(batch, **columns)
        return assigned
