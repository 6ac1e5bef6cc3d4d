"""Nested batches as pytrees of torch, optree and JAX, and in torch's data loaders and processes.

They are registered with each library as soon as it has been imported.
"""

from __future__ import annotations

import copyreg
import sys
from collections.abc import Callable, Iterable
from typing import Any, cast

from samplebatch.batch.nested.node import Node, node

modules_seen = -1
"""How many modules were loaded when `register_where_loaded` last looked."""

_registered: set[str] = set()


def register_where_loaded(cls: type[Node]) -> None:
    """Register the class of nested batches, once, with every library that has been imported."""
    global modules_seen
    modules_seen = len(sys.modules)
    for module, register in _LIBRARIES.items():
        if module not in _registered and module in sys.modules:
            _registered.add(module)
            register(cls)


def _flatten(source: Node) -> tuple[list[Any], tuple[type[Node], tuple[str, ...]]]:
    names = sorted(source.__dict__)
    return [source.__dict__[name] for name in names], (type(source), tuple(names))


def _unflatten(children: Iterable[Any], context: tuple[type[Node], tuple[str, ...]]) -> Node:
    # Libraries rebuild trees around markers of their own: the children are kept whatever they are.
    return node(context[0], dict(zip(context[1], children, strict=True)))


def _register_torch(cls: type[Node]) -> None:
    from torch.utils import _pytree as torch_pytree

    def with_keys(source: Node) -> tuple[list[Any], Any]:
        leaves, context = _flatten(source)
        return [(torch_pytree.MappingKey(name), leaf) for name, leaf in zip(context[1], leaves, strict=True)], context

    torch_pytree.register_pytree_node(
        cls, _flatten, _unflatten, flatten_with_keys_fn=with_keys, serialized_type_name="samplebatch.Batch"
    )


def register_processes(cls: type[Node]) -> None:
    """Let torch's own way with tensors between processes, shared memory, have those of nested batches too.

    Another way that somebody has registered for them stays.
    """
    from multiprocessing.reduction import ForkingPickler

    if cls not in ForkingPickler._extra_reducers:  # type: ignore[attr-defined]
        ForkingPickler.register(cls, lambda source: (copyreg.__newobj__, (cls,), source.__dict__))  # type: ignore[attr-defined]


def _register_loader(cls: type[Node]) -> None:
    """Let `DataLoader`'s own collate function know nested batches."""
    from torch.utils.data._utils.collate import default_collate_fn_map

    nested: Any = cls

    def collate(rows: Any, *, collate_fn_map: Any = None) -> Any:
        batch = rows if isinstance(rows, nested) else nested.stack(rows)
        return nested.to_torch(batch, keep_objects=True)

    default_collate_fn_map[cls] = collate


def _register_optree(cls: type[Node]) -> None:
    import optree

    def flatten(source: Node) -> tuple[list[Any], Any, tuple[str, ...]]:
        leaves, context = _flatten(source)
        return leaves, context, context[1]

    def unflatten(context: Any, children: Iterable[Any]) -> Node:
        return _unflatten(children, context)

    namespace: Any = optree.registry.__GLOBAL_NAMESPACE
    optree.register_pytree_node(
        cast("Any", cls),
        cast("Any", flatten),
        cast("Any", unflatten),
        path_entry_type=optree.MappingEntry,
        namespace=namespace,
    )


def _register_jax(cls: type[Node]) -> None:
    from jax import tree_util

    def with_keys(source: Node) -> tuple[list[Any], Any]:
        leaves, context = _flatten(source)
        return [(tree_util.DictKey(name), leaf) for name, leaf in zip(context[1], leaves, strict=True)], context

    def unflatten(context: Any, children: Iterable[Any]) -> Node:
        return _unflatten(children, context)

    tree_util.register_pytree_with_keys(cls, with_keys, unflatten, _flatten)


_LIBRARIES: dict[str, Callable[[type[Node]], None]] = {
    "torch.utils._pytree": _register_torch,
    "torch.multiprocessing": register_processes,
    "torch.utils.data": _register_loader,
    "optree": _register_optree,
    "jax": _register_jax,
}
"""Module to what is to be done once it is there."""
