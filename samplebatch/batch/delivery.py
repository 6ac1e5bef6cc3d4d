"""Delivery of samples and minibatches to a learner: device, dtype and prefetching."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager
from itertools import islice
from typing import TYPE_CHECKING, Any, TypeVar, cast

import numpy as np
import numpy.typing as npt

from samplebatch.arguments import choice, whole
from samplebatch.batch import sequences
from samplebatch.batch.nested.node import (
    ARRAY,
    DISTRIBUTION,
    FOREIGN,
    KINDS,
    NODE,
    NUMBER,
    RAGGED,
    TENSOR,
    Node,
    fault,
    node,
    with_unit_of,
)
from samplebatch.column.interface import Column
from samplebatch.column.ragged import RaggedColumn
from samplebatch.column.tensor import TensorColumn
from samplebatch.column.torch_tensor import RaggedTorchColumn, TorchColumn
from samplebatch.column.types import torch_dtype
from samplebatch.column.varying_rows import VaryingRows
from samplebatch.errors import ArgumentError, DeviceError, require_torch

if TYPE_CHECKING:
    import torch

    from samplebatch.batch.sample_batch import SampleBatch

    Device = str | int | torch.device
    """Where tensors lie, as torch names it."""
    Floats = torch.dtype | npt.DTypeLike
    """The dtype of floating-point values: torch's, NumPy's, or its name."""


N = TypeVar("N", bound=Node)
B = TypeVar("B", bound="SampleBatch[Any]")

_FIRST_OBJECT = np.dtype(object).num


def tree_to(source: N, target: Target, prefix: str = "") -> N:
    """Convert the leaves of a tree to tensors, or cast floating-point leaves to another dtype.

    Raises ColumnTypeError with the name of a leaf that torch cannot represent.
    """
    converted: dict[str, Any] = {}
    direct = target.direct
    name = ""
    try:
        for name, value in source.__dict__.items():
            kind = KINDS[type(value)]
            if kind == ARRAY:
                # Most arrays are C-contiguous, writable and native: torch accepts such arrays directly.
                if (
                    direct is not None
                    and value.dtype.num < _FIRST_OBJECT
                    and value.flags.carray
                    and value.dtype.isnative
                ):
                    converted[name] = direct(value)
                else:
                    converted[name] = target.from_array(value)
            elif kind == NODE:
                converted[name] = tree_to(value, target, f"{prefix}{name}.")
            else:
                converted[name] = target.convert(value, kind)
    except Exception as error:
        fault(prefix + name, "made a tensor", error)
    return with_unit_of(source, node(type(source), converted))


def tree_to_numpy(source: N, prefix: str = "") -> N:
    """Convert the tensors of a tree to arrays; the arrays of tensors on the host share the tensors' memory."""
    converted: dict[str, Any] = {}
    name = ""
    try:
        for name, value in source.__dict__.items():
            kind = KINDS[type(value)]
            if kind == TENSOR:
                converted[name] = array_of(value)
            elif kind == NODE:
                converted[name] = tree_to_numpy(value, f"{prefix}{name}.")
            elif kind == RAGGED:
                converted[name] = column_of_arrays(value)
            elif kind in (NUMBER, FOREIGN):
                converted[name] = np.asarray(value)
            else:
                converted[name] = _rows_to_numpy(value) if kind == ARRAY else value
    except Exception as error:
        fault(prefix + name, "made an array", error)
    return with_unit_of(source, node(type(source), converted))


def _rows_to_numpy(array: npt.NDArray[Any]) -> npt.NDArray[Any]:
    """Convert an object array of tensors to arrays; other arrays are returned unchanged."""
    if array.dtype.kind != "O" or array.ndim != 1 or not array.size or KINDS[type(array[0])] != TENSOR:
        return array
    rows = np.empty(len(array), object)
    for position, row in enumerate(array):
        rows[position] = array_of(row) if KINDS[type(row)] == TENSOR else row
    return rows


