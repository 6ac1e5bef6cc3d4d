"""Safe pickle reader that neither imports modules nor calls functions referenced by a pickle.

A pickle is a program. Before loading, every opcode is validated: extension codes, persistent ids, out-of-band buffers
and duplication of the stack's top are rejected. Pickles encode bytes before protocol 3, and sets before protocol 4, as
function calls; these calls are not supported. Hashing nested tuples with shared items can take exponential time, so the
expanded size of tuples is limited.

The unpickler creates only stubs. NumPy arrays, numbers and dtypes are reconstructed from validated stubs. Every other
object remains a `Foreign` with the object's class name and state.

RLlib packs each row of a column as a pickle in an LZ4 frame, as bytes or base64.
"""

from __future__ import annotations

import base64
import io
import pickle
import pickletools
from math import prod
from typing import Any, Final, NamedTuple, Self

import numpy as np
import numpy.typing as npt
import pyarrow as pa

from samplebatch.arguments import describe_value
from samplebatch.column.convert import as_column
from samplebatch.column.interface import Column
from samplebatch.column.memory import MemoryBound
from samplebatch.column.types import named_dtype
from samplebatch.column.unpickling import unpickle
from samplebatch.errors import CapacityError, ColumnTypeError, FormatError

_ALLOWED = frozenset(
    (
        "BININT", "BININT1", "BININT2", "INT", "LONG", "LONG1", "LONG4", "BINFLOAT", "FLOAT", "SHORT_BINUNICODE",
        "BINUNICODE", "BINUNICODE8", "UNICODE", "SHORT_BINBYTES", "BINBYTES", "BINBYTES8", "BYTEARRAY8", "NONE",
        "NEWTRUE", "NEWFALSE", "EMPTY_TUPLE", "EMPTY_LIST", "EMPTY_DICT", "EMPTY_SET", "MARK", "TUPLE", "TUPLE1",
        "TUPLE2", "TUPLE3", "LIST", "FROZENSET", "DICT", "APPEND", "APPENDS", "ADDITEMS", "SETITEM", "SETITEMS",
        "GLOBAL", "STACK_GLOBAL", "REDUCE", "NEWOBJ", "NEWOBJ_EX", "BUILD", "MEMOIZE", "PUT", "BINPUT", "LONG_BINPUT",
        "GET", "BINGET", "LONG_BINGET", "PROTO", "FRAME", "STOP",
    )
)  # fmt: skip
"""Opcodes that a pickle of values may contain."""

_HASHED: dict[str, slice] = {name: slice(None) for name in ("ADDITEMS", "FROZENSET")} | {
    name: slice(1, None, 2) for name in ("SETITEM", "SETITEMS", "DICT")
}
"""Opcodes that hash operands on the stack, and which operands, counted from the top."""

_FROZEN = frozenset(("TUPLE", "TUPLE1", "TUPLE2", "TUPLE3", "FROZENSET"))
"""Opcodes that create hashable containers from operands on the stack."""

_MAX_TUPLE_DEPTH = 100
_MAX_UNFOLDED = 1 << 20
"""Values that may be in a tuple, or be hashed, beyond those that the pickle has operations for: shared ones count."""

_TUPLE_COST = 64
"""Cost of hashing a tuple, in strings: a writer can choose tuples and long integers with colliding hashes."""

_SHORT_INT = (1 << 61) - 1
"""Smallest integer whose hash equals the hash of a smaller integer."""

_MAX_NAMES = 1 << 12

MALFORMED = (
    pickle.UnpicklingError,
    EOFError,
    ValueError,
    LookupError,
    TypeError,
    AttributeError,
    OverflowError,
    RecursionError,
)
"""Errors that a malformed pickle, or a malformed stub of a NumPy value, raises."""


class Named(type):
    """Stub for a class or function that a pickle references; calling the stub creates a `Foreign`.

    name: module and name, joined by a dot; empty if the class or function is itself the result of a call.
    """

    name: str

    def __repr__(cls) -> str:
        return f"<{cls.name or 'object'}, not loaded>"


class Foreign(metaclass=Named):
    """Stub for an object: name of the constructor, arguments and state.

    name: name of the class or function. args: arguments of the call. state: argument of `__setstate__`, or None.
    """

    __slots__ = ("args", "replacement", "state")
    name = ""
    args: tuple[Any, ...]
    state: Any
    replacement: Any

    def __new__(cls, *args: Any, **options: Any) -> Self:
        """Store the arguments."""
        stub = object.__new__(cls)
        stub.args = args
        stub.state = stub.replacement = None
        return stub

    def __call__(self, *args: Any) -> Foreign:
        """Return a stub for the result of a call."""
        return Foreign(*args)

    def __setstate__(self, state: Any) -> None:
        self.state = state

    def append(self, item: Any) -> None:
        """Ignore an item of a list subclass."""

    def extend(self, items: Any) -> None:
        """Ignore items of a list subclass."""

    def add(self, item: Any) -> None:
        """Ignore an item of a set subclass."""

    def __setitem__(self, name: Any, item: Any) -> None:
        return None

    def __repr__(self) -> str:
        return f"<{self.name or 'object'}, not made>"


