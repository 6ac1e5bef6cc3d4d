"""DeviceBatch: columns as tensors or arrays, whole or in minibatches, on the device of a learner."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import AbstractContextManager, nullcontext
from typing import TYPE_CHECKING, Any, Literal, Self, cast, overload

import numpy as np
import numpy.typing as npt

from samplebatch.arguments import choice, whole
from samplebatch.batch.delivery import Delivery
from samplebatch.batch.episode_batch import EpisodeBatch
from samplebatch.batch.nested.tensors import column_of_arrays
from samplebatch.batch.targets import ArrayTarget, Target, TorchTarget, require_device
from samplebatch.column.interface import Column
from samplebatch.column.ragged import RaggedColumn
from samplebatch.column.ragged_torch import RaggedTorchColumn
from samplebatch.column.tensor import TensorColumn
from samplebatch.column.torch_tensor import TorchColumn
from samplebatch.column.types import torch_dtype
from samplebatch.column.varying_rows import VaryingRows
from samplebatch.errors import ArgumentError

if TYPE_CHECKING:
    import torch
    from typing_extensions import TypeVar

    from samplebatch.batch.delivery import Device
    from samplebatch.batch.sample_batch import SampleBatch
    from samplebatch.batch.targets import Floats

    ValuesT = TypeVar("ValuesT", default=npt.NDArray[Any])
    """The type of a batch's columns: arrays, unless they were made tensors."""
else:
    from typing import TypeVar

    ValuesT = TypeVar("ValuesT")