def array_of(tensor: torch.Tensor) -> npt.NDArray[Any]:
    """Convert a tensor to an array; if the tensor is on the host, the array shares the tensor's memory.

    bfloat16 becomes float32, because NumPy lacks bfloat16; float32 represents the values exactly.
    """
    try:
        return tensor.numpy()
    except (RuntimeError, TypeError):
        # The tensor has a gradient, is on a device, is a conjugated view, or has a dtype that NumPy lacks.
        tensor = tensor.detach()
    if tensor.device.type != "cpu":
        tensor = tensor.cpu()
    if str(tensor.dtype) == "torch.bfloat16":
        tensor = tensor.float()
    array: npt.NDArray[Any] = tensor.numpy() if not tensor.is_conj() else tensor.resolve_conj().numpy()
    return array


def as_array(value: Any) -> npt.NDArray[Any]:
    """Convert an array, a tensor on any device, or numbers to an array."""
    return array_of(value) if KINDS[type(value)] == TENSOR else np.asarray(value)


def column_of_arrays(column: Column) -> Column:
    """Convert a column of tensors to arrays that share memory with host tensors; return other columns unchanged."""
    if isinstance(column, TorchColumn):
        return TensorColumn(array_of(column.values))
    return RaggedColumn(array_of(column.flat), *column.layout) if isinstance(column, RaggedTorchColumn) else column


_FLOATS = ("float16", "float32", "float64", "bfloat16")


def float_name(floats: object) -> str:
    """Return the name of a floating-point dtype of torch or NumPy; raises ArgumentError for other dtypes.

    >>> float_name(np.float32), float_name("bfloat16")
    ('float32', 'bfloat16')
    >>> float_name("int64")
    Traceback (most recent call last):
    samplebatch.errors.ArgumentError: floats must be one of 'float16', 'float32', 'float64',
        'bfloat16', got 'int64'
    """
    word = str(floats)
    name = word.removeprefix("torch.")
    if name in _FLOATS:
        return name
    try:
        name = np.dtype(floats).name  # type: ignore[call-overload]
    except TypeError:
        # The message names a torch dtype as it is, and any other value by its type.
        return choice("floats", floats if name == word else name, _FLOATS)
    return choice("floats", name, _FLOATS)


def require_device(device: str | int | torch.device) -> torch.device:
    """Return a device as `torch.device`; raises DeviceError if torch cannot use the device on this machine.

    >>> require_device("cpu")
    device(type='cpu')
    """
    import torch

    try:
        torch_device = torch.device(device)
        if torch_device.type != "cpu":
            # torch.device accepts devices that torch or the machine lacks: only a tensor on the device is a test.
            torch.empty(0, device="cpu").to(torch_device)
    except Exception as error:
        raise DeviceError(
            f"device must be one that torch can use here, got {str(device)!r}: {_reason(error)}"
        ) from error
    return torch_device


def _require_pinning() -> None:
    import torch

    try:
        torch.empty(0, device="cpu").pin_memory()
    except Exception as error:
        raise DeviceError(f"pin_memory must be left out where torch cannot page-lock: {_reason(error)}") from error


def _reason(error: Exception) -> str:
    return str(error).partition("\n")[0]


def _convert_rows(array: npt.NDArray[Any], convert: Callable[[npt.NDArray[Any]], Any]) -> npt.NDArray[Any]:
    """Convert an object array of numeric arrays in one call to `convert`; other arrays are returned unchanged."""
    rows = array.tolist() if array.ndim == 1 else []
    dtype = getattr(rows[0], "dtype", None) if rows else None
    if not isinstance(dtype, np.dtype) or dtype.kind not in "biufc":
        return array
    if not all(type(row) is np.ndarray and row.dtype == dtype for row in rows):
        return array
    elements = convert(np.concatenate([row.reshape(-1) for row in rows]))
    converted = np.empty(len(rows), object)
    start = 0
    for position, row in enumerate(rows):
        converted[position] = elements[start : start + row.size].reshape(row.shape)
        start += row.size
    return converted


def convert_ragged(column: Any, target: Target) -> Any:
    """Convert the elements of a ragged column; row offsets and shapes remain on the host."""
    flat = column.flat
    converted = target.move(flat) if isinstance(column, RaggedTorchColumn) else target.from_array(flat)
    kind = RaggedColumn if isinstance(converted, np.ndarray) else RaggedTorchColumn
    return kind(converted, *column.layout)


