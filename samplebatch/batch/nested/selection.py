"""Selection: a NumPy index, resolved once for all leaves of a nested batch."""

from __future__ import annotations

from typing import Any, Final

import numpy as np

from samplebatch.batch.nested.node import KINDS, TENSOR

_ndarray = np.ndarray
_intp = np.dtype(np.intp)


class Selection:
    """NumPy index for the leaves of a tree: lists become arrays, masks row numbers.

    Attributes
    ----------
    index
        The index for arrays.
    rows
        The index as an array of row numbers, shape (k,), where it is one.
    masked
        The number of rows that every leaf must have for the mask to apply; -1 without a mask.
    scalar
        Whether it selects everything, so that scalars are kept too.
    """

    __slots__ = ("index", "masked", "rows", "scalar", "torch_index")

    def __init__(self, index: Any) -> None:
        self.masked = -1
        self.rows: Any = None
        self.torch_index: Any = None
        self.scalar = False
        kind = type(index)
        if kind is list:
            index = np.array(index) if index else np.empty(0, _intp)
        elif KINDS[kind] == TENSOR:
            index = index.detach().cpu().numpy()
        elif index is ... or kind is tuple:
            self.scalar = index is ... or not index
        if type(index) is _ndarray and index.ndim == 1:
            if index.dtype.kind == "b":
                self.masked = len(index)
                self.rows = index.nonzero()[0]
            elif index.dtype == _intp:
                self.rows = index
        self.index = index

    def of_tensor(self, tensor: Any) -> Any:
        """Return the index in a form that torch takes: torch has no descending slices."""
        if self.torch_index is None:
            self.torch_index = self._for_torch()
        if self.torch_index is not _DESCENDING:
            return self.torch_index
        parts = list(self.index) if isinstance(self.index, tuple) else [self.index]
        if sum(map(_descends, parts)) > 1 or any(isinstance(part, (list, _ndarray)) for part in parts):
            raise IndexError("torch takes one descending slice, and no array beside it")
        place = next(i for i, part in enumerate(parts) if _descends(part))
        dimension = sum(part is not None for part in parts[:place])
        if any(part is ... for part in parts[:place]):
            dimension = tensor.ndim - sum(part is not None for part in parts[place:])
        parts[place] = list(range(*parts[place].indices(tensor.shape[dimension])))
        return tuple(parts)

    def _for_torch(self) -> Any:
        index = self.index
        if isinstance(index, _ndarray):
            import torch

            return torch.from_numpy(np.ascontiguousarray(index)) if index.dtype.kind in "bi" else index
        if _descends(index) or (isinstance(index, tuple) and any(map(_descends, index))):
            return _DESCENDING
        return index


_DESCENDING = object()
EVERYTHING: Final = Selection(...)


def _descends(part: Any) -> bool:
    return isinstance(part, slice) and part.step is not None and part.step < 0
