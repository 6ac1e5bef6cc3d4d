"""Pickles read as data: nothing is imported, nothing is called.

A pickle is a program that may call anything. What plain values need of it is little, and that little is carried out
here: numbers, strings, lists, tuples, dicts, sets, and the few calls by which NumPy makes its arrays and numbers, which
are recognised by name and never made. (Before protocol 3 bytes, and before protocol 4 sets, were calls as well, and are
not read.) Every other object stays a `Foreign`: the name of its class, and its state.
"""

from __future__ import annotations

import pickletools
from collections.abc import Callable
from math import prod
from typing import Any

import numpy as np
import numpy.typing as npt

from samplebatch.column.types import named_dtype
from samplebatch.errors import ColumnTypeError, FormatError

_MARK: Any = object()
_PLAIN = frozenset(
    (
        "BININT", "BININT1", "BININT2", "INT", "LONG", "LONG1", "LONG4", "BINFLOAT", "FLOAT", "SHORT_BINUNICODE",
        "BINUNICODE", "BINUNICODE8", "UNICODE", "SHORT_BINBYTES", "BINBYTES", "BINBYTES8", "BYTEARRAY8",
    )
)  # fmt: skip
"""Operations that push their argument."""

_CONSTANTS: dict[str, Callable[[], Any]] = {
    "NONE": lambda: None,
    "NEWTRUE": lambda: True,
    "NEWFALSE": lambda: False,
    "EMPTY_TUPLE": tuple,
    "EMPTY_LIST": list,
    "EMPTY_DICT": dict,
    "EMPTY_SET": set,
    "MARK": lambda: _MARK,
}
_TUPLES = {"TUPLE1": 1, "TUPLE2": 2, "TUPLE3": 3}
_ARRAY_MODULES = ("numpy._core.multiarray", "numpy.core.multiarray")
_NUMERIC_MODULES = ("numpy._core.numeric", "numpy.core.numeric")


class Foreign:
    """An object that was not made: the name of what would have been called, its arguments, and its state.

    Attributes
    ----------
    name
        Module and name of the class or function, joined by a dot; empty if it is itself the result of a call.
    args
        What it would have been called with; None for the class or function itself.
    state
        What the object would have been given as its state, or None.
    """

    __slots__ = ("args", "made", "name", "state")

    def __init__(self, name: str, args: Any = None) -> None:
        self.name = name
        self.args = args
        self.state: Any = None
        self.made: Any = None

    def __repr__(self) -> str:
        return f"<{self.name or 'object'}, not made>"