class ArrayTarget:
    """Conversion target for learners that use arrays: floating-point values are cast to a dtype.

    Integers, flags, images, complex numbers and objects are unchanged.

    floats: dtype of floating-point values.

    Raises ArgumentError if `floats` is not a floating-point dtype of NumPy.

    >>> target = ArrayTarget("float32")
    >>> target.from_array(np.array([0.5])), target.from_array(np.array([1], np.uint8))
    (array([0.5], dtype=float32), array([1], dtype=uint8))
    """

    __slots__ = ("_dtype", "_name")
    direct: Callable[[npt.NDArray[Any]], Any] | None = None

    def __init__(self, floats: Floats) -> None:
        self._name = float_name(floats)
        if self._name == "bfloat16":
            raise ArgumentError("floats must be a dtype of NumPy, got bfloat16; pass device to get tensors")
        self._dtype = np.dtype(self._name)

    def from_array(self, array: npt.NDArray[Any]) -> Any:
        """Cast a floating-point array to the target's dtype, if the dtypes differ."""
        if array.dtype.kind == "O":
            return _convert_rows(array, self.from_array)
        return array.astype(self._dtype, copy=False) if array.dtype.kind == "f" else array

    def move(self, tensor: torch.Tensor) -> torch.Tensor:
        """Cast a floating-point tensor to the target's dtype, if the dtypes differ."""
        import torch

        return tensor.to(getattr(torch, self._name)) if tensor.is_floating_point() else tensor

    def convert(self, value: Any, kind: int) -> Any:
        """Cast a floating-point leaf to the target's dtype."""
        if kind == RAGGED:
            return convert_ragged(value, self)
        if kind == TENSOR:
            return self.move(value)
        return self.from_array(np.asarray(value)) if kind in (ARRAY, NUMBER) else value


def _make_tensors(floats: torch.dtype | None) -> Callable[[npt.NDArray[Any]], torch.Tensor]:
    """Return a function that creates a tensor over an array's memory, cast to `floats` if not None."""
    import torch

    if floats is None:
        return torch.from_numpy
    from_numpy = torch.from_numpy
    return lambda array: from_numpy(array).to(dtype=floats) if array.dtype.kind == "f" else from_numpy(array)


