"""Conversions: methods of a nested batch to torch, NumPy, dicts and Arrow, and for missing values and shapes."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import chain
from typing import TYPE_CHECKING, Any, Self, cast

import numpy as np
import numpy.typing as npt

from samplebatch.arguments import whole
from samplebatch.batch import summary
from samplebatch.batch.delivery import Delivery
from samplebatch.batch.nested.distributions import dist_to_atleast_2d
from samplebatch.batch.nested.node import ARRAY, DISTRIBUTION, KINDS, NODE, TENSOR, Node, node, replace_leaves
from samplebatch.batch.nested.rows import iterate, select, shortest, split_rows
from samplebatch.batch.nested.tensors import tree_to, tree_to_numpy
from samplebatch.batch.nested.values import any_null, complete_rows, missing_value, narrow, nulls
from samplebatch.batch.sample_batch import SampleBatch
from samplebatch.batch.saved import Saved
from samplebatch.batch.targets import ArrayTarget, TorchTarget
from samplebatch.column.convert import as_column
from samplebatch.errors import ColumnLengthError, ColumnMismatchError, ColumnTypeError
from samplebatch.names import Words, rename

if TYPE_CHECKING:
    import pandas as pd
    import pyarrow as pa
    import torch
    from matplotlib.figure import Figure

    from samplebatch.batch.delivery import Device
    from samplebatch.batch.targets import Floats


class Conversions(Saved, Node):
    """Conversions of `Batch` to torch, NumPy, dicts and Arrow; its missing values; its shapes."""

    __slots__ = ()

    def to_torch(
        self,
        dtype: torch.dtype | None = None,
        device: Device = "cpu",
        *,
        floats: Floats | None = None,
        pin_memory: bool = False,
        non_blocking: bool = False,
        keep_objects: bool = False,
    ) -> Self:
        """Return a batch of tensors, over the same memory wherever torch can use it.

        Only read-only arrays, arrays in foreign byte order or with negative strides, and leaves that change device or
        dtype are copied. None and distributions are kept.

        Parameters
        ----------
        dtype
            The dtype of all tensors; None leaves each as it is.
        device
            The device of all tensors.
        floats
            The dtype of floating-point tensors, torch's or NumPy's, or its name; integers, flags and images are left
            alone.
        pin_memory
            Whether to page-lock the host memory that they lie in or are copied from.
        non_blocking
            Whether to return before copies to a device have ended.
        keep_objects
            Whether to keep strings and arrays of objects, instead of refusing them.

        Raises
        ------
        ColumnTypeError
            If torch has no dtype for a leaf; names it.
        ArgumentError
            If `floats` is no floating-point dtype, or given beside `dtype`.
        DeviceError
            If torch cannot use the device, or memory cannot be page-locked for want of one.

        Examples
        --------
        >>> import torch
        >>> from samplebatch import Batch
        >>> Batch(a=np.zeros(2), b=[1, 2]).to_torch(dtype=torch.float32)
        Batch(
            a: tensor([0., 0.]),
            b: tensor([1., 2.]),
        )
        >>> Batch(a=np.zeros(2), b=[1, 2]).to_torch(floats="float32")
        Batch(
            a: tensor([0., 0.]),
            b: tensor([1, 2]),
        )
        """
        how: dict[str, Any] = {"pin_memory": pin_memory, "non_blocking": non_blocking, "keep_objects": keep_objects}
        return tree_to(self, TorchTarget(dtype, device, floats=floats, **how))

    def to_torch_(
        self,
        dtype: torch.dtype | None = None,
        device: Device = "cpu",
        *,
        floats: Floats | None = None,
        pin_memory: bool = False,
        non_blocking: bool = False,
        keep_objects: bool = False,
    ) -> None:
        """Convert the leaves to tensors in place, in this batch and the nested ones; see `to_torch`."""
        how: dict[str, Any] = {"pin_memory": pin_memory, "non_blocking": non_blocking, "keep_objects": keep_objects}
        replace_leaves(self, tree_to(self, TorchTarget(dtype, device, floats=floats, **how)))

    def to_numpy(self, *, floats: Floats | None = None) -> Self:
        """Return a batch of arrays, over the tensors' memory where that is on the host.

        bfloat16 becomes float32, which holds it exactly.

        Parameters
        ----------
        floats
            The dtype of floating-point arrays; None for their own.

        Raises
        ------
        ArgumentError
            If `floats` is no floating-point dtype of NumPy's.
        """
        arrays = tree_to_numpy(self)
        return arrays if floats is None else tree_to(arrays, ArrayTarget(floats))

    def to_numpy_(self, *, floats: Floats | None = None) -> None:
        """Convert the tensors to arrays in place, in this batch and the nested ones; see `to_numpy`."""
        replace_leaves(self, Conversions.to_numpy(self, floats=floats))

    def minibatches(
        self,
        size: int,
        epochs: int = 1,
        shuffle: bool = True,
        rng: np.random.Generator | int | None = None,
        *,
        device: Device | None = None,
        floats: Floats | None = None,
        prefetch: int = 0,
    ) -> Iterator[Self]:
        """Yield the rows in batches of a size, every row once an epoch; see `SampleBatch.minibatches`.

        Raises
        ------
        ArgumentError, DeviceError
            As that does.

        Examples
        --------
        >>> from samplebatch import Batch
        >>> [part.a for part in Batch(a=[0.5, 1.5, 2.5]).minibatches(2, shuffle=False, device="cpu", floats="float32")]
        [tensor([0.5000, 1.5000]), tensor([2.5000])]
        """
        whole("size", size, 1)
        order = np.random.default_rng(rng)
        passes = (split_rows(self, size, shuffle, False, order) for _ in range(whole("epochs", epochs)))
        parts = cast("Iterator[Self]", chain.from_iterable(passes))
        return Delivery(device, floats, prefetch).each(parts, tree_to)

    def pin_memory(self, device: str | torch.device | None = None) -> Self:
        """Return a batch with its tensors in page-locked memory, as a torch `DataLoader` asks of it."""

        def pin(value: Any, kind: int) -> Any:
            return value.pin_memory() if kind == TENSOR and value.device.type == "cpu" else value

        return cast("Self", _map_leaves(self, pin))

    def to_dict(self, recursive: bool = True) -> dict[str, Any]:
        """Return a dict of the values; nested batches become dicts too, unless told otherwise.

        Examples
        --------
        >>> from samplebatch import Batch
        >>> Batch(a=[1, 2], b=Batch(c=[3])).to_dict()
        {'a': array([1, 2]), 'b': {'c': array([3])}}
        """
        return _to_dict(self) if recursive else dict(self.__dict__)

    def to_list_of_dicts(self) -> list[dict[str, Any]]:
        """Return the rows as dicts, nested batches among them included.

        Raises
        ------
        ColumnTypeError
            If a leaf is a scalar; names it.
        """
        return [_to_dict(row) for row in iterate(self, shortest(self.__dict__) or 0)]

    def to_at_least_2d(self) -> Self:
        """Return a batch of two dimensions or more: () becomes (1, 1), and (n,) becomes (1, n)."""

        def raise_dimensions(value: Any, kind: int) -> Any:
            if kind == DISTRIBUTION:
                return dist_to_atleast_2d(value)
            if kind == TENSOR:
                import torch

                return torch.atleast_2d(value)  # type: ignore[no-untyped-call]
            return np.atleast_2d(np.asarray(value, None if kind == ARRAY or not isinstance(value, str) else object))

        return cast("Self", _map_leaves(self, raise_dimensions))

    def as_sample_batch(self, names: Words = "kept") -> SampleBatch:
        """Return a flat batch over the same arrays and tensors; nested batches become nested columns.

        C-contiguous arrays in native byte order are shared; others are copied once. Reserved names and None have no
        rows and are left out.

        Parameters
        ----------
        names
            `"rllib"` renames the columns that both libraries know: `rew` becomes `rewards`, `obs_next` becomes
            `new_obs`. `"tianshou"` does the reverse, `"kept"` keeps all names.

        Raises
        ------
        ColumnLengthError
            If leaves differ in length; names them.
        ColumnTypeError
            If a leaf is a scalar or a distribution; names it.
        ArgumentError
            If `names` is another word.
        ColumnMismatchError
            If two columns would have one name.

        Examples
        --------
        >>> from samplebatch import Batch
        >>> Batch(obs={"x": [1.0, 2.0]}, rew=[0.5, 1.0]).as_sample_batch(names="rllib").column_names
        ('obs.x', 'rewards')
        """
        return as_sample_batch(self, names)

    def to_arrow(self) -> pa.Table:
        """Return an Arrow table over the same memory: a column per leaf, under its dotted name."""
        return as_sample_batch(self).to_arrow()

    def to_pandas(self) -> pd.DataFrame:
        """Return a data frame with a row per row, a column per leaf; see `SampleBatch.to_pandas`."""
        return as_sample_batch(self).to_pandas()

    def plot(self, *columns: str) -> Figure:
        """Draw leaves over time, by dotted name; see `SampleBatch.plot`."""
        return as_sample_batch(self).plot(*columns)

    def _repr_html_(self) -> str:
        return summary.as_html(type(self).__name__, _lines(self, ""))

    def __arrow_c_schema__(self) -> Any:
        return as_sample_batch(self).__arrow_c_schema__()

    def __arrow_c_stream__(self, requested_schema: Any = None) -> Any:
        return as_sample_batch(self).__arrow_c_stream__(requested_schema)

    def replace_empty_batches_by_none(self) -> None:
        """Replace the values of reserved names by None, nested ones included.

        Examples
        --------
        >>> from samplebatch import Batch
        >>> b = Batch(a=[1], b=Batch())
        >>> b.replace_empty_batches_by_none()
        >>> b.to_dict()
        {'a': array([1]), 'b': None}
        """
        _drop_reserved(self)

    def isnull(self) -> Self:
        """Tell for every element whether it is NaN, NaT or None: a batch of the same structure that holds bool.

        Examples
        --------
        >>> from samplebatch import Batch
        >>> Batch(a=[1.0, float("nan")], b=["x", None]).isnull().to_dict()
        {'a': array([False,  True]), 'b': array([False,  True])}
        """
        return cast("Self", nulls(self))

    def hasnull(self) -> bool:
        """Tell whether any element is NaN, NaT or None."""
        return any_null(self)

    def dropnull(self) -> Self:
        """Take the rows without NaN, NaT or None. Arrays of objects that are numbers then become arrays of numbers.

        Raises
        ------
        ColumnTypeError
            If a leaf is a scalar; names it.

        Examples
        --------
        >>> from samplebatch import Batch
        >>> Batch(a=[1.0, float("nan"), 3.0], b=["x", "y", None]).dropnull().to_dict()
        {'a': array([1.]), 'b': array(['x'], dtype=object)}
        >>> Batch(a=[None, 2, 3]).dropnull().to_dict()
        {'a': array([2, 3])}
        """
        length = shortest(self.__dict__)
        if length is None:
            return self
        rows = select(self, np.flatnonzero(complete_rows(self, length)))
        return cast("Self", _map_leaves(rows, lambda value, kind: narrow(value) if kind == ARRAY else value))

    def set_array_at_key(
        self, arr: npt.NDArray[Any], key: str, index: Any = None, default_value: float | None = None
    ) -> None:
        """Set a column, or some of its rows.

        Parameters
        ----------
        arr
            Array of shape (n, ...) for the n rows of the batch; with an index, as many rows as it selects.
        key
            Its name. If there is no such column yet and an index is given, the other rows hold the default.
        index
            An index of NumPy's; None for all rows.
        default_value
            Value of the other rows; None stands for NaN, False or None, as the dtype has it.

        Raises
        ------
        ColumnLengthError
            If no index is given and the array has not as many rows as the batch.
        ColumnMismatchError
            If the name is a nested batch's.
        ColumnTypeError
            If the default is None and the dtype has no missing value.

        Examples
        --------
        >>> from samplebatch import Batch
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
        default = missing_value(arr.dtype, key) if default_value is None else default_value
        column = np.full((length, *arr.shape[1:]), default, arr.dtype)
        column[index] = arr
        held[key] = column


