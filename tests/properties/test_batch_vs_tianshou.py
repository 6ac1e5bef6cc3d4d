"""Chains of operations do to our Batch what they do to Tianshou's.

Both start from equal values, and every operation is applied to both. Where Tianshou's raises, ours may do better; where
it does not, ours must give the same. What is known to differ is on the page `docs/migrating-from-tianshou.md`, and is
kept out of the way here, each place with a word on it.
"""

from __future__ import annotations

import pickle
import warnings
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import pytest
from hypothesis import event, given, settings
from hypothesis import strategies as st

from samplebatch.batch.nested.batch import Batch
from tests.optional import torch

with warnings.catch_warnings():
    warnings.simplefilter("ignore")
    tianshou = pytest.importorskip("tianshou.data")

NAMES = ("a", "b", "c", "obs", "x_1")

# Values: a plan is built once for each library, so that neither sees what the other did to it.

Plan = tuple[str, Any]
KINDS = ("float", "int", "bool", "float32", "matrix", "cube", "text", "tensor", "reserved", "none")


@st.composite
def leaves(draw: st.DrawFn, rows: int) -> Plan:
    kind = draw(st.sampled_from(KINDS))
    if kind == "text":
        return kind, draw(st.lists(st.sampled_from(["x", "yy", None]), min_size=rows, max_size=rows))
    return kind, (rows, draw(st.integers(0, 99)))


def plans(rows: int) -> st.SearchStrategy[Plan]:
    def dicts(inner: st.SearchStrategy[Plan], size: int) -> st.SearchStrategy[Plan]:
        items = st.dictionaries(st.sampled_from(NAMES), inner, min_size=1, max_size=size)
        return st.tuples(st.just("dict"), items)

    tree = st.recursive(leaves(rows), lambda inner: dicts(inner, 3), max_leaves=6)
    return dicts(tree, 4)


def build(plan: Plan, make: Any) -> Any:
    kind, content = plan
    if kind == "dict":
        return {name: build(inner, make) for name, inner in content.items()}
    if kind == "text":
        return np.array(content, dtype=object)
    if kind == "reserved":
        return make()
    if kind == "none":
        return None
    rows, seed = content
    rng = np.random.default_rng(seed)
    if kind == "int":
        return rng.integers(-9, 9, rows)
    if kind == "bool":
        return rng.integers(0, 2, rows).astype(bool)
    if kind == "tensor":
        return torch.from_numpy(rng.standard_normal((rows, 2)))
    floats = rng.standard_normal({"matrix": (rows, 3), "cube": (rows, 2, 2)}.get(kind, rows))
    if kind == "float":
        floats[::3] = np.nan
    return floats.astype("f4") if kind == "float32" else floats


# Results in plain words, in which equal means the same


def digits(array: Any) -> list[str]:
    """Round numbers to the precision that is independent of the order of summation."""
    places = 4 if array.dtype.itemsize < 8 else 11
    return [f"{item:.{places}e}" for item in array.ravel().tolist()]


def plain(value: Any) -> Any:
    if isinstance(value, Batch | tianshou.Batch):
        return "batch", {name: plain(inner) for name, inner in sorted(value.items())}
    if isinstance(value, dict):
        return "dict", {name: plain(inner) for name, inner in sorted(value.items())}
    if isinstance(value, torch.Tensor):
        return "tensor", str(value.dtype), tuple(value.shape), digits(value.numpy())
    if isinstance(value, np.ndarray | np.generic | int | float):
        array = np.asarray(value)
        if array.dtype == object and not array.ndim:
            return plain(array.item())
        items = [plain(item) for item in array.flat] if array.dtype.kind == "O" else digits(array)
        return "array", str(array.dtype), array.shape, items
    if isinstance(value, list | tuple | Iterator):
        return "list", [plain(item) for item in value]
    return type(value).__name__, value


# Operations: each takes a batch, and the class of the library at work, and returns the batch to go on with

Work = Callable[[Any, Any], Any]
Operation = tuple[str, Work]

INDICES = st.one_of(
    st.integers(-5, 5),
    st.slices(4).filter(lambda s: (s.step or 1) > 0),  # there, torch refuses a descending one
    st.lists(st.integers(-4, 3), max_size=5),
    st.lists(st.booleans(), min_size=4, max_size=4).map(np.array),
    st.lists(st.integers(-4, 3), max_size=5).map(lambda rows: np.array(rows, np.intp)),
    st.sampled_from([..., None, np.s_[:, 0], np.s_[..., 0], np.s_[1:, None], np.s_[None, 0]]),
)


