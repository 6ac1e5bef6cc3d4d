"""ViewRequirement: the rows of a column that a model requires at a step; Gymnasium spaces as JSON."""

from __future__ import annotations

import base64
import io
import re
import zlib
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, fields
from typing import TYPE_CHECKING, Any, Self

import numpy as np
import numpy.typing as npt

from samplebatch import names
from samplebatch.batch.tree import unflatten
from samplebatch.column.interface import Column
from samplebatch.errors import ArgumentError, ColumnTypeError, FormatError, RowIndexError, near_names, require

if TYPE_CHECKING:
    from samplebatch.batch.sample_batch import SampleBatch

_AFTER_LAST = {names.OBS: names.NEXT_OBS, names.PREV_ACTIONS: names.ACTIONS, names.PREV_REWARDS: names.REWARDS}
"""Columns whose value at step t + 1 is in row t of another column, so that the step after the last has a value."""

_RANGE = re.compile(r"(-?\d+):(-?\d+)(?::(-?[1-9]\d*))?")


@dataclass
class ViewRequirement:
    """View of a column that a model requires at a step, as declared by RLlib's models.

    Parameters
    ----------
    data_col
        The column to view; default: the column with the name of the view.
    space
        Space of one row; stored, not used by the library.
    shift
        Steps relative to the current step: an integer, a list of integers, or a range `"from:to"` or `"from:to:step"`,
        both ends included.
    index, batch_repeat_value
        Stored, not used by the library.
    used_for_compute_actions, used_for_training
        Whether the view is required to compute actions, and to train.

    Raises
    ------
    ValueError
        If `shift` is a string but not a range `"from:to"` or `"from:to:step"`.

    Examples
    --------
    >>> ViewRequirement("obs", shift="-2:0").shift_arr
    array([-2, -1,  0])
    """

    data_col: str | None = None
    space: Any = None
    shift: int | str | list[int] = 0
    index: int | None = None
    batch_repeat_value: int = 1
    used_for_compute_actions: bool = True
    used_for_training: bool = True
    shift_from: int | None = field(init=False, default=None, compare=False)
    shift_to: int | None = field(init=False, default=None, compare=False)
    shift_step: int | None = field(init=False, default=None, compare=False)
    shift_arr: npt.NDArray[np.int64] = field(init=False, compare=False)

    def __post_init__(self) -> None:
        if isinstance(self.shift, str):
            match = _RANGE.fullmatch(self.shift)
            if match is None:
                raise ValueError(
                    f"shift must be an integer, a list of integers, 'from:to' or 'from:to:step', got {self.shift!r}"
                )
            self.shift_from, self.shift_to, self.shift_step = (int(part or 1) for part in match.groups())
            self.shift_arr = np.arange(self.shift_from, self.shift_to + 1, self.shift_step)
        else:
            self.shift_arr = np.atleast_1d(np.asarray(self.shift, np.int64))

    @classmethod
    def of(cls, requirement: Any) -> ViewRequirement:
        """Convert RLlib's view requirement, or an object with its attributes; return a ViewRequirement unchanged.

        Raises ColumnTypeError if the object has no attribute `shift`.

        >>> from types import SimpleNamespace
        >>> ViewRequirement.of(SimpleNamespace(data_col="actions", shift=-1)).shift_arr
        array([-1])
        """
        if isinstance(requirement, cls):
            return requirement
        if not hasattr(requirement, "shift"):
            raise ColumnTypeError(f"a view must be a ViewRequirement or RLlib's, got a {type(requirement).__name__}")
        names = [field.name for field in fields(cls) if field.init and hasattr(requirement, field.name)]
        return cls(**{name: getattr(requirement, name) for name in names})

    def to_dict(self) -> dict[str, Any]:
        """Return the arguments as JSON values in RLlib's layout; raises ArgumentError if the space is not supported.

        >>> ViewRequirement.from_dict(ViewRequirement("obs", shift="-2:0").to_dict()).shift
        '-2:0'
        """
        plain = {field.name: getattr(self, field.name) for field in fields(self) if field.init}
        return {**plain, "space": space_to_dict(self.space)}

    @classmethod
    def from_dict(cls, d: Mapping[str, Any]) -> Self:
        """Create a view requirement from the result of `to_dict` of this class or of RLlib's class.

        Raises FormatError if the description of the space is invalid.
        """
        return cls(**{**d, "space": space_from_dict(d.get("space"))})

    def source(self, name: str, index: int | None, count: int) -> tuple[str, npt.NDArray[np.int64]]:
        """Return the column and rows that the view selects at a step.

        Raises RowIndexError if there are no steps, or the view extends beyond the last step.

        Parameters
        ----------
        name
            The view's name.
        index
            Step in [0, count), or None for the step after the last one.
        count
            Number of steps.

        Returns
        -------
        column
            Name of the column.
        steps
            Rows of the column, shape (k,); negative rows precede the first step.

        Examples
        --------
        >>> ViewRequirement(shift="-2:0").source("obs", None, 3)
        ('new_obs', array([0, 1, 2]))
        """
        if not count:
            raise RowIndexError("a batch without steps has none to look at")
        column = self.data_col or name
        if index is not None:
            steps = index + self.shift_arr
            if steps.max(initial=0) >= count:
                raise RowIndexError(
                    f"view {name!r} looks at step {steps.max()} of column {column!r}, which has {count}"
                )
            return column, steps
        if column in _AFTER_LAST:
            return _AFTER_LAST[column], count - 1 + self.shift_arr
        return column, np.minimum(count + self.shift_arr, count - 1)

    def rows(self, column: Column, steps: npt.NDArray[np.int64]) -> Any:
        """Gather rows, with zeros for steps before the first step: shape (1, ...), or (1, window, ...) for windows."""
        inside = np.flatnonzero(steps >= 0)
        rows = column.take(steps[inside])
        values = (rows if len(inside) == len(steps) else rows.spread(len(steps), inside)).values
        return values if isinstance(self.shift, (int, np.integer)) else values[None]