class TorchTarget:
    """Conversion target of tensors: dtype and device; None leaves either unchanged.

    floats: dtype of floating-point tensors; integers, flags, images and complex numbers are unchanged.
    pin_memory: whether to pin host memory, so that the copy to a device is asynchronous.
    non_blocking: whether to return before copies to a device have finished.
    keep_objects: whether values without a torch dtype are returned unchanged instead of rejected.
    used_on: CUDA stream that uses the tensors, if another stream copies the tensors.

    Raises ArgumentError if `floats` is not a floating-point dtype, or is passed together with `dtype`. Raises
    DeviceError if torch cannot use the device or pin memory. Raises MissingExtraError if torch is not installed.
    """

    __slots__ = ("_dtype", "_floats", "device", "direct", "keep_objects", "non_blocking", "pin_memory", "used_on")

    def __init__(
        self,
        dtype: torch.dtype | None = None,
        device: str | int | torch.device | None = "cpu",
        *,
        floats: Floats | None = None,
        pin_memory: bool = False,
        non_blocking: bool = False,
        keep_objects: bool = False,
        used_on: torch.cuda.Stream | None = None,
    ) -> None:
        require_torch()
        import torch

        if dtype is not None and floats is not None:
            raise ArgumentError("only one of dtype, for all values, and floats, for floats only, may be passed")
        self._dtype = dtype
        self._floats: torch.dtype | None = None if floats is None else getattr(torch, float_name(floats))
        self.device = None if device is None else require_device(device)
        if pin_memory:
            _require_pinning()
        self.pin_memory = pin_memory
        self.non_blocking = non_blocking
        self.keep_objects = keep_objects
        self.used_on = used_on
        on_host = self.device is None or self.device.type == "cpu"
        moves = not on_host or pin_memory or self._dtype is not None
        self.direct = None if moves else _make_tensors(self._floats)
        """Makes a tensor of a plain array that stays on the host."""

    def from_array(self, array: npt.NDArray[Any]) -> Any:
        """Return an array as a tensor, without a copy if the array is writable and torch supports the array's layout.

        An object array of numeric rows becomes an object array of tensors that share one allocation.
        """
        if array.dtype.kind == "O":
            rows = _convert_rows(array, self.from_array)
            if rows is not array:
                return rows
        if self.keep_objects and array.dtype.kind in "OmM":
            return array
        if not array.flags.writeable or array.dtype.byteorder == ">" or (array.ndim and min(array.strides) < 0):
            # Tensors are always writable: a tensor over read-only memory would bypass the protection.
            array = np.array(array, dtype=array.dtype.newbyteorder("="), order="C")
        if self.direct is not None:
            return self.direct(array)
        import torch

        return self.move(torch.from_numpy(array))

    def move(self, tensor: torch.Tensor) -> torch.Tensor:
        """Return a tensor on the target's device and in the target's dtype, copied only if necessary."""
        dtype = self._floats if self._floats is not None and tensor.is_floating_point() else self._dtype
        if self.pin_memory and tensor.device.type == "cpu":
            # Cast first: a copy to a device that also casts would wait for the device.
            tensor = tensor.to(dtype=dtype).pin_memory()
        moved = tensor.to(device=self.device, dtype=dtype, non_blocking=self.non_blocking)
        if self.used_on is not None and moved.is_cuda:
            moved.record_stream(self.used_on)
        return moved

    def convert(self, value: Any, kind: int) -> Any:
        """Return a leaf as a tensor; None and distributions are unchanged.

        Raises TypeError if torch cannot represent the leaf.
        """
        if kind == ARRAY:
            return self.from_array(value)
        if kind == TENSOR:
            return self.move(value)
        if kind == RAGGED:
            return convert_ragged(value, self)
        if kind in (NUMBER, FOREIGN):
            return self.from_array(np.asarray(value))
        if value is None or kind == DISTRIBUTION or self.keep_objects:
            return value
        raise TypeError(f"torch has no dtype for {type(value).__name__}")


Target = ArrayTarget | TorchTarget


T = TypeVar("T")


class Delivery:
    """Conversion and prefetching of samples and minibatches for a learner.

    Parts that are prefetched for a GPU are gathered and copied from pinned memory on a separate stream while the
    learner computes; the learner's stream waits for a part before the part is yielded. On the host, prefetching only
    creates each part ahead of its request.

    device: device of the tensors; None leaves values unchanged.
    floats: dtype of floating-point values; None keeps each dtype.
    prefetch: number of parts to prepare ahead.

    Raises ArgumentError if `floats` is not a floating-point dtype, or `prefetch` is not a non-negative integer or is
    passed without a device. Raises DeviceError if torch cannot use the device.

    >>> from samplebatch import Batch
    >>> from samplebatch.batch.delivery import tree_to
    >>> [
    ...     part.a
    ...     for part in Delivery("cpu", "float32", 2).each(
    ...         iter([Batch(a=[0.5]), Batch(a=[1.5])]), tree_to
    ...     )
    ... ]
    [tensor([0.5000]), tensor([1.5000])]
    """

    __slots__ = ("_ahead", "_device", "_floats", "_target")

    def __init__(self, device: Device | None, floats: Floats | None, prefetch: int = 0) -> None:
        self._ahead = whole("prefetch", prefetch)
        if self._ahead and device is None:
            raise ArgumentError(f"prefetch must be 0 without a device, got {self._ahead}; pass device")
        self._device, self._floats = device, floats
        self._target: Target | None = None
        if device is not None:
            self._target = TorchTarget(device=device, floats=floats, keep_objects=True)
        elif floats is not None:
            self._target = ArrayTarget(floats)

    def one(self, part: T, convert: Callable[[T, Target], T]) -> T:
        """Convert one part."""
        return part if self._target is None else convert(part, self._target)

    def each(self, parts: Iterator[T], convert: Callable[[T, Target], T]) -> Iterator[T]:
        """Convert parts in order."""
        if self._target is None:
            return parts
        brought = (self.one(part, convert) for part in parts)
        if not self._ahead:
            return brought
        on_gpu = isinstance(self._target, TorchTarget) and str(self._target.device).startswith("cuda")
        return self._each_on_stream(parts, convert) if on_gpu else _make_ahead(brought, self._ahead)

    def _each_on_stream(self, parts: Iterator[T], convert: Callable[[T, Target], T]) -> Iterator[T]:
        import torch

        learner = torch.cuda.current_stream(self._device)
        copies = torch.cuda.Stream(self._device)  # type: ignore[no-untyped-call]
        # Parts may be cut from tensors that the learner's stream is still writing.
        copies.wait_stream(learner)
        target = TorchTarget(
            device=self._device,
            floats=self._floats,
            pin_memory=True,
            non_blocking=True,
            keep_objects=True,
            used_on=learner,
        )
        for part, copied in _make_ahead(_copy_on(copies, parts, convert, target), self._ahead):
            learner.wait_event(copied)
            yield part


