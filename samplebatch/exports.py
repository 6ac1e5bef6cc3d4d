"""Lazy imports of the public names of packages on first use."""

from __future__ import annotations

import dis
import sys
from collections.abc import Callable
from importlib import import_module
from types import CodeType, FrameType
from typing import Any

_ERRORS, _LEARN = "samplebatch.errors", "samplebatch.learn"


def exports(package: str, *more: str) -> tuple[Callable[[str], Any], Callable[[], list[str]], list[str]]:
    """Create `__getattr__`, `__dir__` and `__all__` of a package from its imports under `if TYPE_CHECKING:`.

    The `if TYPE_CHECKING:` block is the only list of a package's public names. Type checkers read the block from the
    source file; this function reads the block from the compiled code of the calling module, so source files are not
    required.

    more: public names that the package defines in its own `__init__.py`.

    Returns: `__getattr__`, `__dir__` and `__all__`. `__getattr__` imports a name on first use; for an unknown name, it
    raises AttributeError with similar names.

    >>> import samplebatch.returns
    >>> samplebatch.returns.__all__[:2], samplebatch.returns.gae.__module__
    (['NStep', 'VTrace'], 'samplebatch.returns.arrays')
    """
    homes = imported_names(sys._getframe(1).f_code)

    def load(name: str) -> Any:
        home = homes.get(name)
        if home is None:
            from samplebatch.errors import near_names

            algorithm = name.removesuffix("Policy")
            # Tianshou called its algorithms policies before 2.0.
            hint = f"did you mean {algorithm!r}?" if algorithm in homes else near_names(name, homes)
            problem = f"has no attribute {name!r}; {_other_home(package, name) or hint}"
            if _is_from_import(sys._getframe(1)):
                # `from package import name` would replace the text of an AttributeError.
                raise ImportError(f"module {package!r} {problem}", name=package)
            raise AttributeError(f"module {package!r} {problem}")
        try:
            value = getattr(import_module(home), name)
        except ModuleNotFoundError as error:
            if error.name != "torch":
                raise
            from samplebatch.errors import MissingExtraError

            raise MissingExtraError(
                f"'torch' is not installed, but {package}.{name} requires it; "
                "install it with: pip install 'samplebatch[torch]'"
            ) from error
        vars(import_module(package))[name] = value
        return value

    public = [*homes, *more]
    return load, lambda: sorted(public), public


def _other_home(package: str, name: str) -> str:
    """Return a hint that another module of `samplebatch` defines a name; empty if no module defines the name."""
    if package != "samplebatch" or name.startswith("_"):
        return ""
    error = getattr(import_module(_ERRORS), name, None)
    is_error = isinstance(error, type) and error.__module__ == _ERRORS
    home = _ERRORS if is_error else _LEARN if name in import_module(_LEARN).__all__ else ""
    return home and f"it is in {home}: from {home} import {name}"


def _is_from_import(frame: FrameType) -> bool:
    return dis.opname[frame.f_code.co_code[frame.f_lasti]] == "IMPORT_FROM"


def imported_names(code: CodeType) -> dict[str, str]:
    r"""Return the name and module of each `from samplebatch.x import name as name` in compiled code.

    >>> code = compile(
    ...     "from samplebatch.names import OBS as OBS\nfrom typing import Any", "", "exec"
    ... )
    >>> imported_names(code)
    {'OBS': 'samplebatch.names'}
    """
    homes: dict[str, str] = {}
    home = ""
    for instruction in dis.get_instructions(code):
        if instruction.opname == "IMPORT_NAME":
            home = instruction.argval
        elif instruction.opname == "IMPORT_FROM" and home.startswith("samplebatch.") and home != __name__:
            homes[instruction.argval] = home
    return homes
