"""The same operations on our buffers and on Tianshou's give the same.

Both get the same transitions, and every question is put to both. What is known to differ is on the page
`docs/migrating-from-tianshou.md`, and is kept out of the way here, each place with a word on it.
"""

from __future__ import annotations

import pickle
import sys
import warnings
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np
import pytest
from hypothesis import event, given, settings
from hypothesis import strategies as st

import samplebatch

with warnings.catch_warnings():
    warnings.simplefilter("ignore")
    tianshou = pytest.importorskip("tianshou.data")
    for module, names in (
        ("tianshou.data.buffer.manager", ("_prev_index", "_next_index")),
        ("tianshou.data.utils.segtree", ("_setitem", "_reduce", "_get_prefix_sum_idx")),
    ):
        for name in names:
            # Compiled, they take half a minute to do in the end the same to a few rows.
            compiled = getattr(sys.modules[module], name)
            setattr(sys.modules[module], name, getattr(compiled, "py_func", compiled))

FORMS = ("plain", "vector", "manager", "cached", "prioritized", "prioritized vector", "prioritized manager")
PRIORITIES = {"alpha": 0.7, "beta": 0.5}


@dataclass(frozen=True)
class Plan:
    """Constructor arguments of a buffer."""

    form: str
    sizes: tuple[int, ...]
    stack_num: int
    ignore_obs_next: bool
    save_only_last_obs: bool
    sample_avail: bool

    def build(self, library: Any) -> Any:
        options = {
            "stack_num": self.stack_num,
            "ignore_obs_next": self.ignore_obs_next,
            "save_only_last_obs": self.save_only_last_obs,
            "sample_avail": self.sample_avail,
        }
        prioritized = "prioritized" in self.form
        if prioritized:
            options |= PRIORITIES
        plain = library.PrioritizedReplayBuffer if prioritized else library.ReplayBuffer
        if self.form in ("plain", "prioritized"):
            return plain(self.sizes[0], **options)
        if "vector" in self.form:
            vector = library.PrioritizedVectorReplayBuffer if prioritized else library.VectorReplayBuffer
            return vector(self.sizes[0] * len(self.sizes), len(self.sizes), **options)
        if "manager" in self.form:
            manager = library.PrioritizedReplayBufferManager if prioritized else library.ReplayBufferManager
            return manager([plain(size, **options) for size in self.sizes])
        return library.CachedReplayBuffer(plain(self.sizes[0], **options), len(self.sizes), 4)

    @property
    def one_ring(self) -> bool:
        return self.form in ("plain", "prioritized")

    @property
    def envs(self) -> int:
        return 1 if self.one_ring else len(self.sizes)


plans = st.builds(
    Plan,
    st.sampled_from(FORMS),
    st.lists(st.integers(1, 6), min_size=1, max_size=4).map(tuple),
    st.sampled_from([1, 1, 2, 3, 4]),
    st.booleans(),
    st.sampled_from([False, False, True]),
    st.booleans(),
)


@dataclass
class Rows:
    """Source of the same transitions for each library; observations are consecutive within an episode."""

    plan: Plan
    nested: bool
    vector_rewards: bool
    number: int = 0
    current: dict[int, int] = field(default_factory=dict)

    def obs(self, numbers: Sequence[int]) -> Any:
        n = np.array(numbers)
        if self.plan.save_only_last_obs:  # frames that the environment has stacked, newest last
            return np.stack([n * 10 + frame for frame in range(3)], 1)
        return {"a": n.astype(np.float32), "b": {"c": n[:, None] + np.arange(2)}} if self.nested else n

    def make(self, envs: Sequence[int], ends: Sequence[str]) -> dict[str, Any]:
        numbers, following = [], []
        for env, end in zip(envs, ends, strict=True):
            numbers.append(self.current.get(env, self.number))
            self.number += 2
            following.append(self.number + env)
            self.current[env] = following[-1]
            if end:
                del self.current[env]
        self.number += 10
        n = np.array(numbers)
        return {
            "obs": self.obs(numbers),
            "act": n[:, None] / 2,
            "rew": np.stack([n, n / 4], 1) if self.vector_rewards else n / 4,
            "terminated": np.array(["t" in end for end in ends]),
            # There, a truncated step without stored next observations has its own observation for the next one.
            "truncated": np.array(["c" in end and not self.plan.ignore_obs_next for end in ends]),
            "obs_next": self.obs(following),
            "info": {"n": n},
            "policy": {"hidden": n[:, None] + np.zeros(2)},
        }


def plain(value: Any) -> Any:
    """Convert a result to plain values that compare exactly."""
    if isinstance(value, samplebatch.Batch | tianshou.Batch | dict):
        return {name: plain(inner) for name, inner in sorted(value.items())}
    if isinstance(value, tuple | list):
        return [plain(item) for item in value]
    array = np.asarray(value)
    return str(array.dtype), array.shape, array.tolist()


def asked_of(buf: Any, ask: Any) -> Any:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        return plain(ask(buf))