def _make_ahead(items: Iterator[T], count: int) -> Iterator[T]:
    queue = deque(islice(items, count))
    while queue:
        item = queue.popleft()
        queue.extend(islice(items, 1))
        yield item


def _copy_on(
    stream: torch.cuda.Stream, parts: Iterator[T], convert: Callable[[T, Target], T], target: Target
) -> Iterator[tuple[T, Any]]:
    """Create and convert parts on a stream; yield each part with the event that records its completion."""
    import torch

    nothing: Any = object()
    while True:
        with torch.cuda.stream(stream):
            part = next(parts, nothing)
            if part is nothing:
                return
            brought = convert(part, target)
            end = stream.record_event()
        yield brought, end


def minibatches(
    batch: B,
    size: int | None,
    epochs: int,
    shuffle: bool,
    rng: np.random.Generator | int | None,
    max_tokens: int | None,
    lengths: str | npt.ArrayLike | None,
) -> Iterator[B]:
    """Validate the arguments and yield the parts of `SampleBatch.minibatches`."""
    if (size is None) == (max_tokens is None):
        raise ArgumentError(f"one of size and max_tokens must be passed, got {'none' if size is None else 'both'}")
    if max_tokens is not None:
        from samplebatch.tokens import token_minibatches

        return token_minibatches(batch, max_tokens, lengths, whole("epochs", epochs), shuffle, rng)
    if lengths is not None:
        raise ArgumentError("lengths must be passed with max_tokens, got lengths alone")
    nrows, nepochs = whole("size", size, 1), whole("epochs", epochs)
    generator = np.random.default_rng(rng) if shuffle else None
    return (part for _ in range(nepochs) for part in each_part(batch, nrows, generator))


def each_part(batch: B, size: int, rng: np.random.Generator | None) -> Iterator[B]:
    """Yield every step once in parts of `size` steps: in random order, or in stored order as views if `rng` is None."""
    if batch._has_sequences:
        yield from sequences.each_packed(batch, size, rng)
    elif rng is None:
        yield from batch.timeslices(size)
    else:
        order = rng.permutation(batch.count)
        for start in range(0, batch.count, size):
            yield batch._gather(order[start : start + size])


def convert_column(column: Column, target: Target) -> Column:
    """Convert a column of a flat batch; a column without a torch dtype is unchanged."""
    if isinstance(column, TorchColumn):
        return TorchColumn(target.move(column.values))
    if isinstance(column, VaryingRows):
        if isinstance(target, TorchTarget) and isinstance(column, RaggedColumn) and torch_dtype(column.dtype) is None:
            return column
        return cast("Column", convert_ragged(column, target))
    if not isinstance(column, TensorColumn):
        return column
    if isinstance(target, ArrayTarget):
        return TensorColumn(target.from_array(column.values))
    return column if torch_dtype(column.dtype) is None else TorchColumn(target.from_array(column.values))


def on_stream(device: torch.device, stream: torch.cuda.Stream | None) -> AbstractContextManager[Any]:
    """Return a context manager that runs copies on a CUDA stream; None creates a new stream."""
    import torch

    chosen = torch.cuda.Stream(device) if stream is None else stream  # type: ignore[no-untyped-call]
    context: AbstractContextManager[Any] = torch.cuda.stream(chosen)
    return context
