"""Targets: the form in which values are handed to a learner: tensors or arrays, on a device, in a floating-point dtype.

Batches of every kind are walked over with one of the two, so that one rule says which values a dtype is meant for.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt

from samplebatch.arguments import choice
from samplebatch.batch.nested.node import ARRAY, DISTRIBUTION, FOREIGN, NUMBER, TENSOR
from samplebatch.errors import ArgumentError, DeviceError

if TYPE_CHECKING:
    import torch

    Floats = torch.dtype | npt.DTypeLike
    """The dtype of floating-point values: torch's, NumPy's, or its name."""

_FLOATS = ("float16", "float32", "float64", "bfloat16")


def float_name(floats: object) -> str:
    """Name the dtype that floating-point values are to have.

    Parameters
    ----------
    floats
        A dtype, torch's or NumPy's, or its name.

    Raises
    ------
    ArgumentError
        If it is no floating-point dtype that learners compute in.

    Examples
    --------
    >>> float_name(np.float32), float_name("bfloat16")
    ('float32', 'bfloat16')
    >>> float_name("int64")
    Traceback (most recent call last):
    samplebatch.errors.ArgumentError: floats must be one of 'float16', 'float32', 'float64', 'bfloat16', got 'int64'
    """
    word = str(floats)
    name = word.removeprefix("torch.")
    if name in _FLOATS:
        return name
    try:
        name = np.dtype(floats).name  # type: ignore[call-overload]
    except TypeError:
        # A dtype of torch's is named as it is; anything else by its type.
        return choice("floats", floats if name == word else name, _FLOATS)
    return choice("floats", name, _FLOATS)


def require_device(device: str | int | torch.device) -> torch.device:
    """Return a device as torch's own, or refuse one that tensors cannot be brought to.

    Raises
    ------
    DeviceError
        If torch knows no such device, or cannot use it on this machine.

    Examples
    --------
    >>> require_device("cpu")
    device(type='cpu')
    """
    import torch

    try:
        found = torch.device(device)
        if found.type != "cpu":
            # Torch names devices that it was not compiled for, and that the machine lacks: only a tensor tells.
            torch.empty(0, device="cpu").to(found)
    except Exception as error:
        raise DeviceError(
            f"device must be one that torch can use here, got {str(device)!r}: {_reason(error)}"
        ) from error
    return found


def _require_pinning() -> None:
    """Refuse to page-lock memory where no device copies from it."""
    import torch

    try:
        torch.empty(0, device="cpu").pin_memory()
    except Exception as error:
        raise DeviceError(f"pin_memory must be left out where torch cannot page-lock: {_reason(error)}") from error


def _reason(error: Exception) -> str:
    """Return the first line of torch's own words, which are many where kernels are missing."""
    return str(error).partition("\n")[0]


def _convert_rows(array: npt.NDArray[Any], convert: Callable[[npt.NDArray[Any]], Any]) -> npt.NDArray[Any]:
    """Convert rows of numbers that vary in shape, an array of arrays, all at once; return any other array itself."""
    rows = array.tolist() if array.ndim == 1 else []
    dtype = getattr(rows[0], "dtype", None) if rows else None
    if not isinstance(dtype, np.dtype) or dtype.kind not in "biufc":
        return array
    if not all(type(row) is np.ndarray and row.dtype == dtype for row in rows):
        return array
    elements = convert(np.concatenate([row.reshape(-1) for row in rows]))
    converted = np.empty(len(rows), object)
    start = 0
    for place, row in enumerate(rows):
        converted[place] = elements[start : start + row.size].reshape(row.shape)
        start += row.size
    return converted


