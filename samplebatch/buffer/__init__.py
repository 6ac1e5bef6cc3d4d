"""Replay buffers: rings of slots, column stores, and samplers."""

from __future__ import annotations

import sys
from importlib import import_module
from types import ModuleType
from typing import Any

_MOVED = {
    "cached": "vector",
    "compressed_store": "stores",
    "list_buffer": "vector",
    "priorities": "samplers",
    "sampling": "samplers",
}
"""Modules that pickles of older versions name, and those that have their classes now."""


class _MovedModule(ModuleType):
    """Alias of a moved module, for unpickling; attributes are looked up in the module's new location."""

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        return getattr(import_module(f"{__name__}.{_MOVED[self.__name__.rpartition('.')[2]]}"), name)


for _name in _MOVED:
    sys.modules.setdefault(f"{__name__}.{_name}", _MovedModule(f"{__name__}.{_name}"))