class StubUnpickler(pickle.Unpickler):
    """Unpickler that creates stubs instead of objects."""

    def __init__(self, data: bytes) -> None:
        super().__init__(io.BytesIO(data), fix_imports=False)
        self._stubs: dict[tuple[str, str], Named] = {}

    def find_class(self, module: str, name: str) -> Named:
        """Return the stub for a class or function name."""
        stub = self._stubs.get((module, name))
        if stub is None:
            if len(self._stubs) >= _MAX_NAMES:
                raise FormatError(f"a pickle must name at most {_MAX_NAMES} classes and functions, got more")
            namespace = {"name": f"{module}.{name}", "__slots__": ()}
            stub = self._stubs[module, name] = Named("Foreign", (Foreign,), namespace)
        return stub

    def persistent_load(self, pid: Any) -> Any:
        """Reject references to objects outside the pickle."""
        raise FormatError("a pickle of values must be self-contained, got a persistent id")


def load_stubs(data: bytes) -> Any:
    """Load a pickle of plain values; all other objects become stubs.

    Raises FormatError if `data` is not a pickle, is damaged, or has operations that pickles of values do not contain.

    >>> import datetime
    >>> load_stubs(pickle.dumps([1, "a", datetime.date]))
    [1, 'a', <datetime.date, not loaded>]
    """
    try:
        _check(data)
        return StubUnpickler(data).load()
    except FormatError:
        raise
    except MALFORMED as error:
        raise FormatError(f"a pickle must contain only values, got a damaged or different pickle: {error}") from error


class _Weight(NamedTuple):
    """Size and nesting depth of a value on the simulated stack.

    The size is the number of values in a value, including the value itself; a long integer is treated as a tuple.
    """

    values: int
    depth: int


_SINGLE = _Weight(1, 0)


def _check(data: bytes) -> None:
    """Reject unsupported opcodes; simulate a pickle's opcodes on a stack that contains the size and depth of values."""
    stack: list[_Weight | None] = []
    memo: dict[int, _Weight | None] = {}
    hashed = 0
    frames = _Frames()
    for count, (op, arg, start) in enumerate(pickletools.genops(data)):
        name = op.name
        number: Any = arg
        frames.follow(name, arg, start or 0)
        if name not in _ALLOWED:
            raise FormatError(f"a pickle of values must have only supported opcodes, got {name}")
        if name.endswith("GET"):
            stack.append(memo[int(number)])
        elif name == "MEMOIZE" or name.endswith("PUT"):
            number = len(memo) if number is None else int(number)
            # The unpickler allocates memory for as many entries as the largest number.
            if not 0 <= number <= count:
                raise FormatError(f"a pickle must number its values consecutively, got number {number}")
            memo[number] = stack[-1]
        else:
            operands = _take(stack, op)
            weight = _weight(name, number, operands)
            keys = operands[_HASHED[name]] if name in _HASHED else []
            for part in keys:
                hashed += part.values * (_TUPLE_COST if part.depth else 1)
            if max(weight.values, hashed) > _MAX_UNFOLDED + count or weight.depth > _MAX_TUPLE_DEPTH:
                largest = describe_value(max(weight.values, hashed))
                raise FormatError(
                    f"a pickle must have tuples of at most {_MAX_UNFOLDED + count} values and {_MAX_TUPLE_DEPTH} "
                    f"levels, got {largest} values and {weight.depth} levels"
                )
            stack += [None if after is pickletools.markobject else weight for after in op.stack_after]


class _Frames:
    """Checker of a pickle's frames.

    If an operation extends beyond its frame, the unpickler discards the remaining bytes of the frame. After the
    discarded bytes, the unpickler would execute operations that were not validated.
    """

    _HEADER_NBYTES = 9

    def __init__(self) -> None:
        self._end: int | None = None

    def follow(self, name: str, arg: Any, start: int) -> None:
        """Validate the next opcode, and reject frames that overlap an opcode or another frame."""
        if start == self._end:
            self._end = None
        lasts = name == "STOP" and self._end not in (None, start + 1)
        if self._end is not None and (start > self._end or name == "FRAME" or lasts):
            raise FormatError("frames of a pickle must end at the end of an opcode, got one that ends elsewhere")
        if name == "FRAME":
            self._end = start + self._HEADER_NBYTES + int(arg)


