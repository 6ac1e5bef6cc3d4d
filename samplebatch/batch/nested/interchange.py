"""Interchange of nested batches: pickles, pytrees, torch's data loaders and processes, and Tianshou's protocol.

The class `Batch` is registered with each library as soon as this package and the library are imported.
"""

from __future__ import annotations

import sys
import threading
import warnings
from collections.abc import Callable, Iterable
from contextlib import suppress
from typing import Any, cast

import numpy.typing as npt

from samplebatch.batch.nested.node import ARRAY, KINDS, NODE, PEER_CLASSES, TENSOR, Node, node


def register_where_loaded(cls: type[Any], libraries: Iterable[str]) -> None:
    """Register a class with each library: immediately if the library is imported, otherwise after the library's import.

    A failed registration only emits a warning, so that the library's import succeeds.
    """
    for module in libraries:
        if module in sys.modules:
            _register_with(module, cls)
        else:
            _registrar.waiting.setdefault(module, []).append(cls)
    if _registrar.waiting and _registrar not in sys.meta_path:
        # Inserted first, because an earlier finder would return the module's spec.
        sys.meta_path.insert(0, cast("Any", _registrar))


def _register_with(module: str, cls: type[Any]) -> None:
    try:
        _LIBRARIES[module](cls)
    except Exception as error:
        warnings.warn(f"{cls.__name__} could not be registered with {module}: {error!r}", RuntimeWarning, stacklevel=2)


class _Registrar:
    """Import finder that registers classes with a library after the library's import."""

    def __init__(self) -> None:
        self.waiting: dict[str, list[type[Any]]] = {}
        """Pending classes by module name."""
        self._searches: set[tuple[int, str]] = set()
        """Thread and module of each active search; prevents recursion through other finders."""

    def find_spec(self, name: str, path: Any = None, target: Any = None) -> Any:
        """Return the module spec from the other finders, with a loader that registers pending classes after loading."""
        search = (threading.get_ident(), name)
        if name not in self.waiting or search in self._searches:
            return None
        self._searches.add(search)
        try:
            finders = [finder for finder in sys.meta_path if hasattr(finder, "find_spec")]
            specs = (finder.find_spec(name, path, target) for finder in finders)
            spec = next((spec for spec in specs if spec is not None), None)
        finally:
            self._searches.discard(search)
        if spec is not None and hasattr(spec.loader, "exec_module"):
            self._register_after(spec.loader, name)
        return spec

    def _register_after(self, loader: Any, name: str) -> None:
        execute = loader.exec_module

        def exec_module(module: Any) -> None:
            execute(module)
            if module.__name__ != name:
                return
            vars(loader).pop("exec_module", None)
            for cls in self.waiting.pop(name, ()):
                _register_with(name, cls)
            if not self.waiting and self in sys.meta_path:
                sys.meta_path.remove(cast("Any", self))

        # On the loader itself: a loader of another type would hide the module's source and resources.
        with suppress(AttributeError):
            loader.exec_module = exec_module


_registrar = _Registrar()


def _flatten(source: Any) -> tuple[list[Any], tuple[type[Any], tuple[str, ...]]]:
    values = source if isinstance(source, dict) else source.__dict__
    names = sorted(values)
    return [values[name] for name in names], (type(source), tuple(names))


def _unflatten(children: Iterable[Any], context: tuple[type[Any], tuple[str, ...]]) -> Any:
    cls, names = context
    values = dict(zip(names, children, strict=True))
    # Libraries rebuild trees with their own markers as leaves, so children are stored unconverted.
    return cls(values) if issubclass(cls, dict) else node(cls, values)


def _register_torch(cls: type[Any]) -> None:
    from torch.utils import _pytree as torch_pytree

    def with_keys(source: Any) -> tuple[list[Any], Any]:
        leaves, context = _flatten(source)
        return [(torch_pytree.MappingKey(name), leaf) for name, leaf in zip(context[1], leaves, strict=True)], context

    torch_pytree.register_pytree_node(
        cls, _flatten, _unflatten, flatten_with_keys_fn=with_keys, serialized_type_name=f"samplebatch.{cls.__name__}"
    )