class DeviceBatch(EpisodeBatch):
    """Columns in and out of torch: the part of `SampleBatch` that learners meet."""

    def to_torch(
        self,
        dtype: Floats | None = None,
        device: Device = "cpu",
        *,
        floats: Floats | None = None,
        pin_memory: bool = False,
        non_blocking: bool = False,
    ) -> SampleBatch[torch.Tensor]:
        """Return a batch of tensors, over the same memory wherever torch can use it.

        Only read-only arrays, and columns that change device or dtype, are copied. Columns that torch has no dtype for
        (objects, strings, dates) and compressed ones stay as they are. Of ragged columns the elements are moved.

        Parameters
        ----------
        dtype
            The dtype of floating-point columns, torch's or NumPy's, or its name; None leaves each as it is. Integers,
            flags and images are left alone.
        device
            The device of all tensors.
        floats
            Another name for `dtype`, and the one that all methods with tensors have.
        pin_memory
            Whether to page-lock the host memory that tensors lie in or are copied from.
        non_blocking
            Whether to return before copies to a device have ended.

        Raises
        ------
        ArgumentError
            If it is no floating-point dtype, or given twice.
        DeviceError
            If torch cannot use the device, or memory cannot be page-locked for want of one.

        Examples
        --------
        >>> from samplebatch import SampleBatch
        >>> batch = SampleBatch(rewards=[0.5, 1.0], actions=[0, 1]).to_torch(floats="float32")
        >>> batch["rewards"], batch["actions"]
        (tensor([0.5000, 1.0000]), tensor([0, 1]))
        """
        if dtype is not None and floats is not None:
            raise ArgumentError("one of dtype and floats must be given, they are names of the same argument")
        floats = dtype if floats is None else floats
        target = TorchTarget(device=device, floats=floats, pin_memory=pin_memory, non_blocking=non_blocking)
        return cast("SampleBatch[torch.Tensor]", self._to(target))

    def to_numpy(self, *, floats: Floats | None = None) -> SampleBatch:
        """Return a batch of arrays, over the tensors' memory where that is on the host.

        bfloat16 becomes float32, which holds it exactly. Compressed columns stay as they are.

        Parameters
        ----------
        floats
            The dtype of floating-point columns; None for their own.

        Raises
        ------
        ArgumentError
            If it is no floating-point dtype of NumPy's.

        Examples
        --------
        >>> from samplebatch import SampleBatch
        >>> SampleBatch(rewards=[0.5, 1.0]).to_torch().to_numpy(floats="float32")["rewards"]
        array([0.5, 1. ], dtype=float32)
        """
        arrays = self._with({name: column_of_arrays(column) for name, column in self._all().items()})
        return cast("SampleBatch", arrays if floats is None else arrays._to(ArrayTarget(floats)))

    def to_dict(self) -> dict[str, Any]:
        """Return a dict of the columns as the batch hands them out, nested ones as dicts and tuples.

        Examples
        --------
        >>> from samplebatch import SampleBatch
        >>> SampleBatch(obs={"x": [1, 2]}, rewards=[0.5, 1.0]).to_dict()
        {'obs': {'x': array([1, 2])}, 'rewards': array([0.5, 1. ])}
        """
        return {name: self[name] for name in self}

    def to_device(
        self,
        device: torch.device | str,
        framework: Literal["torch"] = "torch",
        pin_memory: bool = False,
        use_stream: bool = False,
        stream: torch.cuda.Stream | None = None,
    ) -> Self:
        """Turn the columns into tensors on a device, in place; dtypes are kept.

        On the host tensors share the arrays' memory, read-only arrays aside. Columns that torch has no dtype for
        (objects, strings, dates) and compressed ones stay as they are. Of ragged columns the elements are moved.

        Parameters
        ----------
        device
            Where to.
        framework
            Only `"torch"`.
        pin_memory
            Whether to copy to the device from page-locked memory, asynchronously.
        use_stream
            Whether to copy on a CUDA stream of its own, or on `stream`, rather than on the current one.
        stream
            The stream to copy on.

        Returns
        -------
        SampleBatch
            This very batch.

        Raises
        ------
        ArgumentError
            If the framework is another one.
        DeviceError
            If torch cannot use the device. The batch is left as it is.

        Examples
        --------
        >>> from samplebatch import SampleBatch
        >>> SampleBatch(rewards=[1.0, 2.0]).to_device("cpu")["rewards"]
        tensor([1., 2.], dtype=torch.float64)
        """
        choice("framework", framework, ["torch"])
        place = require_device(device)
        on_gpu = place.type == "cuda"
        target = TorchTarget(device=place, pin_memory=pin_memory and on_gpu, non_blocking=pin_memory)
        with _on_stream(place, stream) if use_stream and on_gpu else nullcontext():
            self._columns = {name: _convert(column, target) for name, column in self._all().items()}
        self._lent = False
        return self

    def _to(self, target: Target) -> Self:
        """Convert the columns to a target's form."""
        return self._with({name: _convert(column, target) for name, column in self._all().items()})

    @overload
    def minibatches(
        self,
        size: int,
        epochs: int = 1,
        shuffle: bool = True,
        rng: np.random.Generator | int | None = None,
        *,
        device: None = None,
        floats: Floats | None = None,
    ) -> Iterator[Self]: ...
    @overload
    def minibatches(
        self,
        size: int,
        epochs: int = 1,
        shuffle: bool = True,
        rng: np.random.Generator | int | None = None,
        *,
        device: Device,
        floats: Floats | None = None,
        prefetch: int = 0,
    ) -> Iterator[SampleBatch[torch.Tensor]]: ...
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
    ) -> Any:
        """Yield the batch in parts of `size` steps, every step once an epoch; the last part of an epoch may be smaller.

        Where there are sequences, parts consist of whole ones: as many as fit in `size` steps, but at least one.

        Parameters
        ----------
        size
            Steps per part.
        epochs
            Passes over the batch.
        shuffle
            Whether each pass has a random order of its own. If not, parts are views.
        rng
            A generator or a seed; by default, fresh entropy.
        device
            The device of tensors; None for columns as they are.
        floats
            The dtype of floating-point columns; None for their own.
        prefetch
            How many parts to make ahead. On a GPU they are copied from page-locked memory, on a stream of their own,
            while the learner computes.

        Raises
        ------
        ArgumentError
            If `size` is no whole number from 1 on, or `epochs` or `prefetch` none from 0 on; if `floats` is no
            floating-point dtype; if parts are made ahead for no device.
        DeviceError
            If torch cannot use the device.

        Examples
        --------
        >>> from samplebatch import SampleBatch
        >>> [len(part) for part in SampleBatch(a=[1, 2, 3, 4, 5]).minibatches(2, epochs=2, rng=0)]
        [2, 2, 1, 2, 2, 1]
        >>> (part,) = SampleBatch(a=[0.5, 1.5]).minibatches(2, shuffle=False, device="cpu", floats="float32")
        >>> part["a"]
        tensor([0.5000, 1.5000])
        """
        size, epochs = whole("size", size, 1), whole("epochs", epochs)
        delivery = Delivery(device, floats, prefetch)
        return delivery.each(self._minibatches(size, epochs, shuffle, np.random.default_rng(rng)), DeviceBatch._to)


def _convert(column: Column, target: Target) -> Column:
    """Convert a column to a target's form; one that torch has no dtype for stays unchanged."""
    if isinstance(column, TorchColumn):
        return TorchColumn(target.move(column.values))
    if isinstance(column, VaryingRows):
        return _convert_elements(column, target)
    if not isinstance(column, TensorColumn):
        return column
    if isinstance(target, ArrayTarget):
        return TensorColumn(target.from_array(column.values))
    return column if torch_dtype(column.dtype) is None else TorchColumn(target.from_array(column.values))


def _convert_elements(column: VaryingRows, target: Target) -> Column:
    """Convert the elements of rows of varying shape by the rule for other columns; where rows begin stays here."""
    flat = column.flat_column
    converted = _convert(flat, target)
    if converted is flat:
        return column
    kind = RaggedTorchColumn if isinstance(converted, TorchColumn) else RaggedColumn
    return kind(converted.values, *column.layout)


def _on_stream(device: torch.device, stream: torch.cuda.Stream | None) -> AbstractContextManager[Any]:
    import torch

    own = torch.cuda.Stream(device) if stream is None else stream  # type: ignore[no-untyped-call]
    context: AbstractContextManager[Any] = torch.cuda.stream(own)
    return context