def _weight(name: str, arg: Any, operands: list[_Weight]) -> _Weight:
    if name in _FROZEN:
        return _Weight(1 + sum(part.values for part in operands), 1 + max((part.depth for part in operands), default=0))
    return _Weight(1, 1) if type(arg) is int and abs(arg) >= _SHORT_INT else _SINGLE


def _take(stack: list[_Weight | None], op: Any) -> list[_Weight]:
    """Pop the operands of an opcode, top first.

    If the number of operands is variable, pop down to the topmost mark; marks are None on the stack.
    """
    count = len(op.stack_before)
    operands: list[_Weight] = []
    if pickletools.markobject in op.stack_before:
        while (top := stack.pop()) is not None:
            operands.append(top)
        count = op.stack_before.index(pickletools.markobject)
    for _ in range(count):
        top = stack.pop()
        if top is None:
            raise FormatError("operands of a pickle opcode must be values, got a mark")
        operands.append(top)
    return operands


_ARRAY_MODULES = ("numpy._core.multiarray", "numpy.core.multiarray")
_NUMERIC_MODULES = ("numpy._core.numeric", "numpy.core.numeric")

_MAX_NESTING = 200
"""Maximum depth of nested containers. Python's recursion limit may be too high to prevent a stack overflow."""


def read_pickle(data: bytes | bytearray | memoryview) -> Any:
    """Read a pickle without executing it.

    Raises FormatError if `data` is not a pickle, is damaged, or has operations that pickles of values do not contain.

    Returns: the value. Objects other than Python's plain types and NumPy's arrays, numbers and dtypes are `Foreign`;
    classes and functions are `Named`.

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
        raise FormatError(f"a pickle must contain only values, got a damaged or different pickle: {error}") from error


def is_plain(value: Any) -> bool:
    """Return whether a value from `read_pickle` contains no `Foreign` or `Named` objects.

    >>> is_plain([1, {"a": Foreign("os.system")}]), is_plain([1, {"a": 2}])
    (False, True)
    """
    left = [value]
    visited: set[int] = set()
    while left:
        item = left.pop()
        if isinstance(item, Foreign | Named):
            return False
        if id(item) not in visited:
            visited.add(id(item))
            left += parts_of(item)
    return True


def parts_of(value: Any) -> list[Any]:
    """Return the members of a container from `read_pickle`; return an empty list for a value that is not a container.

    >>> parts_of({"a": [1]}), parts_of("a")
    (['a', [1]], [])
    """
    if isinstance(value, dict):
        return [*value.keys(), *value.values()]
    if isinstance(value, list | tuple | set | frozenset):
        return list(value)
    if isinstance(value, np.ndarray) and value.dtype.kind == "O":
        elements: list[Any] = value.ravel().tolist()
        return elements
    return []


def resolve_stubs(value: Any) -> Any:
    """Replace stubs of NumPy's constructors with the constructors' results; the states of other stubs are unchanged.

    Raises FormatError if the call of a stub differs from the calls in NumPy's pickles.
    """
    try:
        return _Values().resolve(value)
    except FormatError:
        raise
    except MALFORMED as error:
        raise FormatError(f"a pickle must contain NumPy's values in NumPy's encoding: {error}") from error


class _Values:
    """Values of one pickle, with NumPy objects in place of the stubs of NumPy constructors."""

    def __init__(self) -> None:
        self._done: dict[int, tuple[Any, Any]] = {}
        self._depth = 0

    def resolve(self, value: Any) -> Any:
        if self._depth > _MAX_NESTING:
            raise FormatError(f"a pickle must have at most {_MAX_NESTING} nested containers, got more")
        self._depth += 1
        try:
            return self._resolve(value)
        finally:
            self._depth -= 1

    def _resolve(self, value: Any) -> Any:
        kind = type(value)
        if isinstance(value, Foreign):
            if value.replacement is None:
                value.replacement = self._numpy_value(value)
            return value.replacement
        if kind not in (list, tuple, dict):
            return value
        if id(value) in self._done:
            return self._done[id(value)][1]
        if kind is tuple:
            resolved = tuple(map(self.resolve, value))
            # Keep a reference to the old object, so that no new object gets the same id.
            self._done[id(value)] = value, resolved
            return resolved
        self._done[id(value)] = value, value
        if kind is list:
            value[:] = map(self.resolve, value)
        else:
            for key, item in value.items():
                value[key] = self.resolve(item)
        return value

    def _numpy_value(self, call: Foreign) -> Any:
        """Return the result of a stub of a NumPy constructor; return other stubs unchanged."""
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
            raise FormatError("arrays in a pickle must contain numbers, dates, strings or objects, got others")
        shape = tuple(map(int, shape))
        if min(shape, default=0) < 0:
            raise FormatError(f"shapes of arrays in a pickle must be non-negative, got {describe_value(min(shape))}")
        order: Any = "F" if fortran else "C"
        if dtype.kind == "O":
            if type(content) is not list or len(content) != prod(shape):
                actual = len(content) if type(content) is list else describe_value(content)
                required = describe_value(prod(shape))
                raise FormatError(f"an object array in a pickle must have {required} objects, got {actual}")
            self._use(content)
            objects = np.empty(len(content), object)
            for at, item in enumerate(content):
                objects[at] = self.resolve(item)
            return objects.reshape(shape, order=order)
        if not isinstance(content, bytes | bytearray) or len(content) != dtype.itemsize * prod(shape):
            actual = len(content) if isinstance(content, bytes | bytearray) else describe_value(content)
            required = describe_value(dtype.itemsize * prod(shape))
            raise FormatError(f"an array in a pickle must have {required} bytes, got {actual}")
        self._use(content)
        array = np.frombuffer(content, dtype).reshape(shape, order=order)
        return array.astype(dtype.newbyteorder("="))

    def _use(self, content: bytes | bytearray | list[Any]) -> None:
        """Reject buffers that several arrays reference.

        With shared buffers, a small pickle could expand to many large arrays.
        """
        # Python caches single-byte objects, so several numbers can share one.
        if len(content) < 2:
            return
        if id(content) in self._done:
            raise FormatError("a pickle must have separate content for each array, got shared content")
        self._done[id(content)] = content, content


def _dtype(call: Foreign) -> Any:
    """Return a dtype of numbers, dates, fixed-width strings or objects; structured dtypes remain `Foreign`."""
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


_MAGIC: Final = b"\x04\x22\x4d\x18"
_MAGIC_BASE64: Final = b"BCJNG"
"""Prefix of an LZ4 frame, and of its base64 encoding."""

_PART_NBYTES: Final = 1 << 20


def is_packed(column: Column) -> bool:
    """Return whether a column's first row was packed by RLlib's `pack`.

    >>> is_packed(as_column(["BCJNGGBA"], "obs")), is_packed(as_column(["north"], "obs"))
    (True, False)
    """
    # torch dtypes have no `kind`, and are numeric.
    kind = getattr(column.dtype, "kind", "f")
    return kind in "OT" and len(column) > 0 and looks_packed(column.values[0])


def looks_packed(value: Any) -> bool:
    """Return whether a value has the prefix of RLlib's packed values.

    >>> (
    ...     looks_packed("BCJNGGBA"),
    ...     looks_packed(b"BCJNGGBA"),
    ...     looks_packed("north"),
    ...     looks_packed(3),
    ... )
    (True, True, False, False)
    """
    return _encode(value).startswith((_MAGIC, _MAGIC_BASE64))


def unpack_column(column: Column, name: str, *, allow_pickle: bool = False) -> Column:
    """Unpack the rows of a packed column; code in pickles is executed only if `allow_pickle` is true.

    Raises FormatError if a row is damaged, or packed differently from the first row. Raises UntrustedPickleError if a
    row contains values other than arrays, numbers, strings and containers of these, and `allow_pickle` is false. Raises
    CapacityError if the unpacked rows exceed both 256 MiB and 1024 times the size of the packed rows.
    """
    subject = f"column {name!r}"
    bound = MemoryBound(subject, column.nbytes)
    return as_column([unpack(row, subject, bound, allow_pickle=allow_pickle) for row in column.values.tolist()], name)


def unpack(row: str | bytes, subject: str, bound: MemoryBound, *, allow_pickle: bool = False) -> Any:
    """Unpack a value that RLlib's `pack` created.

    Pickles of arrays, numbers, strings, dicts and lists are read as data. Raises FormatError if `row` is damaged
    or is not a packed value. Raises UntrustedPickleError if the pickle contains objects of other types and
    `allow_pickle` is false. Raises CapacityError if the value exceeds the memory bound.
    """
    data = _encode(row)
    try:
        frame = data if data.startswith(_MAGIC) else base64.b64decode(data, validate=True)
        pickled = _decompress(frame, subject, bound)
        if not allow_pickle and is_plain(value := read_pickle(pickled)):
            return value
    except (ValueError, OSError, EOFError) as error:
        if isinstance(error, CapacityError):
            raise
        raise FormatError(f"{subject} must have rows packed by RLlib, got a damaged row: {error}") from error
    return unpickle([pickled], subject, allow_pickle=allow_pickle)[0]


def _decompress(frame: bytes, subject: str, bound: MemoryBound) -> bytes:
    parts = []
    with pa.CompressedInputStream(pa.BufferReader(frame), "lz4") as stream:
        while part := stream.read(_PART_NBYTES):
            bound.take(len(part), subject)
            parts.append(part)
    return b"".join(parts)


def _encode(row: Any) -> bytes:
    if isinstance(row, str):
        return row.encode()
    return row if isinstance(row, bytes) else b""