def read_pickle(data: bytes | bytearray | memoryview) -> Any:
    """Read a pickle without running it.

    Returns
    -------
    The value; objects in it that are neither Python's plain ones nor NumPy's arrays, numbers and dtypes are `Foreign`.

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
        return resolved(_carried_out(bytes(data)))
    except (ValueError, IndexError, KeyError, TypeError, AttributeError, UnicodeError, RecursionError) as error:
        if isinstance(error, FormatError):
            raise
        raise FormatError(f"a pickle must be one of values, it is damaged or another: {error}") from error


def resolved(value: Any) -> Any:
    """Put what NumPy's calls would make in their place; the states of what stays foreign are left as they are.

    Raises
    ------
    ValueError, IndexError, KeyError, TypeError, AttributeError
        If such a call is not as NumPy makes it.
    """
    return _resolved(value, {})


def is_plain(value: Any) -> bool:
    """Tell whether a value that `read_pickle` returned holds nothing foreign.

    >>> is_plain([1, {"a": Foreign("os.system")}]), is_plain([1, {"a": 2}])
    (False, True)
    """
    left = [value]
    seen: set[int] = set()
    while left:
        item = left.pop()
        if isinstance(item, Foreign):
            return False
        if id(item) in seen:
            continue
        seen.add(id(item))
        if isinstance(item, dict):
            left += [*item.keys(), *item.values()]
        elif isinstance(item, list | tuple | set | frozenset):
            left += item
        elif isinstance(item, np.ndarray) and item.dtype.kind == "O":
            left += item.ravel().tolist()
    return True


def _carried_out(data: bytes) -> Any:
    """Carry out the operations on a stack; calls leave a `Foreign`."""
    stack: list[Any] = []
    memo: dict[int, Any] = {}
    for op, arg, _ in pickletools.genops(data):
        name = op.name
        number: Any = arg
        if name in _PLAIN:
            stack.append(arg)
        elif name in _CONSTANTS:
            stack.append(_CONSTANTS[name]())
        elif name in ("MEMOIZE", "BINPUT", "LONG_BINPUT", "PUT"):
            memo[len(memo) if number is None else int(number)] = stack[-1]
        elif name in ("BINGET", "LONG_BINGET", "GET"):
            stack.append(memo[int(number)])
        elif name in _TUPLES:
            count = _TUPLES[name]
            stack[-count:] = [tuple(stack[-count:])]
        elif name == "TUPLE":
            stack.append(tuple(_since_mark(stack)))
        elif name in ("LIST", "FROZENSET"):
            stack.append((list if name == "LIST" else frozenset)(_since_mark(stack)))
        elif name in ("APPEND", "APPENDS"):
            items = _since_mark(stack) if name == "APPENDS" else [stack.pop()]
            _filled(stack[-1], list).extend(items)
        elif name == "ADDITEMS":
            items = _since_mark(stack)
            _filled(stack[-1], set).update(items)
        elif name in ("SETITEM", "SETITEMS", "DICT"):
            items = _since_mark(stack) if name != "SETITEM" else [stack.pop(-2), stack.pop()]
            if name == "DICT":
                stack.append({})
            _filled(stack[-1], dict).update(zip(items[::2], items[1::2], strict=True))
        elif name == "GLOBAL":
            stack.append(Foreign(str(arg).replace(" ", ".")))
        elif name == "STACK_GLOBAL":
            module, own = _expect(stack.pop(-2), str), _expect(stack.pop(), str)
            stack.append(Foreign(f"{module}.{own}"))
        elif name in ("REDUCE", "NEWOBJ", "NEWOBJ_EX"):
            args: Any = (stack.pop(-2), stack.pop()) if name == "NEWOBJ_EX" else stack.pop()
            function = stack.pop()
            called = isinstance(function, Foreign) and function.args is None
            stack.append(Foreign(function.name if called else "", args))
        elif name == "BUILD":
            state = stack.pop()
            if not isinstance(stack[-1], Foreign):
                raise FormatError("a pickle must give a state to an object, it gives one to a plain value")
            stack[-1].state = state
        elif name == "STOP":
            if stack[-1] is _MARK:
                raise FormatError("a pickle must end with a value, this one does not")
            return stack.pop()
        elif name not in ("PROTO", "FRAME"):
            raise FormatError(f"a pickle of values must have no {name}, this one has")
    raise FormatError("a pickle must have an end, this one has none; it is cut short")


def _since_mark(stack: list[Any]) -> list[Any]:
    """Take everything off the stack that lies above the last mark, and that."""
    at = len(stack) - 1
    while stack[at] is not _MARK:
        at -= 1
        if at < 0:
            raise FormatError("a pickle must mark where its items begin, this one does not")
    items = stack[at + 1 :]
    del stack[at:]
    return items


def _filled(target: Any, kind: type) -> Any:
    """Return what items are put into: of a foreign object they are left out."""
    return kind() if isinstance(target, Foreign) else _expect(target, kind)


def _expect(value: Any, kind: type) -> Any:
    if type(value) is not kind:
        raise FormatError(f"a pickle must have a {kind.__name__} here, this one has a {type(value).__name__}")
    return value


def _resolved(value: Any, done: dict[int, Any]) -> Any:
    kind = type(value)
    if kind is Foreign:
        if value.made is None:
            value.made = _numpy_value(value, done)
        return value.made
    if kind not in (list, tuple, dict, set, frozenset):
        return value
    if id(value) in done:
        return done[id(value)][1]
    if kind is tuple:
        found = tuple(_resolved(item, done) for item in value)
        # The old one too, lest another object gets its id.
        done[id(value)] = value, found
        return found
    done[id(value)] = value, value
    if kind is list:
        value[:] = [_resolved(item, done) for item in value]
    elif kind is dict:
        for key, item in value.items():
            value[key] = _resolved(item, done)
    return value


def _numpy_value(call: Foreign, done: dict[int, Any]) -> Any:
    """Return what a call of NumPy's would make, or the call itself if it is another."""
    module, _, name = call.name.rpartition(".")
    if call.args is None or not module.startswith("numpy"):
        return call
    if call.name == "numpy.dtype":
        return _dtype(call)
    if module in _ARRAY_MODULES and name == "_reconstruct":
        kind = call.args[0]
        if not isinstance(kind, Foreign) or kind.name != "numpy.ndarray" or not isinstance(call.state, tuple):
            return call
        _, shape, dtype, fortran, content = call.state
        return _array(_resolved(dtype, done), shape, bool(fortran), content, done)
    if module in _NUMERIC_MODULES and name == "_frombuffer":
        content, dtype, shape, order = call.args
        return _array(_resolved(dtype, done), shape, order == "F", content, done)
    if module in _ARRAY_MODULES and name == "scalar" and len(call.args) == 2:
        dtype, content = call.args
        return _array(_resolved(dtype, done), (1,), False, content, done)[0]
    return call


def _dtype(call: Foreign) -> Any:
    """Return a dtype of numbers, dates, fixed-width strings or objects; fields and the like stay foreign."""
    (name, *_), state = call.args, call.state
    if not isinstance(name, str):
        return call
    if name in ("O", "O8"):
        return np.dtype(object)
    order: Any = state[1] if isinstance(state, tuple) and len(state) > 1 and state[1] in ("<", ">") else "="
    if name[:2] in ("M8", "m8") and isinstance(state, tuple) and len(state) > 8:
        unit = state[8][1]
        base = bytes(unit[0]).decode()
        name = f"{name}[{int(unit[1])}{base}]" if base != "generic" else name
    dtype = np.dtype(name).newbyteorder(order)
    try:
        named_dtype(dtype.newbyteorder("=").str)
    except ColumnTypeError:
        return call
    return dtype


def _array(dtype: Any, shape: Any, fortran: bool, content: Any, done: dict[int, Any]) -> npt.NDArray[Any]:
    if not isinstance(dtype, np.dtype):
        raise FormatError("a pickle must have arrays of numbers, dates, strings or objects, this one has others")
    shape = tuple(map(int, shape))
    if min(shape, default=0) < 0:
        raise FormatError("a pickle must have arrays of extents from zero on, this one has others")
    order: Any = "F" if fortran else "C"
    if dtype.kind == "O":
        items = _expect(content, list)
        if len(items) != prod(shape):
            raise FormatError(f"a pickle must have {prod(shape)} objects for an array, this one has {len(items)}")
        objects = np.empty(len(items), object)
        objects[:] = [None] * len(items)
        for at, item in enumerate(items):
            objects[at] = _resolved(item, done)
        return objects.reshape(shape, order=order)
    if not isinstance(content, bytes | bytearray) or len(content) != dtype.itemsize * prod(shape):
        raise FormatError("a pickle must have the bytes of its arrays, this one has not as many as they need")
    array = np.frombuffer(content, dtype).reshape(shape, order=order)
    return array.astype(dtype.newbyteorder("="))
