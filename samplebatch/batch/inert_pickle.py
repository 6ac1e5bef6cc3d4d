"""Pickles read as data: nothing is imported, nothing is called.

A pickle is a program that may call anything. `stub_unpickler` gives it stubs for whatever it calls; here the few calls
by which NumPy makes its arrays, numbers and dtypes are recognised among these, and made of parts that were checked.
Every other object stays a `Foreign`: the name of its class, and its state.
"""

from __future__ import annotations

from math import prod
from typing import Any

import numpy as np
import numpy.typing as npt

from samplebatch.batch.stub_unpickler import MALFORMED, Foreign, Named, load_stubs
from samplebatch.column.types import named_dtype
from samplebatch.errors import ColumnTypeError, FormatError

_ARRAY_MODULES = ("numpy._core.multiarray", "numpy.core.multiarray")
_NUMERIC_MODULES = ("numpy._core.numeric", "numpy.core.numeric")

_MAX_DEPTH = 200
"""Containers within each other. Python's own limit may have been raised to where the stack ends before it."""


def read_pickle(data: bytes | bytearray | memoryview) -> Any:
    """Read a pickle without running it.

    Returns
    -------
    The value; objects in it that are neither Python's plain ones nor NumPy's arrays, numbers and dtypes are `Foreign`,
    and classes and functions are `Named`.

    Raises
    ------
    FormatError
        If it is no pickle, is damaged, or does what no pickle of values does.

    Examples
    --------
    >>> import collections, pickle
    >>> read_pickle(pickle.dumps({"a": np.arange(3), "b": (1, None)}))
    {'a': array([0, 1, 2]), 'b': (1, None)}
    >>> read_pickle(pickle.dumps([collections.Counter("aab")]))
    [<collections.Counter, not made>]
    """
    try:
        return resolve_stubs(load_stubs(bytes(data)))
    except FormatError:
        raise
    except MALFORMED as error:
        raise FormatError(f"a pickle must be one of values, it is damaged or another: {error}") from error


def is_plain(value: Any) -> bool:
    """Tell whether a value that `read_pickle` returned holds nothing foreign.

    >>> is_plain([1, {"a": Foreign("os.system")}]), is_plain([1, {"a": 2}])
    (False, True)
    """
    left = [value]
    seen: set[int] = set()
    while left:
        item = left.pop()
        if isinstance(item, Foreign | Named):
            return False
        if id(item) not in seen:
            seen.add(id(item))
            left += parts_of(item)
    return True


def parts_of(value: Any) -> list[Any]:
    """List the members of a value that `read_pickle` returned; none if it is no container.

    >>> parts_of({"a": [1]}), parts_of("a")
    (['a', [1]], [])
    """
    if isinstance(value, dict):
        return [*value.keys(), *value.values()]
    if isinstance(value, list | tuple | set | frozenset):
        return list(value)
    if isinstance(value, np.ndarray) and value.dtype.kind == "O":
        found: list[Any] = value.ravel().tolist()
        return found
    return []


def resolve_stubs(value: Any) -> Any:
    """Replace stubs of NumPy's constructors by their results; the states of other stubs are left as they are.

    Raises
    ------
    FormatError
        If such a call is not as NumPy makes it.
    """
    try:
        return _Values().resolve(value)
    except FormatError:
        raise
    except MALFORMED as error:
        raise FormatError(f"a pickle must hold NumPy's values as NumPy writes them, it does not: {error}") from error