class Pair:
    """Buffers of both libraries that receive the same calls."""

    def __init__(self, plan: Plan, data: st.DataObject) -> None:
        self.plan, self.data = plan, data
        self.rows = Rows(plan, data.draw(st.booleans()), data.draw(st.sampled_from([False, False, True])))
        self.ours, self.theirs = plan.build(samplebatch), plan.build(tianshou)
        self.started = self.updated = False

    def both(self, name: str, ask: Any) -> None:
        """Call both buffers and compare the results; if Tianshou raises an error, this library may return a result."""
        try:
            expected = asked_of(self.theirs, ask)
        except Exception as error:  # whatever NumPy lets through there
            event(f"{name}: {type(error).__name__} there")
            return
        assert asked_of(self.ours, ask) == expected, name

    def add(self) -> None:
        envs = list(range(self.plan.envs))
        chosen = self.data.draw(st.lists(st.sampled_from(envs), unique=True, min_size=1))
        ids = None if chosen == envs and not self.plan.one_ring else chosen
        ends = [self.data.draw(st.sampled_from(["", "", "t", "c", "tc"])) for _ in chosen]
        given_rows = self.rows.make(chosen, ends)
        single = self.plan.one_ring and self.data.draw(st.booleans())

        def add(library: Any, buf: Any) -> Any:
            batch = library.Batch(given_rows, copy=True)
            return plain(buf.add(batch[0]) if single else buf.add(batch, buffer_ids=ids))

        actual, expected = add(samplebatch, self.ours), add(tianshou, self.theirs)
        # There, `update` leaves the start of the running episode where it was.
        assert actual[:3] == expected[:3]
        assert self.updated or actual[3] == expected[3]
        self.started = True

    def update(self) -> None:
        size = self.data.draw(st.integers(1, 5))
        ends = self.data.draw(st.lists(st.sampled_from(["", "t"]), min_size=1, max_size=7))
        source = replace(self.plan, form="plain", sizes=(size,))
        ours, theirs = source.build(samplebatch), source.build(tianshou)
        for end in ends:
            rows = self.rows.make([9], [end])
            ours.add(samplebatch.Batch(rows, copy=True)[0])
            theirs.add(tianshou.Batch(rows, copy=True)[0])
        actual, expected = plain(self.ours.update(ours)), plain(self.theirs.update(theirs))
        assert actual == expected
        self.started = self.updated = True
        self.rows.current.clear()

    def reset(self, keep: bool) -> None:
        self.ours.reset(keep_statistics=keep)
        self.theirs.reset(keep_statistics=keep)
        self.rows.current.clear()

    def questions(self) -> None:
        self.both("len", len)
        self.both("all", lambda buf: buf.sample_indices(0))
        self.both("none", lambda buf: buf.sample_indices(-1))
        self.both("maxsize", lambda buf: buf.maxsize)
        self.both("edges", lambda buf: buf.subbuffer_edges)
        if not self.started:
            return
        self.both("unfinished", lambda buf: buf.unfinished_index())
        self.both("last", lambda buf: buf.last_index)
        live = self.live()
        if not live:
            return
        self.both("prev", lambda buf: buf.prev(np.array(live)))
        self.both("next", lambda buf: buf.next(np.array(live)))
        self.both("prev of one", lambda buf: buf.prev(live[-1]))
        self.both("next of one", lambda buf: buf.next(live[-1]))
        for name in ("act", "rew", "terminated", "truncated", "done", "obs"):
            self.both(name, lambda buf, name=name: getattr(buf, name)[live])
        chosen = self.data.draw(st.lists(st.sampled_from(live), min_size=1, max_size=5))
        self.both("rows", lambda buf: self.rows_of(buf, np.array(chosen)))
        self.both("row", lambda buf: self.rows_of(buf, chosen[0]))
        self.both("grid", lambda buf: self.rows_of(buf, np.array([chosen, chosen])))
        if self.plan.one_ring:
            self.both("slice", lambda buf: self.rows_of(buf, slice(chosen[0], None)))
        frames = self.data.draw(st.integers(1, 4))
        for name in ("obs", "info", "rew", "policy"):
            self.both(f"get {name}", lambda buf, name=name: buf.get(np.array(chosen), name, stack_num=frames))

    def live(self) -> list[int]:
        """Return the indices of all rows, including rows without a complete stack."""
        before = self.theirs.stack_num
        parts = getattr(self.theirs, "buffers", [self.theirs])
        actual = []
        offset = 0
        for part in parts:
            part.stack_num = 1
            actual += (part.sample_indices(0) + offset).tolist()
            part.stack_num = before
            offset += part.maxsize
        return actual

    def rows_of(self, buf: Any, index: Any) -> dict[str, Any]:
        """Index a buffer; omit the next observations that are wrong in Tianshou."""
        rows = dict(buf[index].items())
        rows.pop("generation", None)  # only ours has it
        if self.plan.ignore_obs_next:
            # There, the newest step of an episode that runs on has its own observation for the next one.
            slots = np.arange(len(buf) if isinstance(index, slice) else buf.maxsize)
            running = np.isin(slots[index], buf.unfinished_index())
            following = rows.pop("obs_next")
            if self.updated:
                # There, that of the last row that was moved is the observation of another episode.
                return rows
            rows["obs_next"] = following[~running] if np.ndim(running) else None if running else following
        return rows

    def priorities(self) -> None:
        live = self.live()
        if not live or "prioritized" not in self.plan.form:
            return
        n = self.data.draw(st.integers(1, 4))
        indices = np.array([self.data.draw(st.sampled_from(live)) for _ in range(n)])
        weights = np.array([self.data.draw(st.sampled_from([0.0, 0.5, 3.0, 40.0])) for _ in range(n)])
        self.ours.update_weight(indices, weights)
        self.theirs.update_weight(indices.copy(), weights)

    def carry(self) -> None:
        self.ours = pickle.loads(pickle.dumps(self.ours))


@settings(max_examples=150)
@given(plans, st.data())
def test_the_same_operations(plan: Plan, data: st.DataObject) -> None:
    pair = Pair(plan, data)
    operations = ["add"] * 6 + ["reset", "keep", "carry", "priorities"] + ["update"] * plan.one_ring
    for operation in data.draw(st.lists(st.sampled_from(operations), min_size=1, max_size=14)):
        if operation in ("reset", "keep"):
            pair.reset(operation == "keep")
        else:
            getattr(pair, operation)()
        pair.questions()