@st.composite
def assignments(draw: st.DrawFn) -> Operation:
    source = draw(st.integers(0, 3))
    index = draw(st.one_of(st.integers(-4, 3), st.just([2]), st.just(np.s_[1:2])))
    dropped = draw(st.sampled_from(["", *NAMES]))

    def assign(batch: Any, make: Any) -> Any:
        rows = [source] if isinstance(index, list | slice) else source
        value = make(batch[rows].to_dict())
        value.pop(dropped)
        batch[index] = value
        return batch

    return "assign", assign


def indexed(index: Any) -> Operation:
    return "index", lambda batch, make: batch[index]


def joined(how: str, **options: Any) -> Work:
    return lambda batch, make: getattr(make, how)([batch, make(batch, copy=True), batch[...]], **options)


def of_each(function: Callable[[Any], Any]) -> Work:
    return lambda batch, make: function(batch)


def in_place(function: Callable[[Any], Any]) -> Work:
    def work(batch: Any, make: Any) -> Any:
        function(batch)
        return batch

    return work


def stacked_with_less(name: str) -> Operation:
    def work(batch: Any, make: Any) -> Any:
        less = make(batch)
        less.pop(name)
        # There, batches without any name vanish from a stack.
        return make.stack([batch, less, batch]) if less.keys() else batch

    return "stack with less", work


def shuffled(seed: int) -> Operation:
    def work(batch: Any, make: Any) -> Any:
        np.random.seed(seed)
        return make.cat(list(batch.split(3, shuffle=True)))

    return "shuffle", work


def popped(name: str) -> Operation:
    return "pop", in_place(lambda batch: batch.pop(name))


def added(batch: Any, make: Any) -> Any:
    batch += make(batch, copy=True)
    return batch


NAMED: list[Operation] = [
    ("stack", joined("stack")),
    ("stack along 1", joined("stack", axis=1)),
    ("cat", joined("cat")),
    ("stack_", in_place(lambda b: b.stack_([b[...]]))),
    ("cat_", in_place(lambda b: b.cat_(b[:2]))),
    ("iterate", lambda b, make: make.stack(list(b)) if len(b) else b),
    ("split", lambda b, make: make.cat(list(b.split(3, shuffle=False, merge_last=True)))),
    ("split all", lambda b, make: next(b.split(-1, shuffle=False))),
    ("add 2", of_each(lambda b: b + 2)),
    ("multiply in place", in_place(lambda b: b.__imul__(3))),
    ("divide", of_each(lambda b: b / 2)),
    ("add itself", added),
    ("mean", of_each(np.mean)),
    ("sum", of_each(np.sum)),
    ("to_torch", of_each(lambda b: b.to_torch())),
    ("to_numpy", of_each(lambda b: b.to_numpy())),
    ("to_numpy_", in_place(lambda b: b.to_numpy_())),
    ("to_torch_", in_place(lambda b: b.to_torch_())),
    ("to_dict", lambda b, make: make(b.to_dict())),
    ("to_list_of_dicts", lambda b, make: make(b.to_list_of_dicts())),
    ("empty", lambda b, make: make.empty(b)),
    ("empty row", lambda b, make: make.empty(b, 1)),
    ("empty_", in_place(lambda b: b.empty_([0, 2]))),
    ("isnull", of_each(lambda b: b.isnull())),
    ("to_at_least_2d", of_each(lambda b: b.to_at_least_2d())),
    ("reserved by None", in_place(lambda b: b.replace_empty_batches_by_none())),
    ("copy", lambda b, make: make(b, copy=True)),
    ("pickle", of_each(lambda b: pickle.loads(pickle.dumps(b)))),
    ("transform", of_each(lambda b: b.apply_values_transform(lambda value: value if value is None else value[:2]))),
    ("update", in_place(lambda b: b.update({"c": {"obs": [1, 2, 3, 4]}}, a=[0.5, 1.5, 2.5, 3.5]))),
    ("set attribute", in_place(lambda b: setattr(b, "b", [{"x_1": 1}, {"x_1": 2}, {"x_1": 3}, {"x_1": 4}]))),
    ("set item", in_place(lambda b: b.__setitem__("obs", ("a", 1, None, 2.5)))),
    ("set array", in_place(lambda b: b.set_array_at_key(np.array([7.5]), "new", index=[1]))),
]
OPERATIONS = st.one_of(
    *[st.sampled_from(NAMED[start::4]) for start in range(4)],
    INDICES.map(indexed),
    assignments(),
    st.sampled_from(NAMES).map(stacked_with_less),
    st.sampled_from(NAMES).map(popped),
    st.integers(0, 99).map(shuffled),
)


