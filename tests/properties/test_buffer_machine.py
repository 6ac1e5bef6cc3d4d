"""Random operations on every buffer class, compared with a list of episodes."""

from __future__ import annotations

import pickle
import shutil
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from samplebatch import (
    Batch,
    CachedReplayBuffer,
    PrioritizedReplayBuffer,
    PrioritizedReplayBufferManager,
    PrioritizedVectorReplayBuffer,
    ReplayBuffer,
    ReplayBufferManager,
    VectorReplayBuffer,
)
from samplebatch.errors import SampleBatchError
from tests.buffer.oracle import (
    KINDS,
    CachedOracle,
    Oracle,
    Step,
    act_of,
    batch_of,
    laid_out,
    rows_of,
    same,
    scramble,
    snapshot,
)

FORMS = ("plain", "vector", "manager", "cached")
SIZES = st.integers(1, 6)
ALPHA, BETA = 0.7, 0.5
EPSILON = float(np.finfo(np.float32).eps)


class Source:
    """Source of environment steps; observations are consecutive within an episode."""

    def __init__(self) -> None:
        self.number = 0
        self.current: dict[int, int] = {}

    def fresh(self) -> int:
        self.number += 1
        return self.number

    def step(self, env: int, rew: float, end: str, *, extra: bool = False) -> Step:
        obs = self.current.pop(env) if env in self.current else self.fresh()
        following = self.fresh()
        if end == "":
            self.current[env] = following
        return Step(obs, following, rew, "t" in end, "c" in end, extra)

    def forget(self) -> None:
        self.current.clear()


ENDS = st.sampled_from(["", "", "", "", "t", "c", "tc"])
REWARDS = st.sampled_from([0.0, 1.0, -2.5, 3.25])


class Priorities:
    """Priority of each step by observation number."""

    def __init__(self) -> None:
        self.of: dict[int, float] = {}
        self.largest = 1.0

    def enter(self, steps: Sequence[Step]) -> None:
        for s in steps:
            self.of[s.obs] = self.largest**ALPHA

    def update(self, number: int, weight: float) -> None:
        self.of[number] = (abs(weight) + EPSILON) ** ALPHA

    def seen(self, weights: Sequence[float]) -> None:
        self.largest = max([self.largest, *(abs(weight) + EPSILON for weight in weights)])


