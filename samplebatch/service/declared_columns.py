"""DeclaredColumns: required columns of a replay table, and validation of fragments against them."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Mapping
from math import prod
from typing import Any, Final

import numpy as np

from samplebatch import names
from samplebatch.batch.flags import DEFAULT
from samplebatch.batch.multi_agent import MultiAgentBatch
from samplebatch.batch.sample_batch import SampleBatch
from samplebatch.column.convert import match_ragged
from samplebatch.column.interface import Column
from samplebatch.column.ragged import RaggedColumn
from samplebatch.column.text import TEXT, TextColumn
from samplebatch.column.torch_tensor import RaggedTorchColumn
from samplebatch.column.types import NUMBERS, check_torch_name, named_dtype, named_torch_dtype
from samplebatch.errors import ArgumentError, ColumnMismatchError, ColumnTypeError, near_names

_MAX_AXES: Final = 32
_MAX_ELEMENTS: Final = 2**31 - 1
_MAX_NAME_NBYTES: Final = 256
_NON_NUMERIC_DTYPES: Final[dict[Any, str]] = {
    **dict.fromkeys((str, "str", "text"), "text"),
    **dict.fromkeys((bytes, "bytes"), "bytes"),
    **dict.fromkeys((object, "object"), "object"),
}
_DTYPE_NAMES: Final = (*sorted(str(dtype) for dtype in NUMBERS), "text", "bytes", "object")
_FORM: Final = re.compile(r"(?P<dtype>.+?)(?:\[(?P<shape>[0-9?x, ]*)\])?", re.DOTALL)
_MUST: Final = (
    "must be declared as a dtype such as 'float32', as a dtype and a row shape such as 'float32[4]' or "
    "('float32', (4,)), or as 'text', 'bytes' or 'object'"
)

_IDS: Final = {
    **dict.fromkeys(
        (names.EPS_ID, names.ENV_ID, names.AGENT_INDEX, names.T, names.UNROLL_ID, names.WEIGHTS_VERSION), "int64"
    ),
    names.EPS_DONE: "bool",
}
"""Columns that steps may contain without a declaration, and their fixed dtypes."""

_BUFFER_FLAGS: Final = (names.TERMINATEDS, names.TRUNCATEDS, names.DONES)
_FRAMES: Final = (names.OBS, names.NEXT_OBS)

Forms = dict[str, str]
"""Dtype and row shape of each column, as text, by column name."""


class DeclaredColumns:
    """Declaration of the columns that each fragment of a replay table must contain, for `ReplayTable`.

    - `columns`: mapping of column names to types; for fragments of several policies, one such mapping per policy. A
      type is a dtype such as `"float32"`, or a dtype and a row shape, such as `("float32", (4,))`, `"float32[4]"` or
      `"uint8[84x84x3]"`. `"torch.float32[4]"` declares a torch column. `"float32[?]"` declares rows of varying shape,
      with one `?` per axis. `"text"`, `"bytes"` and `"object"`, or `str`, `bytes` and `object`, are also accepted.
      Names of nested columns contain dots. Instead of a mapping, a string of `NAME:DTYPE[SHAPE]` entries joined by `+`
      is accepted; for several policies, each entry is `POLICY/NAME:DTYPE[SHAPE]`.

    Raises ArgumentError if a dtype is unknown, a row shape is invalid, or a name is declared twice.

    >>> declared = DeclaredColumns({"obs": ("float32", (4,)), "actions": int, "prompt": "text"})
    >>> print(declared)
    obs:float32[4]+actions:int64+prompt:text
    >>> declared == DeclaredColumns("obs:float32[4]+actions:int64+prompt:text")
    True
    >>> declared.match_fragment(SampleBatch(obs=[1.0]))
    Traceback (most recent call last):
    samplebatch.errors.ColumnMismatchError: column 'obs' must be float32[4], as the table
        declares, got float64
    """

    def __init__(self, columns: Mapping[Any, Any] | str) -> None:
        pairs = _split_text(columns) if isinstance(columns, str) else columns
        if isinstance(pairs, SampleBatch) or not isinstance(pairs, Mapping) or not pairs:
            raise ArgumentError(
                f"columns must be a mapping of names to dtypes, or NAME:DTYPE[SHAPE]+..., got {type(columns).__name__}"
                if pairs or not isinstance(pairs, Mapping)
                else "columns must declare at least one column, got none; omit the argument to declare no columns"
            )
        has_policies = {isinstance(value, Mapping) for value in pairs.values()}
        if len(has_policies) > 1:
            raise ArgumentError(
                "columns must all be of one policy, or all by policy, got both; nested columns have names with "
                "dots, such as 'obs.camera'"
            )
        self._policies: dict[Any, Forms] = (
            {policy: _forms_of(part, policy) for policy, part in pairs.items()}
            if has_policies == {True}
            else {None: _forms_of(pairs)}
        )

    @classmethod
    def from_state(cls, state: Any) -> DeclaredColumns | None:
        """Restore the declarations from the result of `state`; return None if the state is None.

        Raises ArgumentError, TypeError or ValueError if the state is invalid.
        """
        if state is None:
            return None
        pairs = {policy: dict(forms) for policy, forms in state}
        return cls(pairs[None] if list(pairs) == [None] else pairs)

    def state(self) -> list[Any]:
        """Return plain values from which `from_state` restores the declarations."""
        return [[policy, [list(pair) for pair in forms.items()]] for policy, forms in self._policies.items()]

    def describe(self) -> dict[str, Any]:
        """Return the dtype and row shape of each column, as text, by column name or by policy and column name."""
        return {str(policy): dict(forms) for policy, forms in self._policies.items()} if self.by_policy else self.flat

    @property
    def by_policy(self) -> bool:
        """Whether columns are declared separately for each policy."""
        return list(self._policies) != [None]

    @property
    def flat(self) -> Forms:
        """Dtype and row shape of each column, as text, by name; requires one declaration for all policies."""
        return dict(self._policies[None])

    def __str__(self) -> str:
        parts = [
            f"{name}:{form}" if policy is None else f"{policy}/{name}:{form}"
            for policy, forms in self._policies.items()
            for name, form in forms.items()
        ]
        return "+".join(parts)

    def __repr__(self) -> str:
        return f"DeclaredColumns({str(self)!r})"

    def __eq__(self, other: object) -> bool:
        return isinstance(other, DeclaredColumns) and self._policies == other._policies

    def __hash__(self) -> int:
        return hash(str(self))

    def for_steps(self) -> DeclaredColumns:
        """Return the declarations under RLlib's column names, as required for tables of steps.

        Raises ArgumentError if columns are declared separately for each policy, because all policies share the columns
        of steps. Raises ArgumentError if two declared names correspond to the same RLlib name.
        """
        if self.by_policy:
            raise ArgumentError(
                "columns of a table of steps must be declared once for all policies, got columns by policy"
            )
        forms: Forms = {}
        for name, form in self.flat.items():
            if _step_name(name) in forms:
                raise ArgumentError(f"column {_step_name(name)!r} must be declared once, got {name!r} as well")
            forms[_step_name(name)] = form
        return DeclaredColumns(forms)

    # Checks

    def match_fragment(self, fragment: SampleBatch[Any] | MultiAgentBatch[Any]) -> Any:
        """Check that a fragment contains exactly the declared columns.

        Returns
        -------
        The fragment; columns that are declared as ragged are returned as ragged, even if their rows have equal shapes.

        Raises
        ------
        ColumnMismatchError
            If a declared column is missing, a column or policy is undeclared, or a column differs from its declaration.
            If the fragment sets `time_major` or `zero_padded`.
        """
        if isinstance(fragment, MultiAgentBatch) != self.by_policy:
            requirement, actual = (
                ("have policies", "no policies") if self.by_policy else ("be of one policy", "several policies")
            )
            raise ColumnMismatchError(f"a fragment must {requirement}, as the table declares, got {actual}")
        if not isinstance(fragment, MultiAgentBatch):
            return _match(fragment, self.flat, _is_never, {})
        parts = {}
        for policy, part in fragment.policy_batches.items():
            if policy not in self._policies:
                raise ColumnMismatchError(
                    f"policy {_short(policy)!r} must be one that the table declares; "
                    f"{near_names(policy, self._policies)}"
                )
            parts[policy] = _match(part, self._policies[policy], _is_never, {}, f"policy {policy!r}: ")
        return MultiAgentBatch(parts, fragment.env_steps())

    def match_steps(self, rows: SampleBatch[Any]) -> SampleBatch[Any]:
        """Check that steps contain exactly the declared columns, under RLlib's or Tianshou's names.

        Declared infos may be missing. The int64 columns `eps_id`, `env_id`, `agent_index`, `t`, `unroll_id` and
        `weights_version`, and the bool column `eps_done`, are accepted without a declaration.

        Raises ColumnMismatchError in the same cases as `match_fragment`.
        """
        return _match(rows, self.flat, _is_info, _IDS, rename=_step_name)

    def check_stored(self, rows: SampleBatch[Any], *, last_frames: bool = False) -> None:
        """Check a stored row of a replay buffer, except flags and rewards, because the buffer determines their dtypes.

        - `rows`: batch of the stored row, with RLlib's column names.
        - `last_frames`: whether the buffer stores only the last frame of each observation; observations are then not
          checked.

        Raises ColumnMismatchError in the same cases as `match_fragment`.
        """
        free = (names.REWARDS, *_BUFFER_FLAGS, *(_FRAMES if last_frames else ()))
        columns = {name: column for name, column in rows._all().items() if name not in free}
        forms = {
            # Buffers store text as objects.
            name: "object" if form.partition("[")[0] in ("text", "bytes") else form
            for name, form in self.flat.items()
            if name not in free
        }
        columns = {
            name: column
            for name, column in columns.items()
            if not (column.kind == "text" and forms.get(name) == "object")
        }
        absent = [name for name, form in forms.items() if form == "object"]
        _match(
            rows._with(columns),
            forms,
            lambda name: _is_info(name) or name in absent or name == names.NEXT_OBS,
            _IDS,
        )


def _is_never(_: str) -> bool:
    return False


def _is_info(name: str) -> bool:
    return name == names.INFOS or name.startswith(f"{names.INFOS}.")


def _step_name(name: str) -> str:
    """Convert the name of a step column to RLlib's name.

    >>> _step_name("act"), _step_name("info.lives"), _step_name("new_obs")
    ('actions', 'infos.lives', 'new_obs')
    """
    top, dot, below = name.partition(".")
    return names.TO_FLAT.get(top, top) + dot + below


def _match(
    batch: SampleBatch[Any],
    forms: Forms,
    may_lack: Callable[[str], bool],
    others: Mapping[str, str],
    where: str = "",
    rename: Callable[[str], str] = str,
) -> SampleBatch[Any]:
    """Validate the columns of a batch against declared dtypes and row shapes; return the batch with ragged columns.

    - `may_lack`: function that returns whether a declared column may be missing, given the column's name.
    - `others`: dtype and row shape, as text, of each column that is accepted without a declaration.
    - `where`: prefix of error messages.
    - `rename`: function that maps a column name of the batch to the declared name.

    Raises ColumnMismatchError in the same cases as `DeclaredColumns.match_fragment`.
    """
    flags = batch._flags
    if (flags.time_major, flags.zero_padded) != (DEFAULT.time_major, DEFAULT.zero_padded):
        raise ColumnMismatchError(
            f"{where}rows must not set time_major or zero_padded in a table that declares columns, got "
            f"time_major={flags.time_major} and zero_padded={flags.zero_padded}"
        )
    columns = batch._all()
    missing = set(forms)
    matched: dict[str, Column] = {}
    for name, column in columns.items():
        declared_name = rename(name)
        missing.discard(declared_name)
        form = forms.get(declared_name) or others.get(declared_name)
        if form is None:
            raise ColumnMismatchError(
                f"{where}column {_short(name)!r} must be declared by the table to be in a fragment, got "
                f"{_form_of(column)}; {near_names(_short(name), forms)}"
            )
        if _form_of(column) != form:
            fitted = _as_ragged(column, form, name)
            if fitted is None or _form_of(fitted) != form:
                source = "as the table declares" if declared_name in forms else "if the table does not declare it"
                raise ColumnMismatchError(f"{where}column {name!r} must be {form}, {source}, got {_form_of(column)}")
            matched[name] = fitted
    absent = sorted(name for name in missing if not may_lack(name))
    if absent:
        raise ColumnMismatchError(
            f"{where}column {absent[0]!r} must be {forms[absent[0]]}, as the table declares, got none"
        )
    return batch._with({**columns, **matched}) if matched else batch


def _as_ragged(column: Column, form: str, name: str) -> Column | None:
    """View a column as ragged if the declared row shape `form` is ragged; otherwise return None."""
    dtype, _, shape = form.partition("[")
    if "?" not in shape:
        return None
    is_torch = dtype.startswith("torch.")
    element_dtype: Any = named_torch_dtype(dtype.removeprefix("torch.")) if is_torch else np.dtype(dtype)
    return match_ragged(column, element_dtype, shape.count("?"), name)


def _form_of(column: Column) -> str:
    if isinstance(column, TextColumn):
        dtype = "text" if column.array.type == TEXT else "bytes"
    elif column.kind == "object":
        return "object"
    else:
        # The dtype of a torch column starts with "torch.".
        dtype = f"compressed {column.dtype}" if column.kind == "compressed" else str(column.dtype)
    if isinstance(column, (RaggedColumn, RaggedTorchColumn)):
        return dtype + _shape_text([None] * len(column.row_shape))
    return dtype + _shape_text(column.row_shape)


def _shape_text(shape: Iterable[int | None]) -> str:
    extents = ["?" if extent is None else str(extent) for extent in shape]
    return f"[{'x'.join(extents)}]" if extents else ""


def _short(name: Any) -> str:
    """Shorten an untrusted name for an error message."""
    return str(name)[:80]


# Declarations


def _split_text(text: str) -> dict[Any, Any]:
    declared: dict[Any, Any] = {}
    for part in text.split("+"):
        name, colon, form = part.rpartition(":")
        policy, slash, column = name.partition("/")
        if not colon or not name or not form or (slash and not (policy and column)):
            raise ArgumentError(f"columns must be declared as NAME:DTYPE[SHAPE], joined by '+', got {part[:80]!r}")
        columns = declared.setdefault(policy, {}) if slash else declared
        column = column if slash else name
        if not isinstance(columns, dict) or column in columns:
            raise ArgumentError(f"column {name!r} must be declared once, got it twice")
        columns[column] = form
    return declared


def _forms_of(columns: Mapping[Any, Any], policy: Any = None) -> Forms:
    where = "" if policy is None else f"policy {policy!r}: "
    if policy is not None and not isinstance(policy, (str, int)):
        raise ArgumentError(f"policy {policy!r} must be a string or an integer, got a {type(policy).__name__}")
    if not columns:
        raise ArgumentError(f"{where}columns must declare at least one column, got none")
    for name in columns:
        if not isinstance(name, str) or not 0 < len(name.encode(errors="replace")) <= _MAX_NAME_NBYTES:
            raise ArgumentError(
                f"{where}the name of a declared column must be a string of 1 to {_MAX_NAME_NBYTES} bytes, got "
                f"{_short(name)!r}"
            )
    for name in columns:
        parts = name.split(".")
        outer = next((top for i in range(1, len(parts)) if (top := ".".join(parts[:i])) in columns), None)
        if outer is not None:
            raise ArgumentError(f"{where}column {outer!r} must be declared as nested or not, got {name!r} as well")
    return {name: _form_of_value(f"{where}column {name!r}", value) for name, value in columns.items()}


def _form_of_value(subject: str, value: Any) -> str:
    shape: Any = ()
    is_pair = isinstance(value, (tuple, list))
    if is_pair:
        if len(value) != 2:
            raise ArgumentError(f"{subject} {_MUST}, got a {type(value).__name__} of {len(value)}")
        value, shape = value
    elif isinstance(value, str):
        match = _FORM.fullmatch(value)
        if match is None:
            raise ArgumentError(f"{subject} {_MUST}, got {_short(value)!r}")
        value, text = match["dtype"], match["shape"]
        shape = () if text is None else tuple(map(_extent, re.split("[x,]", text)))
    dtype = _dtype_name(subject, value)
    if not isinstance(shape, (tuple, list)) or len(shape) > _MAX_AXES:
        raise ArgumentError(f"{subject} must have a row shape of at most {_MAX_AXES} axes, got {str(shape)[:80]}")
    is_ragged = any(extent is None for extent in shape)
    for extent in shape:
        is_count = isinstance(extent, int | np.integer) and not isinstance(extent, bool) and extent > 0
        if not (extent is None or is_count):
            raise ArgumentError(f"{subject} must have extents of at least 1, or '?' if they vary, got {extent!r}")
    if is_ragged and any(extent is not None for extent in shape):
        raise ArgumentError(f"{subject} must have extents that all vary, or none that does, got {_shape_text(shape)}")
    if prod(int(extent) for extent in shape if extent is not None) > _MAX_ELEMENTS:
        raise ArgumentError(f"{subject} must have at most {_MAX_ELEMENTS} elements per row, got {_shape_text(shape)}")
    if (dtype == "object" and shape) or (dtype in ("text", "bytes") and is_ragged):
        raise ArgumentError(f"{subject} must have rows of one shape if it is of {dtype}, got {_shape_text(shape)}")
    return dtype + _shape_text(shape)


def _extent(text: str) -> int | str | None:
    """Parse one extent of a row shape; return invalid text unchanged, and None for an extent that varies."""
    text = text.strip()
    # Limit the number of digits: converting millions of digits is slow.
    return None if text == "?" else int(text) if text.isdecimal() and len(text) <= 20 else text


def _dtype_name(subject: str, value: Any) -> str:
    if isinstance(value, (str, type)) and value in _NON_NUMERIC_DTYPES:
        return _NON_NUMERIC_DTYPES[value]
    text = _short(value)
    try:
        if text.startswith("torch.") and (isinstance(value, str) or type(value).__module__ == "torch"):
            check_torch_name(text.removeprefix("torch."))
            return text
        if value is None or isinstance(value, Mapping):
            raise ColumnTypeError("no dtype")
        dtype = named_dtype(text if isinstance(value, str) else str(np.dtype(value)))
    except (ColumnTypeError, TypeError, ValueError):
        raise ArgumentError(f"{subject} {_MUST}, got {text!r}; {near_names(text, _DTYPE_NAMES)}") from None
    if dtype.kind in "SU":
        raise ArgumentError(f"{subject} must be declared as 'text' or 'bytes' if its rows are strings, got {text!r}")
    return str(dtype)