class ArrayTarget:
    """Target that leaves values where they are, for learners that take arrays: floating-point ones get a dtype.

    Integers, flags, images, complex numbers and objects are left alone.

    Parameters
    ----------
    floats
        The dtype of floating-point values.

    Raises
    ------
    ArgumentError
        If it is no floating-point dtype, or one that NumPy does not have.

    Examples
    --------
    >>> target = ArrayTarget("float32")
    >>> target.from_array(np.array([0.5])), target.from_array(np.array([1], np.uint8))
    (array([0.5], dtype=float32), array([1], dtype=uint8))
    """

    __slots__ = ("_dtype", "_name")
    direct: Callable[[npt.NDArray[Any]], Any] | None = None

    def __init__(self, floats: Floats) -> None:
        self._name = float_name(floats)
        if self._name == "bfloat16":
            raise ArgumentError("NumPy has no bfloat16; name a device, so that values become tensors")
        self._dtype = np.dtype(self._name)

    def from_array(self, array: npt.NDArray[Any]) -> Any:
        """Return an array in the target's dtype, if it is of floating-point numbers: itself, if it has it already."""
        if array.dtype.kind == "O":
            return _convert_rows(array, self.from_array)
        return array.astype(self._dtype, copy=False) if array.dtype.kind == "f" else array

    def move(self, tensor: torch.Tensor) -> torch.Tensor:
        """Return a tensor in the target's dtype, if it is of floating-point numbers."""
        import torch

        return tensor.to(getattr(torch, self._name)) if tensor.is_floating_point() else tensor

    def convert(self, value: Any, kind: int) -> Any:
        """Return a leaf in the target's dtype, if it is of floating-point numbers."""
        if kind == TENSOR:
            return self.move(value)
        return self.from_array(np.asarray(value)) if kind in (ARRAY, NUMBER) else value


def _make_tensors(floats: torch.dtype | None) -> Callable[[npt.NDArray[Any]], torch.Tensor]:
    """Return a function that makes a tensor over an array's memory; of floats in a dtype, if there is one."""
    import torch

    if floats is None:
        return torch.from_numpy
    from_numpy = torch.from_numpy
    return lambda array: from_numpy(array).to(dtype=floats) if array.dtype.kind == "f" else from_numpy(array)


class TorchTarget:
    """Target of a conversion to torch: the dtype and device of every tensor; None leaves either as it is.

    Parameters
    ----------
    dtype
        The dtype of every tensor.
    device
        The device of every tensor.
    floats
        The dtype of floating-point tensors; integers, flags, images and complex numbers are left alone.
    pin_memory
        Whether to page-lock host memory, so that the copy to a device runs asynchronously.
    non_blocking
        Whether to return before copies to a device have ended.
    keep_objects
        Whether to keep values that torch has no dtype for.
    used_on
        The stream that tensors are used on, where that is another than the one that they are copied on.

    Raises
    ------
    ArgumentError
        If `floats` is no floating-point dtype, or given beside `dtype`.
    DeviceError
        If torch cannot use the device, or memory cannot be page-locked for want of one.
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
        import torch

        if dtype is not None and floats is not None:
            raise ArgumentError("one of dtype, for all values, and floats, for floating-point ones, must be given")
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
        """Return an array as a tensor: over the same memory if it is writable and laid out for torch.

        An array of rows that vary in shape becomes one of tensors, which share the memory of all of them.
        """
        if array.dtype.kind == "O":
            rows = _convert_rows(array, self.from_array)
            if rows is not array:
                return rows
        if self.keep_objects and array.dtype.kind in "OmM":
            return array
        if not array.flags.writeable or array.dtype.byteorder == ">" or (array.ndim and min(array.strides) < 0):
            # A tensor is always writable: over read-only memory it would be a way around the protection.
            array = np.array(array, dtype=array.dtype.newbyteorder("="), order="C")
        if self.direct is not None:
            return self.direct(array)
        import torch

        return self.move(torch.from_numpy(array))

    def move(self, tensor: torch.Tensor) -> torch.Tensor:
        """Return a tensor on the target's device and in its dtype: itself, if it is there already."""
        dtype = self._floats if self._floats is not None and tensor.is_floating_point() else self._dtype
        if self.pin_memory and tensor.device.type == "cpu":
            # Cast first: a copy that casts on its way to a device would wait for it.
            tensor = tensor.to(dtype=dtype).pin_memory()
        moved = tensor.to(device=self.device, dtype=dtype, non_blocking=self.non_blocking)
        if self.used_on is not None and moved.is_cuda:
            moved.record_stream(self.used_on)
        return moved

    def convert(self, value: Any, kind: int) -> Any:
        """Return a leaf as a tensor; None and distributions are kept.

        Raises
        ------
        TypeError
            If torch cannot hold it.
        """
        if kind == ARRAY:
            return self.from_array(value)
        if kind == TENSOR:
            return self.move(value)
        if kind in (NUMBER, FOREIGN):
            return self.from_array(np.asarray(value))
        if value is None or kind == DISTRIBUTION or self.keep_objects:
            return value
        raise TypeError(f"torch has no dtype for {type(value).__name__}")


Target = ArrayTarget | TorchTarget