def register_processes(cls: type[Node]) -> None:
    """Register nested batches with `ForkingPickler`, so that torch moves their tensors to shared memory.

    An existing reducer is not replaced.
    """
    from multiprocessing.reduction import ForkingPickler

    if cls not in ForkingPickler._extra_reducers:  # type: ignore[attr-defined]
        ForkingPickler.register(cls, lambda source: (node, (cls, {}), source.__dict__))


def _register_loader(cls: type[Node]) -> None:
    from torch.utils.data._utils.collate import default_collate_fn_map

    nested: Any = cls

    def collate(rows: Any, *, collate_fn_map: Any = None) -> Any:
        batch = rows if isinstance(rows, nested) else nested.stack(rows)
        return nested.to_torch(batch, keep_objects=True)

    default_collate_fn_map[cls] = collate


def _register_optree(cls: type[Any]) -> None:
    import optree

    def flatten(source: Any) -> tuple[list[Any], Any, tuple[str, ...]]:
        leaves, context = _flatten(source)
        return leaves, context, context[1]

    def unflatten(context: Any, children: Iterable[Any]) -> Any:
        return _unflatten(children, context)

    namespace: Any = optree.registry.__GLOBAL_NAMESPACE
    optree.register_pytree_node(
        cast("Any", cls),
        cast("Any", flatten),
        cast("Any", unflatten),
        path_entry_type=optree.MappingEntry,
        namespace=namespace,
    )


def _register_jax(cls: type[Any]) -> None:
    from jax import tree_util

    def with_keys(source: Any) -> tuple[list[Any], Any]:
        leaves, context = _flatten(source)
        return [(tree_util.DictKey(name), leaf) for name, leaf in zip(context[1], leaves, strict=True)], context

    def unflatten(context: Any, children: Iterable[Any]) -> Any:
        return _unflatten(children, context)

    tree_util.register_pytree_with_keys(cls, with_keys, unflatten, _flatten)


def _register_tianshou(cls: type[Node]) -> None:
    from tianshou.data.batch import Batch, BatchProtocol

    PEER_CLASSES[cls] = Batch
    # The protocol requires `__getattr__`, which would make every attribute access slower.
    cast("Any", BatchProtocol).register(cls)


PYTREES = frozenset({"torch.utils._pytree", "optree", "jax"})
"""Modules of libraries that map functions over trees."""

_LIBRARIES: dict[str, Callable[[type[Any]], None]] = {
    "torch.utils._pytree": _register_torch,
    "torch.multiprocessing": register_processes,
    "torch.utils.data": _register_loader,
    "optree": _register_optree,
    "jax": _register_jax,
    "tianshou.data.types": _register_tianshou,
}
"""Mapping from a module to the function that registers a class after the module's import."""

LIBRARIES = frozenset(_LIBRARIES)
"""Modules of the libraries with which nested batches are registered."""


class _PickledTensor:
    """Pickled form of a tensor: only the viewed elements, as an array that supports out-of-band buffers.

    torch itself pickles the entire storage of a view, and never uses out-of-band buffers.
    """

    __slots__ = ("requires_grad", "values")

    def __init__(self, tensor: Any) -> None:
        self.requires_grad = tensor.requires_grad
        self.values = tensor.detach().resolve_conj().resolve_neg().numpy()

    def __reduce__(self) -> tuple[Any, ...]:
        return _restore_tensor, (self.values, self.requires_grad)


def _restore_tensor(values: npt.NDArray[Any], requires_grad: bool) -> Any:
    import torch

    # Out-of-band buffers may be read-only; a tensor over a read-only buffer would bypass the protection.
    tensor = torch.from_numpy(values if values.flags.writeable else values.copy())
    return tensor.requires_grad_() if requires_grad else tensor


def values_to_pickle(source: Node) -> dict[str, Any]:
    """Return the values of one node in picklable form; tensors on the host are converted to arrays."""
    columns = source.__dict__
    if all(KINDS[type(value)] in (ARRAY, NODE) for value in columns.values()):
        return columns
    return {name: _to_pickle(value) for name, value in columns.items()}


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
