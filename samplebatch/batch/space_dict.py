"""Gymnasium's spaces as values that JSON can hold, laid out as RLlib lays them out."""

from __future__ import annotations

import base64
import io
import zlib
from collections.abc import Callable
from typing import Any

import numpy as np
import numpy.typing as npt

from samplebatch.errors import ArgumentError, FormatError, near_names, require

_MAX_NBYTES = 1 << 28
"""Bytes that an array of a space may have."""


def space_to_dict(space: Any) -> dict[str, Any] | None:
    """Describe a space of Gymnasium; None is none.

    Raises
    ------
    ArgumentError
        If it is no space, or of a kind that has no description; names its type.

    Examples
    --------
    >>> import gymnasium
    >>> space_to_dict(gymnasium.spaces.Discrete(3))
    {'space': 'discrete', 'n': 3, 'start': 0}
    """
    if space is None:
        return None
    kinds = {base.__name__ for base in type(space).__mro__ if base.__module__.startswith("gymnasium.")}
    for kind, (_, describe, _) in _KINDS.items():
        if kind in kinds:
            return {"space": _KINDS[kind][0], **describe(space)}
    raise ArgumentError(f"a space must be one of Gymnasium's {', '.join(_KINDS)}, got a {type(space).__name__}")


def space_from_dict(described: Any) -> Any:
    """Make the space of a description, ours or RLlib's; `space_to_dict` is the inverse.

    Raises
    ------
    FormatError
        If it is no description of a space.
    MissingExtraError
        If Gymnasium is not installed.
    """
    if described is None:
        return None
    spaces = require("gymnasium", "envs").spaces
    kinds = {word: (kind, make) for kind, (word, _, make) in _KINDS.items()}
    word = described.get("space") if isinstance(described, dict) else None
    if not isinstance(word, str) or word not in kinds:
        raise FormatError(f"a space must be described as one of Gymnasium's; {near_names(word, kinds)}")
    kind, make = kinds[word]
    try:
        return getattr(spaces, kind)(**make(described))
    except FormatError:
        raise
    except Exception as error:
        raise FormatError(f"a space must be described by the arguments of a {kind}, it is not: {error}") from error


def _dump(array: npt.NDArray[Any]) -> str:
    buffer = io.BytesIO()
    np.save(buffer, array, allow_pickle=False)
    return base64.b64encode(zlib.compress(buffer.getvalue())).decode("ascii")


def _load(text: str) -> npt.NDArray[Any]:
    data = zlib.decompressobj().decompress(base64.b64decode(text, validate=True), _MAX_NBYTES)
    array: npt.NDArray[Any] = np.load(io.BytesIO(data), allow_pickle=False)
    return array


def _size(n: Any) -> Any:
    return n if isinstance(n, int) else np.asarray(n).tolist()


_Describe = Callable[[Any], dict[str, Any]]

_KINDS: dict[str, tuple[str, _Describe, _Describe]] = {
    "Box": (
        "box",
        lambda s: {"low": _dump(s.low), "high": _dump(s.high), "shape": list(s.shape), "dtype": s.dtype.str},
        lambda d: {
            "low": _load(d["low"]), "high": _load(d["high"]), "shape": tuple(d["shape"]), "dtype": np.dtype(d["dtype"])
        },
    ),
    "Discrete": (
        "discrete",
        lambda s: {"n": int(s.n), "start": int(s.start)},
        lambda d: {"n": d["n"], "start": d.get("start", 0)},
    ),
    "MultiBinary": ("multi-binary", lambda s: {"n": _size(s.n)}, lambda d: {"n": d["n"]}),
    "MultiDiscrete": (
        "multi-discrete",
        lambda s: {"nvec": _dump(s.nvec), "dtype": s.dtype.str},
        lambda d: {"nvec": _load(d["nvec"]), "dtype": np.dtype(d["dtype"])},
    ),
    "Tuple": (
        "tuple",
        lambda s: {"spaces": [space_to_dict(own) for own in s.spaces]},
        lambda d: {"spaces": [space_from_dict(own) for own in d["spaces"]]},
    ),
    "Dict": (
        "dict",
        lambda s: {"spaces": {name: space_to_dict(own) for name, own in s.spaces.items()}},
        lambda d: {"spaces": {name: space_from_dict(own) for name, own in d["spaces"].items()}},
    ),
    "Text": (
        "text",
        lambda s: {"min_length": s.min_length, "max_length": s.max_length, "charset": s.characters},
        lambda d: {"min_length": d["min_length"], "max_length": d["max_length"], "charset": d["charset"]},
    ),
}  # fmt: skip
"""Class of a space to its word, the description of one, and the arguments of a class that a description gives."""
