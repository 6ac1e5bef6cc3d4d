"""Interchange: nested batches in pickles, as pytrees, in torch's loaders and processes, and in Tianshou's protocol.

The class is registered with each library as soon as that has been imported.
"""

from __future__ import annotations

import copyreg
import sys
from collections.abc import Callable, Iterable
from typing import Any, cast

import numpy.typing as npt

from samplebatch.batch.nested.node import ARRAY, KINDS, NODE, TENSOR, Node, node

modules_seen = -1
"""How many modules were loaded when `register_where_loaded` last looked."""

_registered: set[str] = set()


def register_where_loaded(cls: type[Node]) -> None:
    """Register the class of nested batches with every imported library, once each."""
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
    # Libraries rebuild trees around markers of their own: the children are kept unparsed.
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
    """Register nested batches for pickling between processes, so that torch moves their tensors to shared memory.

    A reducer that is registered already stays.
    """
    from multiprocessing.reduction import ForkingPickler

    if cls not in ForkingPickler._extra_reducers:  # type: ignore[attr-defined]
        ForkingPickler.register(cls, lambda source: (copyreg.__newobj__, (cls,), source.__dict__))  # type: ignore[attr-defined]


def _register_loader(cls: type[Node]) -> None:
    """Register nested batches with the default collate function of `DataLoader`."""
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


def _register_tianshou(cls: type[Node]) -> None:
    from tianshou.data.batch import BatchProtocol

    # The protocol asks for `__getattr__`, which would make every attribute slower.
    cast("Any", BatchProtocol).register(cls)


_LIBRARIES: dict[str, Callable[[type[Node]], None]] = {
    "torch.utils._pytree": _register_torch,
    "torch.multiprocessing": register_processes,
    "torch.utils.data": _register_loader,
    "optree": _register_optree,
    "jax": _register_jax,
    "tianshou.data.types": _register_tianshou,
}
"""Module to the function that registers nested batches once it is imported."""


class _PickledTensor:
    """Tensor within a pickle: the array of its elements alone, which can travel out of band.

    torch itself pickles the whole storage that a slice is a view of, and never out of band.
    """

    __slots__ = ("requires_grad", "values")

    def __init__(self, tensor: Any) -> None:
        self.requires_grad = tensor.requires_grad
        self.values = tensor.detach().resolve_conj().resolve_neg().numpy()

    def __reduce__(self) -> tuple[Any, ...]:
        return _restore_tensor, (self.values, self.requires_grad)


def _restore_tensor(values: npt.NDArray[Any], requires_grad: bool) -> Any:
    import torch

    # Out-of-band buffers may be read-only; a tensor over them would be a way around the protection.
    tensor = torch.from_numpy(values if values.flags.writeable else values.copy())
    return tensor.requires_grad_() if requires_grad else tensor


def values_to_pickle(source: Node) -> dict[str, Any]:
    """Return the values of one node for pickling: tensors on the host as arrays."""
    held = source.__dict__
    if all(KINDS[type(value)] in (ARRAY, NODE) for value in held.values()):
        return held
    return {name: _to_pickle(value) for name, value in held.items()}


def _to_pickle(value: Any) -> Any:
    if KINDS[type(value)] != TENSOR or value.device.type != "cpu" or value.grad_fn is not None:
        return value
    import torch

    plain = type(value) is torch.Tensor and value.layout is torch.strided and not value.is_quantized
    return _PickledTensor(value) if plain and str(value.dtype) in _NUMPY_DTYPES else value


_NUMPY_DTYPES = frozenset(
    f"torch.{name}"
    for name in (
        "bool", "uint8", "uint16", "uint32", "uint64", "int8", "int16", "int32", "int64", "float16", "float32",
        "float64", "complex64", "complex128",
    )
)  # fmt: skip