def view_step(batch: SampleBatch[Any], requirements: Mapping[str, Any], index: int | str) -> dict[str, Any]:
    """Gather the views that are required to compute actions at one step; views of nested columns are nested.

    `index` is the step, or `"last"` for the step after the last step; see `SampleBatch.get_single_step_input_dict`.
    """
    if index != "last" and not -batch.count <= int(index) < batch.count:
        raise RowIndexError(f"step {index} is outside the batch, which has {batch.count}")
    step = None if index == "last" else int(index) % batch.count
    columns = batch._rowwise()
    views = {}
    for name, declared in requirements.items():
        requirement = ViewRequirement.of(declared)
        if requirement.used_for_compute_actions:
            source, steps = requirement.source(name, step, batch.count)
            rows = {path: requirement.rows(columns[path], steps) for path in batch._leaves(source)}
            views[name] = unflatten(source, batch._nested.get(source), rows.__getitem__)
    return views


_MAX_NBYTES = 1 << 28
"""Maximum size in bytes of an array in a space's description."""


def space_to_dict(space: Any) -> dict[str, Any] | None:
    """Return the description of a Gymnasium space; None for None.

    Raises ArgumentError if the class of `space` is not supported.

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
    """Create a space from a description that this library or RLlib wrote; inverse of `space_to_dict`.

    Raises FormatError if `described` does not describe a space. Raises MissingExtraError if Gymnasium is not installed.
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
        raise FormatError(f"a space must be described by arguments of a {kind}: {error}") from error


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
        lambda s: {"spaces": [space_to_dict(space) for space in s.spaces]},
        lambda d: {"spaces": [space_from_dict(space) for space in d["spaces"]]},
    ),
    "Dict": (
        "dict",
        lambda s: {"spaces": {name: space_to_dict(space) for name, space in s.spaces.items()}},
        lambda d: {"spaces": {name: space_from_dict(space) for name, space in d["spaces"].items()}},
    ),
    "Text": (
        "text",
        lambda s: {"min_length": s.min_length, "max_length": s.max_length, "charset": s.characters},
        lambda d: {"min_length": d["min_length"], "max_length": d["max_length"], "charset": d["charset"]},
    ),
}  # fmt: skip
"""Name, encoder and decoder by class of a space. A decoder returns the class's arguments for a description."""
