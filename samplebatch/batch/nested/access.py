"""What a nested batch has in common with a dict."""

from __future__ import annotations

from collections.abc import ItemsView, KeysView, ValuesView
from typing import TYPE_CHECKING, Any

from samplebatch.batch.nested.node import KINDS, NODE, Node


def has_leaves(source: Node) -> bool:
    """Tell whether any value is more than a nested batch of nested batches."""
    return any(KINDS[type(value)] != NODE or has_leaves(value) for value in source.__dict__.values())


class Named(Node):
    """Access by name."""

    __slots__ = ()

    if TYPE_CHECKING:
        # At run time a value is a plain attribute, found in __dict__: a hook here would double what that costs.
        def __getattr__(self, name: str) -> Any: ...

    def __contains__(self, name: object) -> bool:
        return name in self.__dict__

    def keys(self) -> KeysView[str]:
        """Return the names, as a dict's `keys` does."""
        return self.__dict__.keys()

    def get_keys(self) -> KeysView[str]:
        """Return the names; unlike `keys`, a name that hardly collides with a column's."""
        return self.__dict__.keys()

    def values(self) -> ValuesView[Any]:
        """Return the values, as a dict's `values` does."""
        return self.__dict__.values()

    def items(self) -> ItemsView[str, Any]:
        """Return names and values, as a dict's `items` does."""
        return self.__dict__.items()

    def get(self, key: str, default: Any = None) -> Any:
        """Return the value of a name, or the default if there is none."""
        return self.__dict__.get(key, default)

    def pop(self, key: str, default: Any = None) -> Any:
        """Remove a name and return its value, or the default if there is none."""
        return self.__dict__.pop(key, default)

    def popitem(self) -> tuple[str, Any]:
        """Remove the last name, and return it with its value."""
        return self.__dict__.popitem()

    def clear(self) -> None:
        """Remove all names."""
        self.__dict__.clear()

    def is_empty(self, recurse: bool = False) -> bool:
        """Tell whether there are no names, or with `recurse` no values under any of them.

        Examples
        --------
        >>> from samplebatch.batch.nested.batch import Batch
        >>> Batch(a=Batch()).is_empty(), Batch(a=Batch()).is_empty(recurse=True)
        (False, True)
        """
        return not has_leaves(self) if recurse else not self.__dict__