def _map_leaves(source: Node, function: Any) -> Node:
    """Apply a function to each leaf and its kind, and keep its results in a new tree."""
    kept = {}
    for name, value in source.__dict__.items():
        kind = KINDS[type(value)]
        kept[name] = _map_leaves(value, function) if kind == NODE else function(value, kind)
    return node(type(source), kept)


def _to_dict(source: Node) -> dict[str, Any]:
    return {name: _to_dict(value) if KINDS[type(value)] == NODE else value for name, value in source.__dict__.items()}


def _lines(source: Node, prefix: str) -> list[summary.Line]:
    """Summarise the leaves of a tree; those without rows by their type alone."""
    lines: list[summary.Line] = []
    for name, value in source.__dict__.items():
        path, kind = prefix + name, KINDS[type(value)]
        if kind == NODE and value.__dict__:
            lines += _lines(value, f"{path}.")
        elif kind in (ARRAY, TENSOR) and value.ndim:
            lines += summary.describe({path: as_column(value, path)})
        else:
            lines.append(summary.Line(path, type(value).__name__, "()" if kind in (ARRAY, TENSOR) else ""))
    return lines


def _drop_reserved(source: Node) -> None:
    for name, value in source.__dict__.items():
        if KINDS[type(value)] == NODE:
            if value.__dict__:
                _drop_reserved(value)
            else:
                source.__dict__[name] = None


def as_sample_batch(batch: Node, names: Words = "kept") -> SampleBatch:
    """Make a flat batch over the arrays and tensors of a tree; see `Batch.as_sample_batch`."""
    return SampleBatch(rename(_to_columns(batch, ""), names))


def _to_columns(source: Node, prefix: str) -> dict[str, Any]:
    columns: dict[str, Any] = {}
    for name, value in source.__dict__.items():
        kind = KINDS[type(value)]
        if kind == NODE:
            nested = _to_columns(value, f"{prefix}{name}.")
            if nested:
                columns[name] = nested
        elif kind in (ARRAY, TENSOR) and value.ndim:
            columns[name] = value
        elif value is not None:
            raise ColumnTypeError(
                f"column {prefix + name!r} must have rows to be in a SampleBatch, it is a single value"
            )
    return columns
