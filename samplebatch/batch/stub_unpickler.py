"""An unpickler that gives a pickle stubs for all that it names: nothing is imported, and nothing is called but these.

A pickle is checked before it is loaded. It may use only the operations that values need: no extension codes, no
persistent ids, no buffers from elsewhere, and no duplicates of the stack's top. (Before protocol 3 bytes, and before
protocol 4 sets, were calls as well, and are not read.) A few bytes can make tuples that hold each other again and
again, and take for ever to be hashed: tuples are weighed with all that is in them, and refused if that is too much.
"""

from __future__ import annotations

import io
import pickle
import pickletools
from typing import Any, NamedTuple, Self

from samplebatch.errors import FormatError

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
"""Operations that a pickle of values may have."""

_HASHED: dict[str, slice] = {name: slice(None) for name in ("ADDITEMS", "FROZENSET")} | {
    name: slice(1, None, 2) for name in ("SETITEM", "SETITEMS", "DICT")
}
"""Operations that hash some of what lies on the stack, and which of that, from the top."""

_FROZEN = frozenset(("TUPLE", "TUPLE1", "TUPLE2", "TUPLE3", "FROZENSET"))
"""Operations that make what can be hashed, of what lies on the stack."""

_MAX_DEPTH = 100
_MAX_UNFOLDED = 1 << 20
"""Values that may be in a tuple, or be hashed, beyond those that the pickle has operations for: shared ones count."""

_TUPLE_COST = 64
"""How many strings hashing a tuple counts for: hashes of tuples and of long integers can be made to be the same."""

_SHORT_INT = (1 << 61) - 1
"""Integers from this on have the hashes of smaller ones."""

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
"""Raised where a pickle, or what NumPy's values are made of, is not as it must be."""


class Named(type):
    """A stub for a class or function that a pickle names: it makes a `Foreign` when it is called.

    Attributes
    ----------
    name
        Module and name, joined by a dot; empty if it is itself the result of a call.
    """

    name: str

    def __repr__(cls) -> str:
        return f"<{cls.name or 'object'}, not loaded>"


class Foreign(metaclass=Named):
    """A stub for an object: the name of its constructor, the arguments, and the state.

    Attributes
    ----------
    name
        Of the class or function.
    args
        What it would have been called with.
    state
        What the object would have been given as its state, or None.
    """

    __slots__ = ("args", "made", "state")
    name = ""
    args: tuple[Any, ...]
    state: Any
    made: Any

    def __new__(cls, *args: Any, **options: Any) -> Self:
        """Keep the arguments."""
        stub = object.__new__(cls)
        stub.args = args
        stub.state = stub.made = None
        return stub

    def __call__(self, *args: Any) -> Foreign:
        """Stand for the result of a call of an object."""
        return Foreign(*args)

    def __setstate__(self, state: Any) -> None:
        self.state = state

    def append(self, item: Any) -> None:
        """Leave out an item, as a list's subclass would take."""

    def extend(self, items: Any) -> None:
        """Leave out items."""

    def add(self, item: Any) -> None:
        """Leave out an item, as a set's subclass would take."""

    def __setitem__(self, name: Any, item: Any) -> None:
        return None

    def __repr__(self) -> str:
        return f"<{self.name or 'object'}, not made>"


class StubUnpickler(pickle.Unpickler):
    """An unpickler that knows stubs only."""

    def __init__(self, data: bytes) -> None:
        super().__init__(io.BytesIO(data), fix_imports=False)
        self._stubs: dict[tuple[str, str], Named] = {}

    def find_class(self, module: str, name: str) -> Named:
        """Return the stub for a name."""
        stub = self._stubs.get((module, name))
        if stub is None:
            if len(self._stubs) >= _MAX_NAMES:
                raise FormatError(f"a pickle must name at most {_MAX_NAMES} classes and functions, this one has more")
            own = {"name": f"{module}.{name}", "__slots__": ()}
            stub = self._stubs[module, name] = Named("Foreign", (Foreign,), own)
        return stub

    def persistent_load(self, pid: Any) -> Any:
        """Refuse references to objects outside of the pickle."""
        raise FormatError("a pickle of values must hold them all, this one names some that lie elsewhere")


