"""The methods of a nested batch that change what its values are kept as, leaf by leaf."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Self, cast

import numpy as np
import numpy.typing as npt

from samplebatch.batch.nested.conversion import TorchTarget, replace_leaves, tree_to_numpy, tree_to_torch
from samplebatch.batch.nested.distributions import dist_to_atleast_2d
from samplebatch.batch.nested.flat import FlatNames, as_sample_batch
from samplebatch.batch.nested.node import ARRAY, DISTRIBUTION, KINDS, NODE, TENSOR, Node, node
from samplebatch.batch.nested.nulls import any_null, complete_rows, nulls
from samplebatch.batch.nested.rows import iterate, select, shortest
from samplebatch.errors import ColumnLengthError, ColumnMismatchError, ColumnTypeError

if TYPE_CHECKING:
    import pyarrow as pa
    import torch

    from samplebatch.batch.sample_batch import SampleBatch


class Conversions(Node):
    """Conversions to torch, NumPy and plain dicts; missing values; shapes."""

    __slots__ = ()

    def to_torch(
        self,
        dtype: torch.dtype | None = None,
        device: str | int | torch.device = "cpu",
        *,
        pin_memory: bool = False,
        non_blocking: bool = False,
        keep_objects: bool = False,
    ) -> Self:
        """Return a batch of tensors, over the same memory wherever torch can use it.

        Copied are only read-only arrays, arrays in foreign byte order or with negative strides, and what goes to
        another
        device or dtype. None and distributions stay what they are.

        Parameters
        ----------
        dtype
            The dtype of all tensors; None leaves each as it is.
        device
            Where they shall be.
        pin_memory
            Whether to lock the host memory they lie in or are copied from.
        non_blocking
            Whether to return before copies to a device have ended.
        keep_objects
            Whether strings and arrays of objects stay what they are, instead of being refused.

        Raises
        ------
        ColumnTypeError
            If torch has no dtype for a leaf; names it.

        Examples
        --------
        >>> import torch
        >>> from samplebatch.batch.nested.batch import Batch
        >>> Batch(a=np.zeros(2), b=[1, 2]).to_torch(dtype=torch.float32)
        Batch(
            a: tensor([0., 0.]),
            b: tensor([1., 2.]),
        )
        """
        target = TorchTarget(dtype, device, pin_memory=pin_memory, non_blocking=non_blocking, keep_objects=keep_objects)
        return tree_to_torch(self, target)

    def to_torch_(
        self,
        dtype: torch.dtype | None = None,
        device: str | int | torch.device = "cpu",
        *,
        pin_memory: bool = False,
        non_blocking: bool = False,
        keep_objects: bool = False,
    ) -> None:
        """Do what `to_torch` does in place: this batch and the nested ones in it hold the tensors."""
        target = TorchTarget(dtype, device, pin_memory=pin_memory, non_blocking=non_blocking, keep_objects=keep_objects)
        replace_leaves(self, tree_to_torch(self, target))

    def to_numpy(self) -> Self:
        """Return a batch whose tensors have become arrays, over the same memory if that is on the host.

        bfloat16 becomes float32, which holds it exactly.
        """
        return tree_to_numpy(self)

    def to_numpy_(self) -> None:
        """Do what `to_numpy` does in place: this batch and the nested ones in it hold the arrays."""
        replace_leaves(self, tree_to_numpy(self))

    def pin_memory(self, device: str | torch.device | None = None) -> Self:
        """Return a batch whose tensors lie in page-locked memory: what a torch `DataLoader` asks for."""

        def pinned(value: Any, kind: int) -> Any:
            return value.pin_memory() if kind == TENSOR and value.device.type == "cpu" else value

        return cast("Self", _mapped(self, pinned))

    def to_dict(self, recursive: bool = True) -> dict[str, Any]:
        """Return a dict of the values; nested batches become dicts too, unless told otherwise.

        Examples
        --------
        >>> from samplebatch.batch.nested.batch import Batch
        >>> Batch(a=[1, 2], b=Batch(c=[3])).to_dict()
        {'a': array([1, 2]), 'b': {'c': array([3])}}
        """
        return _plain(self) if recursive else dict(self.__dict__)

    def to_list_of_dicts(self) -> list[dict[str, Any]]:
        """Return the rows as dicts, nested batches among them included.

        Raises
        ------
        ColumnTypeError
            If a leaf is a scalar; names it.
        """
        return [_plain(row) for row in iterate(self, shortest(self.__dict__) or 0)]

    def to_at_least_2d(self) -> Self:
        """Return a batch of two dimensions or more: () becomes (1, 1), and (n,) becomes (1, n)."""

        def raised(value: Any, kind: int) -> Any:
            if kind == DISTRIBUTION:
                return dist_to_atleast_2d(value)
            if kind == TENSOR:
                import torch

                return torch.atleast_2d(value)  # type: ignore[no-untyped-call]
            return np.atleast_2d(np.asarray(value, None if kind == ARRAY or not isinstance(value, str) else object))

        return cast("Self", _mapped(self, raised))

    def as_sample_batch(self, names: FlatNames = "kept") -> SampleBatch:
        """Return a flat batch over the same arrays and tensors; see `samplebatch.batch.nested.flat.as_sample_batch`."""
        return as_sample_batch(self, names)

    def to_arrow(self) -> pa.Table:
        """Return an Arrow table over the same memory: a column per leaf, under its dotted name."""
        return as_sample_batch(self).to_arrow()

    def __arrow_c_schema__(self) -> Any:
        return as_sample_batch(self).__arrow_c_schema__()

    def __arrow_c_stream__(self, requested_schema: Any = None) -> Any:
        return as_sample_batch(self).__arrow_c_stream__(requested_schema)

    def replace_empty_batches_by_none(self) -> None:
        """Put None in place of every name that is only reserved, nested ones included.

        Examples
        --------
        >>> from samplebatch.batch.nested.batch import Batch
        >>> b = Batch(a=[1], b=Batch())
        >>> b.replace_empty_batches_by_none()
        >>> b.to_dict()
        {'a': array([1]), 'b': None}
        """
        _forget_reserved(self)

    def isnull(self) -> Self:
        """Tell for every element whether it is NaN, NaT or None: a batch of the same structure that holds bool.

        Examples
        --------
        >>> from samplebatch.batch.nested.batch import Batch
        >>> Batch(a=[1.0, float("nan")], b=["x", None]).isnull().to_dict()
        {'a': array([False,  True]), 'b': array([False,  True])}
        """
        return cast("Self", nulls(self))

    def hasnull(self) -> bool:
        """Tell whether any element is NaN, NaT or None."""
        return any_null(self)

    def dropnull(self) -> Self:
        """Take the rows in which nothing is NaN, NaT or None.

        Raises
        ------
        ColumnTypeError
            If a leaf is a scalar; names it.

        Examples
        --------
        >>> from samplebatch.batch.nested.batch import Batch
        >>> Batch(a=[1.0, float("nan"), 3.0], b=["x", "y", None]).dropnull().to_dict()
        {'a': array([1.]), 'b': array(['x'], dtype=object)}
        """
        length = shortest(self.__dict__)
        if length is None:
            return self
        return cast("Self", select(self, np.flatnonzero(complete_rows(self, length))))

    def set_array_at_key(
        self, arr: npt.NDArray[Any], key: str, index: Any = None, default_value: float | None = None
    ) -> None:
        """Set a column, or some of its rows.

        Parameters
        ----------
        arr
            Array of shape (n, ...) for the n rows of the batch; with an index, as many rows as it asks for.
        key
            Its name. If there is no such column yet and an index is given, the other rows hold the default.
        index
            An index of NumPy's; None for all rows.
        default_value
            What the other rows hold; None stands for NaN, False or None, whichever the dtype has.

        Raises
        ------
        ColumnLengthError
            If no index is given and the array has not as many rows as the batch.
        ColumnMismatchError
            If the name is a nested batch's.
        ColumnTypeError
            If the dtype has nothing that None could stand for.

        Examples
        --------
        >>> from samplebatch.batch.nested.batch import Batch
        >>> b = Batch(a=[1, 2, 3])
        >>> b.set_array_at_key(np.array([4.5]), "b", index=[1], default_value=7)
        >>> b.to_dict()
        {'a': array([1, 2, 3]), 'b': array([7. , 4.5, 7. ])}
        """
        held = self.__dict__
        length = shortest({name: value for name, value in held.items() if name != key or index is not None}) or 0
        if index is None:
            if held.keys() - {key} and len(arr) != length:
                raise ColumnLengthError(
                    f"column {key!r} must have {length} rows, got {len(arr)}; give an index to set some of them"
                )
            held[key] = arr
            return
        if key in held:
            if KINDS[type(held[key])] == NODE:
                raise ColumnMismatchError(f"column {key!r} must be an array to have rows set, it is a nested batch")
            held[key][index] = arr
            return
        if default_value is None and arr.dtype.kind not in "fcbO":
            raise ColumnTypeError(
                f"column {key!r} must have a default for its other rows: {arr.dtype} has none for missing values"
            )
        missing = {"f": np.nan, "c": np.nan, "b": False, "O": None}.get(arr.dtype.kind)
        column = np.full((length, *arr.shape[1:]), missing if default_value is None else default_value, arr.dtype)
        column[index] = arr
        held[key] = column


def _mapped(source: Node, function: Any) -> Node:
    """Make a tree of what a function makes of each leaf and its kind."""
    kept = {}
    for name, value in source.__dict__.items():
        kind = KINDS[type(value)]
        kept[name] = _mapped(value, function) if kind == NODE else function(value, kind)
    return node(type(source), kept)


def _plain(source: Node) -> dict[str, Any]:
    return {name: _plain(value) if KINDS[type(value)] == NODE else value for name, value in source.__dict__.items()}


def _forget_reserved(source: Node) -> None:
    for name, value in source.__dict__.items():
        if KINDS[type(value)] == NODE:
            if value.__dict__:
                _forget_reserved(value)
            else:
                source.__dict__[name] = None