class _Values:
    """Values of one pickle, with NumPy's in the places of their stubs."""

    def __init__(self) -> None:
        self._done: dict[int, tuple[Any, Any]] = {}
        self._depth = 0

    def resolve(self, value: Any) -> Any:
        if self._depth > _MAX_DEPTH:
            raise FormatError(f"a pickle must have at most {_MAX_DEPTH} containers within each other, it has more")
        self._depth += 1
        try:
            return self._resolve(value)
        finally:
            self._depth -= 1

    def _resolve(self, value: Any) -> Any:
        kind = type(value)
        if isinstance(value, Foreign):
            if value.made is None:
                value.made = self._numpy_value(value)
            return value.made
        if kind not in (list, tuple, dict):
            return value
        if id(value) in self._done:
            return self._done[id(value)][1]
        if kind is tuple:
            found = tuple(map(self.resolve, value))
            # The old one too, lest another object gets its id.
            self._done[id(value)] = value, found
            return found
        self._done[id(value)] = value, value
        if kind is list:
            value[:] = map(self.resolve, value)
        else:
            for key, item in value.items():
                value[key] = self.resolve(item)
        return value

    def _numpy_value(self, call: Foreign) -> Any:
        """Return the result of a stub of NumPy's constructors, or the stub itself if it is another."""
        module, _, name = call.name.rpartition(".")
        if call.name == "numpy.dtype":
            return _dtype(call)
        if module in _ARRAY_MODULES and name == "_reconstruct":
            kind = call.args[0]
            if not isinstance(kind, Named) or kind.name != "numpy.ndarray" or not isinstance(call.state, tuple):
                return call
            _, shape, dtype, fortran, content = call.state
            return self._array(dtype, shape, bool(fortran), content)
        if module in _NUMERIC_MODULES and name == "_frombuffer":
            content, dtype, shape, order = call.args
            return self._array(dtype, shape, order == "F", content)
        if module in _ARRAY_MODULES and name == "scalar" and len(call.args) == 2:
            dtype, content = call.args
            return self._array(dtype, (1,), False, content)[0]
        return call

    def _array(self, dtype: Any, shape: Any, fortran: bool, content: Any) -> npt.NDArray[Any]:
        dtype = self.resolve(dtype)
        if not isinstance(dtype, np.dtype):
            raise FormatError("a pickle must have arrays of numbers, dates, strings or objects, this one has others")
        shape = tuple(map(int, shape))
        if min(shape, default=0) < 0:
            raise FormatError("a pickle must have arrays of extents from zero on, this one has others")
        order: Any = "F" if fortran else "C"
        if dtype.kind == "O":
            if type(content) is not list or len(content) != prod(shape):
                raise FormatError(f"a pickle must have a list of {prod(shape)} objects for an array, it has not")
            self._use(content)
            objects = np.empty(len(content), object)
            for at, item in enumerate(content):
                objects[at] = self.resolve(item)
            return objects.reshape(shape, order=order)
        if not isinstance(content, bytes | bytearray) or len(content) != dtype.itemsize * prod(shape):
            raise FormatError("a pickle must have the bytes of its arrays, this one has not as many as they need")
        self._use(content)
        array = np.frombuffer(content, dtype).reshape(shape, order=order)
        return array.astype(dtype.newbyteorder("="))

    def _use(self, content: bytes | bytearray | list[Any]) -> None:
        """Mark the content of an array as used: shared by many, a few bytes would make any number of large arrays."""
        # Python has each single byte once, and shares it between numbers.
        if len(content) < 2:
            return
        if id(content) in self._done:
            raise FormatError("a pickle must have bytes or a list of its own for each array, this one shares them")
        self._done[id(content)] = content, content


def _dtype(call: Foreign) -> Any:
    """Return a dtype of numbers, dates, fixed-width strings or objects; fields and the like stay foreign."""
    (name, *_), state = call.args, call.state
    if not isinstance(name, str):
        return call
    if name in ("O", "O8"):
        return np.dtype(object)
    order: Any = state[1] if isinstance(state, tuple) and len(state) > 1 and state[1] in ("<", ">") else "="
    if name[:2] in ("M8", "m8") and isinstance(state, tuple) and len(state) > 8:
        base, count = state[8][1][:2]
        if not isinstance(base, bytes):
            return call
        name = f"{name}[{int(count)}{base.decode()}]" if base != b"generic" else name
    try:
        return named_dtype(name).newbyteorder(order)
    except ColumnTypeError:
        return call