def load_stubs(data: bytes) -> Any:
    """Load a pickle of values, with stubs for all else.

    Raises
    ------
    FormatError
        If it is no pickle, is damaged, or does what no pickle of values does.

    Examples
    --------
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
        raise FormatError(f"a pickle must be one of values, it is damaged or another: {error}") from error


class _Weight(NamedTuple):
    """The size of a value in values, itself included, and its depth; a long integer counts as a tuple."""

    values: int
    depth: int


_SINGLE = _Weight(1, 0)


def _check(data: bytes) -> None:
    """Follow the operations of a pickle on a stack of weights, and refuse those that values do not need."""
    stack: list[_Weight | None] = []
    memo: dict[int, _Weight | None] = {}
    hashed = 0
    frames = _Frames()
    for count, (op, arg, start) in enumerate(pickletools.genops(data)):
        name = op.name
        number: Any = arg
        frames.follow(name, arg, start or 0)
        if name not in _ALLOWED:
            raise FormatError(f"a pickle of values must have no {name}, this one has")
        if name.endswith("GET"):
            stack.append(memo[int(number)])
        elif name == "MEMOIZE" or name.endswith("PUT"):
            number = len(memo) if number is None else int(number)
            # The unpickler takes memory for as many as the largest number.
            if not 0 <= number <= count:
                raise FormatError(f"a pickle must number its values one after the other, this one has a {number}")
            memo[number] = stack[-1]
        else:
            taken = _take(stack, op)
            made = _weight(name, number, taken)
            keys = taken[_HASHED[name]] if name in _HASHED else []
            for part in keys:
                hashed += part.values * (_TUPLE_COST if part.depth else 1)
            if max(made.values, hashed) > _MAX_UNFOLDED + count or made.depth > _MAX_DEPTH:
                raise FormatError("a pickle must have tuples that can soon be hashed, it has larger or deeper ones")
            stack += [None if after is pickletools.markobject else made for after in op.stack_after]


class _Frames:
    """The frames of a pickle, which are checked beside its operations.

    The unpickler drops the rest of a frame that an operation reaches out of. It would then follow other operations than
    those that were checked.
    """

    _HEADER_NBYTES = 9

    def __init__(self) -> None:
        self._end: int | None = None

    def follow(self, name: str, arg: Any, start: int) -> None:
        """Take the next operation; refuse it if a frame ends within the one before, or begins or lasts beside it."""
        if start == self._end:
            self._end = None
        lasts = name == "STOP" and self._end not in (None, start + 1)
        if self._end is not None and (start > self._end or name == "FRAME" or lasts):
            raise FormatError("a pickle must have frames that end where an operation does, this one has another")
        if name == "FRAME":
            self._end = start + self._HEADER_NBYTES + int(arg)


def _weight(name: str, arg: Any, taken: list[_Weight]) -> _Weight:
    """Take the result of an operation from the memory bound."""
    if name in _FROZEN:
        return _Weight(1 + sum(part.values for part in taken), 1 + max((part.depth for part in taken), default=0))
    return _Weight(1, 1) if type(arg) is int and abs(arg) >= _SHORT_INT else _SINGLE


def _take(stack: list[_Weight | None], op: Any) -> list[_Weight]:
    """Pop the operands of an operation, the top first; down to the last mark if it takes a variable number (None)."""
    wanted = len(op.stack_before)
    taken: list[_Weight] = []
    if pickletools.markobject in op.stack_before:
        while (top := stack.pop()) is not None:
            taken.append(top)
        wanted = op.stack_before.index(pickletools.markobject)
    for _ in range(wanted):
        top = stack.pop()
        if top is None:
            raise FormatError("a pickle must have its operations in order, this one has a mark in the way")
        taken.append(top)
    return taken