def leaves_of(value: Any) -> Iterator[Any]:
    if isinstance(value, Batch | tianshou.Batch):
        for inner in value.values():
            yield from leaves_of(inner)
    else:
        yield value


def has_tensor(batch: Any) -> bool:
    return any(isinstance(leaf, torch.Tensor) for leaf in leaves_of(batch))


def has_scalar(batch: Any) -> bool:
    return any(np.ndim(leaf) == 0 for leaf in leaves_of(batch))


def has_text(batch: Any) -> bool:
    return any(isinstance(leaf, str) for leaf in leaves_of(batch))


def has_bool_or_objects(batch: Any) -> bool:
    return any(str(getattr(leaf, "dtype", "")).endswith(("bool", "object")) for leaf in leaves_of(batch))


def has_wrapped_object(batch: Any) -> bool:
    return any(isinstance(leaf, np.ndarray) and leaf.dtype == object and not leaf.ndim for leaf in leaves_of(batch))


def has_no_rows(batch: Any) -> bool:
    return any(0 in getattr(leaf, "shape", ()) for leaf in leaves_of(batch))


def reduces_otherwise(batch: Any) -> bool:
    """Return whether reductions of the two libraries differ for a documented reason.

    In Tianshou, a batch with None has no rows, a batch without rows reduces to an array, the sum of booleans is
    boolean, the sum of objects is the sum of their rows, and longer leaves are truncated.
    """
    if has_scalar(batch) or has_bool_or_objects(batch) or not len(batch):
        return True
    shapes = [leaf.shape for leaf in leaves_of(batch)]
    return len({shape[: min(map(len, shapes))] for shape in shapes}) > 1


KNOWN: dict[str, Callable[[Any], bool]] = {
    # A tensor misses nothing there, and becomes an array when it is given dimensions.
    "isnull": has_tensor,
    "to_at_least_2d": has_tensor,
    # Scalars are stacked there whatever the axis.
    "stack along 1": has_scalar,
    "mean": reduces_otherwise,
    "sum": reduces_otherwise,
    # A string is a column of characters there.
    "index": has_text,
    "assign": has_text,
    "transform": has_text,
}
"""Operations that are known to differ, and the batches for which they do."""


def observed(batch: Any) -> list[Any]:
    """Return the results of all operations that do not change a batch."""
    answers = [sorted(batch.keys()), [name in batch for name in NAMES], plain(batch.get("a"))]
    for ask in (len, bool, lambda b: b.shape, lambda b: b.hasnull()):
        try:
            answers.append(ask(batch))
        except (TypeError, AttributeError):
            answers.append("refused")
    return answers


@settings(max_examples=300)
@given(plans(4), st.lists(OPERATIONS, min_size=1, max_size=5))
def test_chains_of_operations(plan: Plan, operations: list[Operation]) -> None:
    ours, theirs = Batch(build(plan, Batch)), tianshou.Batch(build(plan, tianshou.Batch))
    assert plain(ours) == plain(theirs)
    for name, work in operations:
        if name in KNOWN and KNOWN[name](theirs):
            continue
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            before = tianshou.Batch(theirs, copy=True)
            try:
                expected = work(theirs, tianshou.Batch)
            except Exception as error:  # whatever NumPy and torch let through there
                event(f"{name}: {type(error).__name__} there")
                theirs = before
                continue
            actual = work(ours, Batch)
        event(f"{name}: the same")
        assert plain(actual) == plain(expected), name
        ours, theirs = actual, expected
        if has_no_rows(theirs) or has_wrapped_object(theirs):
            # There, columns without rows are taken for reserved names by whatever comes next, and the array of no
            # dimension that an ellipsis makes of an object stays one until then.
            return
        if not has_tensor(theirs):
            assert observed(ours) == observed(theirs), name
