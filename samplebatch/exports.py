"""Public names of packages that are loaded when they are first used."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from importlib import import_module
from typing import Any


def exports(package: str, homes: Mapping[str, str], *more: str) -> tuple[Callable[[str], Any], Callable[[], list[str]]]:
    """Make the functions `__getattr__` and `__dir__` of a package.

    Parameters
    ----------
    package
        The package's name.
    homes
        The module of each public name.
    more
        Public names that the package has by itself.

    Returns
    -------
    tuple
        `__getattr__`, which raises AttributeError with the near names of one that is not there, and `__dir__`.

    Examples
    --------
    >>> load, names = exports("samplebatch", {"SampleBatch": "samplebatch.batch.sample_batch"}, "__version__")
    >>> load("SampleBatch").__name__, names()
    ('SampleBatch', ['SampleBatch', '__version__'])
    """

    def load(name: str) -> Any:
        home = homes.get(name)
        if home is None:
            from samplebatch.errors import near_names

            raise AttributeError(f"module {package!r} has no attribute {name!r}; {near_names(name, homes)}")
        value = getattr(import_module(home), name)
        vars(import_module(package))[name] = value
        return value

    return load, lambda: sorted([*homes, *more])


def exports_of(package: str, listing: str) -> tuple[Callable[[str], Any], Callable[[], list[str]]]:
    """Make the functions `__getattr__` and `__dir__` of a package from a module that imports all its public names.

    It is for packages of which any name loads most of the others. The module is imported when a name is first used.

    Parameters
    ----------
    package
        The package's name.
    listing
        The module with the imports, and nothing else.

    Returns
    -------
    tuple
        `__getattr__`, which raises AttributeError with the near names of one that is not there, and `__dir__`.

    Examples
    --------
    >>> load, names = exports_of("samplebatch.learn", "samplebatch.learn.public_names")
    >>> load("DQN").__name__, names()[-1]
    ('DQN', 'torch_train_mode')
    """

    def names() -> list[str]:
        return sorted(name for name in vars(import_module(listing)) if not name.startswith("_"))

    def load(name: str) -> Any:
        # Who looks for other special names, such as a debugger, asks for no public one.
        if name == "__all__":
            return names()
        if name.startswith("__"):
            raise AttributeError(f"module {package!r} has no attribute {name!r}")
        return exports(package, dict.fromkeys(names(), listing))[0](name)

    return load, names