class BufferMachine(RuleBasedStateMachine):
    """Buffer and the oracle of its contents."""

    @initialize(
        form=st.sampled_from(FORMS),
        prioritized=st.booleans(),
        kind=st.sampled_from(sorted(KINDS)),
        sizes=st.lists(SIZES, min_size=1, max_size=4),
        stack_num=st.sampled_from([1, 1, 2, 4]),
        ignore_obs_next=st.booleans(),
        sample_avail=st.booleans(),
        compress=st.booleans(),
        in_a_folder=st.booleans(),
    )
    def make(
        self,
        form: str,
        prioritized: bool,
        kind: str,
        sizes: list[int],
        stack_num: int,
        ignore_obs_next: bool,
        sample_avail: bool,
        compress: bool,
        in_a_folder: bool,
    ) -> None:
        self.folder = Path(tempfile.mkdtemp())
        prioritized = prioritized and form != "cached"
        options = {"stack_num": stack_num, "ignore_obs_next": ignore_obs_next, "sample_avail": sample_avail}
        if kind == "ragged":
            options["ragged"] = True
        elif compress and kind in ("image", "nested", "vector"):
            options["compress"] = True
        storage: dict[str, Any] = {}
        if in_a_folder and form in ("plain", "vector") and kind not in ("objects", "ragged") and len(options) == 3:
            storage["storage"] = self.folder / "buffer"
        arguments: dict[str, Any] = options | ({"alpha": ALPHA, "beta": BETA} if prioritized else {})
        plain: Any = PrioritizedReplayBuffer if prioritized else ReplayBuffer
        if form == "plain":
            sizes = sizes[:1]
            self.buf = plain(sizes[0], **arguments, **storage)
        elif form == "vector":
            sizes = [sizes[0]] * len(sizes)
            vector: Any = PrioritizedVectorReplayBuffer if prioritized else VectorReplayBuffer
            self.buf = vector(sum(sizes), len(sizes), **arguments, **storage)
        elif form == "manager":
            manager: Any = PrioritizedReplayBufferManager if prioritized else ReplayBufferManager
            self.buf = manager([plain(size, **arguments) for size in sizes])
        else:
            self.buf = CachedReplayBuffer(plain(sizes[0], **arguments), len(sizes), 5)
            sizes = [sizes[0]] + [5] * len(sizes)
        self.form, self.kind, self.options, self.in_a_folder = form, kind, options, bool(storage)
        result = CachedOracle if form == "cached" else Oracle
        self.oracle = result(sizes, stack_num=stack_num, ignore_obs_next=ignore_obs_next)
        self.envs = len(sizes) - (form == "cached")
        self.source = Source()
        self.priorities = Priorities() if prioritized else None
        self.started = False
        self.returned: list[tuple[Any, list[list[Any]]]] = []

    def entered(self, new: Sequence[Step]) -> None:
        self.started = True
        if self.priorities is not None:
            self.priorities.enter(new)

    # Adding

    @rule(data=st.data(), all_of_them=st.booleans(), extra=st.sampled_from([False, False, False, True]))
    def add(self, data: st.DataObject, all_of_them: bool, extra: bool) -> None:
        envs = list(range(self.envs))
        if not all_of_them or self.form == "plain":
            envs = data.draw(st.lists(st.sampled_from(envs), unique=True, min_size=1))
        self.add_to(envs, data, extra=extra)

    def add_to(self, envs: list[int], data: st.DataObject, *, extra: bool) -> None:
        new = [self.source.step(env, data.draw(REWARDS), data.draw(ENDS), extra=extra) for env in envs]
        rows = batch_of(new, self.kind)
        if envs == list(range(self.envs)) and self.form != "plain":
            actual = self.buf.add(rows)
        else:
            actual = self.buf.add(rows, buffer_ids=data.draw(st.sampled_from([list, np.array]))(envs))
        scramble(rows)
        self.returned.append((actual, self.oracle.add(new, envs)))
        self.entered(new)

    @precondition(lambda self: self.form == "plain")
    @rule(rew=REWARDS, end=ENDS)
    def add_one(self, rew: float, end: str) -> None:
        new = self.source.step(0, rew, end)
        rows = batch_of([new], self.kind)
        actual = self.buf.add(rows[0])
        scramble(rows)
        self.returned.append((actual, self.oracle.add([new], [0])))
        self.entered([new])

    @precondition(lambda self: self.started)
    @rule(bad=st.sampled_from(["act", "shape", "length", "missing", "structure", "ids", "unknown", "rew", "new key"]))
    def add_nothing(self, bad: str) -> None:
        envs = list(range(self.envs))
        new = [Step(-1, -2, 1.0) for _ in envs]
        rows = batch_of(new, self.kind)
        if bad == "act":
            rows.act = np.full((len(envs), 2), 0.5)
        elif bad == "shape":
            rows.policy.logits = np.zeros((len(envs), 4), np.float32)
        elif bad == "length":
            rows.act = rows.act[[0] * (len(envs) + 1)]
        elif bad == "missing":
            rows.pop("obs")
        elif bad == "structure":
            rows.obs = rows_of("vector" if self.kind == "nested" else "nested", [1] * len(envs))
        elif bad == "ids":
            envs = [*envs, 0]
        elif bad == "unknown":
            envs[-1] = 9
        elif bad == "rew":
            rows.rew = np.array(["much"] * len(envs))
        else:
            rows.extra = np.arange(len(envs))
            rows.info = Batch(n=np.full(len(envs), 0.5))
        before = snapshot(self.buf)
        with pytest.raises((SampleBatchError, ValueError, TypeError)):
            self.buf.add(rows, buffer_ids=envs)
        assert snapshot(self.buf) == before

    @precondition(lambda self: self.form == "plain")
    @rule(data=st.data(), size=SIZES, count=st.integers(0, 9))
    def update(self, data: st.DataObject, size: int, count: int) -> None:
        other, source = ReplayBuffer(size, **self.options), Oracle([size])
        new = [self.source.step(-1, data.draw(REWARDS), data.draw(ENDS)) for _ in range(count)]
        self.source.current.pop(-1, None)
        for s in new:
            other.add(batch_of([s], self.kind)[0])
            source.add([s], [0])
        if not count:
            return
        actual = self.buf.update(other)
        assert actual.tolist() == self.oracle.update(source)
        self.entered(source.rings[0].steps)

    @rule(keep_statistics=st.booleans())
    def reset(self, keep_statistics: bool) -> None:
        self.buf.reset(keep_statistics=keep_statistics)
        self.oracle.reset(keep_statistics=keep_statistics)
        self.source.forget()

    # Reading

    @precondition(lambda self: len(self.oracle))
    @rule(n=st.integers(1, 8))
    def sample(self, n: int) -> None:
        if self.buf.options["sample_avail"] and self.oracle.stack_num > 1 and not self.oracle.whole_stacks():
            return
        rows, indices = self.buf.sample(n)
        assert indices.shape == (n,)
        self.rows_are_those_of(rows, indices.tolist())
        if self.buf.options["sample_avail"] and self.oracle.stack_num > 1 and self.priorities is None:
            assert set(indices.tolist()) <= set(self.oracle.whole_stacks())

    @precondition(lambda self: len(self.oracle))
    @rule(data=st.data(), form=st.sampled_from([list, np.array]))
    def index(self, data: st.DataObject, form: Any) -> None:
        indices = data.draw(st.lists(st.sampled_from(self.oracle.indices()), min_size=1, max_size=6))
        self.rows_are_those_of(self.buf[form(indices)], indices)
        first = self.buf[indices[0]]
        assert same(first.act, np.asarray(self.buf[[indices[0]]].act)[0])

    @precondition(lambda self: len(self.oracle))
    @rule(n=st.integers(0, 9))
    def latest(self, n: int) -> None:
        newest = [i for (ring, j), i in zip(self.oracle.places(), self.oracle.indices(), strict=True)
                  if j >= len(ring.steps) - n]  # fmt: skip
        self.rows_are_those_of(self.buf.latest(n), newest)

    @precondition(lambda self: len(self.oracle))
    @rule(size=st.integers(1, 9), shuffle=st.booleans(), drop_last=st.booleans())
    def minibatches(self, size: int, shuffle: bool, drop_last: bool) -> None:
        expected = self.oracle.indices()
        if self.options["sample_avail"] and self.oracle.stack_num > 1:
            expected = self.oracle.whole_stacks()
        actual: list[int] = []
        for rows, indices in self.buf.minibatches(size, shuffle=shuffle, drop_last=drop_last):
            assert len(indices) == size or (not drop_last and len(actual) + len(indices) == len(expected))
            self.rows_are_those_of(rows, indices.tolist())
            actual += indices.tolist()
        assert len(actual) == len(expected) // size * size if drop_last else sorted(actual) == sorted(expected)
        assert shuffle or actual == expected[: len(actual)]

    @precondition(lambda self: len(self.oracle))
    @rule(n_step=st.integers(1, 4))
    def several_steps(self, n_step: int) -> None:
        rows, indices = self.buf.sample(0, n_step=n_step, gamma=0.5)
        places = dict(zip(self.oracle.indices(), self.oracle.places(), strict=True))
        for i, index in enumerate(indices.tolist()):
            ring, j = places[index]
            window = [ring.steps[j]]
            while len(window) < n_step and ring.next(j) != j:
                j = ring.next(j)
                window.append(ring.steps[j])
            assert rows.returns[i] == sum(0.5**k * s.rew for k, s in enumerate(window))
            assert rows.discount[i] == (0.0 if window[-1].terminated else 0.5 ** len(window))

    @precondition(lambda self: len(self.oracle))
    @rule(unfinished=st.booleans())
    def episodes(self, unfinished: bool) -> None:
        expected = [
            rows for rows, ended, is_complete in self.oracle.episodes() if is_complete and (ended or unfinished)
        ]
        actual, indices = self.buf.sample_episodes(0, unfinished=unfinished)
        assert [part.tolist() for part in indices] == expected
        if self.priorities is None:
            for episode, rows in zip(actual, expected, strict=True):
                self.rows_are_those_of(episode, rows)

    @precondition(lambda self: len(self.oracle))
    @rule(length=st.integers(1, 5), burn_in=st.integers(0, 4))
    def sequences(self, length: int, burn_in: int) -> None:
        burn_in = min(burn_in, length - 1)
        requested = self.oracle.indices()
        batch, indices = self.buf.get_sequences(requested, length, burn_in=burn_in)
        valid = {index: (rows, i) for rows, _, _ in self.oracle.episodes() for i, index in enumerate(rows)}
        for row, index in enumerate(requested):
            rows, i = valid[index]
            expected = rows[max(i - burn_in, 0) :][:length]
            assert indices[row].tolist() == expected + [-1] * (length - len(expected))
        assert batch.mask.tolist() == (indices >= 0).tolist()
        places = np.array(
            [{i: position for position, i in enumerate(requested)}.get(i, 0) for i in indices.ravel().tolist()]
        )
        assert same(batch.act[batch.mask], act_of(self.oracle.newest())[places[batch.mask.ravel()]])

    def numbers(self, indices: Any) -> list[int]:
        """Return the numbers of the steps at indices."""
        of = {i: ring.steps[j].obs for i, (ring, j) in zip(self.oracle.indices(), self.oracle.places(), strict=True)}
        return [of[i] for i in np.asarray(indices).tolist()]

    def rows_are_those_of(self, rows: Any, indices: list[int]) -> None:
        places = {index: position for position, index in enumerate(self.oracle.indices())}
        assert set(indices) <= set(places)
        self.oracle.check_rows(rows, self.kind, [places[index] for index in indices])
        if self.priorities is not None:
            weights = np.array([self.priorities.of[number] for number in self.numbers(indices)]) ** -BETA
            np.testing.assert_allclose(rows.weight, weights / weights.max(initial=0.0), rtol=1e-6)
        scramble(rows)

    # Priorities

    @precondition(lambda self: self.priorities is not None and len(self.oracle))
    @rule(data=st.data(), weights=st.lists(st.sampled_from([0.0, 0.5, -3.0, 20.0]), min_size=1, max_size=5))
    def update_weight(self, data: st.DataObject, weights: list[float]) -> None:
        choices = st.sampled_from(self.oracle.indices())
        indices = data.draw(st.lists(choices, min_size=len(weights), max_size=len(weights)))
        self.buf.update_weight(np.array(indices), np.array(weights))
        assert self.priorities is not None
        for number, weight in zip(self.numbers(indices), weights, strict=True):
            self.priorities.update(number, weight)
        self.priorities.seen(weights)

    @precondition(lambda self: self.priorities is not None and len(self.oracle))
    @rule(data=st.data(), n=st.integers(1, 8), adds=st.integers(0, 6), empty=st.booleans())
    def update_weight_late(self, data: st.DataObject, n: int, adds: int, empty: bool) -> None:
        """Update priorities after some of their rows may have been overwritten."""
        rows, indices = self.buf.sample(n)
        numbers = self.numbers(indices)
        if empty:
            self.reset(keep_statistics=False)
        for _ in range(adds):
            self.add_to(list(range(self.envs)), data, extra=False)
        weights = np.arange(n) + 1.0
        self.buf.update_weight(indices, weights, generation=rows.generation)
        assert self.priorities is not None
        living = {ring.steps[j].obs for ring, j in self.oracle.places()}
        arrived = [(number, weight) for number, weight in zip(numbers, weights, strict=True) if number in living]
        for number, weight in arrived:
            self.priorities.update(number, weight)
        self.priorities.seen([weight for _, weight in arrived])

    # Carrying on elsewhere

    @rule()
    def pickle(self) -> None:
        before = laid_out(self.buf)
        again = pickle.loads(pickle.dumps(self.buf))
        # What is compressed is not, byte for byte, what it was before, and what comes out of a folder is in memory.
        assert "compress" in self.options or self.in_a_folder or laid_out(again) == before
        self.replace(again)

    @rule(how=st.sampled_from(["state", "arrow", "hdf5", "folder"]))
    def keep(self, how: str) -> None:
        if how == "folder":
            if self.in_a_folder:
                self.buf.close()
                self.buf = type(self.buf).open(self.folder / "buffer")
            return
        generator_state = self.buf._rng.bit_generator.state
        if how == "state":
            self.buf.load_state_dict(self.buf.state_dict())
        elif how == "arrow":
            self.buf.save(self.folder / "buffer.arrow")
            again = type(self.buf).load(self.folder / "buffer.arrow", allow_pickle=self.kind == "objects")
            self.replace(again)
        elif self.kind not in ("objects", "ragged"):
            self.buf.save_hdf5(str(self.folder / "buffer.hdf5"))
            self.replace(type(self.buf).load_hdf5(str(self.folder / "buffer.hdf5")))
        assert self.buf._rng.bit_generator.state == generator_state

    def replace(self, buf: ReplayBuffer) -> None:
        if self.in_a_folder:
            self.oracle.check(buf, self.kind)
        else:
            self.buf = buf

    def teardown(self) -> None:
        if hasattr(self, "buf"):
            self.buf.close()
            shutil.rmtree(self.folder)

    @invariant()
    def everything_is_as_it_must_be(self) -> None:
        if not hasattr(self, "buf"):
            return
        self.oracle.check(self.buf, self.kind)
        # What was returned earlier must not have changed since.
        for actual, expected in self.returned[-8:]:
            assert [part.tolist() for part in actual] == expected
        if self.priorities is not None:
            indices = self.oracle.indices()
            weights = [self.priorities.of[number] for number in self.numbers(indices)]
            np.testing.assert_allclose(self.buf.weight[indices], weights, rtol=1e-6)
            np.testing.assert_allclose(self.buf.weight.reduce(), sum(weights), rtol=1e-6, atol=1e-12)


TestBuffers = BufferMachine.TestCase
TestBuffers.settings = settings(max_examples=60, stateful_step_count=25)
