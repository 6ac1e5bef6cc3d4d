"""What a replay buffer must hold, as plain lists: rings of steps, oldest first.

An observation is a number that is never used twice, and everything else in a row follows from the number of its
observation, so an oracle keeps four facts a step: two numbers, a reward and two flags. `KINDS` says what observations
of a kind look like for given numbers; `Oracle.check` holds a buffer against all that its rows must be.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from types import FunctionType
from typing import Any

import numpy as np

from samplebatch import Batch
from tests.optional import torch


def step(n: int, **changed: Any) -> Batch:
    """Return a transition from observation n to n + 1."""
    return Batch(
        {"obs": n, "act": n, "rew": n, "terminated": 0, "truncated": 0, "obs_next": n + 1, "info": {}} | changed
    )


def steps(numbers: Sequence[int], **changed: Any) -> Batch:
    """Return one transition for each of several environments."""
    n = np.array(numbers)
    flags = np.zeros(len(n), bool)
    columns = {"obs": n, "act": n, "rew": n.astype(float), "terminated": flags, "truncated": flags, "obs_next": n + 1}
    return Batch(columns | {name: np.array(v) if isinstance(v, list) else v for name, v in changed.items()})


NAMES = ("obs", "act", "rew", "terminated", "truncated", "done", "obs_next", "info", "policy")

# Observations by number

Kind = Callable[[np.ndarray], Any]
"""From numbers of shape (...) to observations of shape (..., *row)."""


def _trailing(numbers: np.ndarray, *shape: int) -> np.ndarray:
    cells = np.arange(int(np.prod(shape))).reshape(shape)
    return numbers.reshape(*numbers.shape, *(1,) * len(shape)) + cells


KINDS: dict[str, Kind] = {
    "number": lambda numbers: numbers,
    "vector": lambda numbers: _trailing(numbers, 3).astype(np.float32) / 4,
    "tensor": lambda numbers: _trailing(numbers, 2).astype(np.float32) / 2,
    "image": lambda numbers: (_trailing(numbers * 7, 4, 5) % 251).astype(np.uint8),
    "nested": lambda numbers: {
        "camera": (_trailing(numbers * 11, 2, 2) % 251).astype(np.uint8),
        "body": {"joints": _trailing(numbers, 2) / 2, "id": numbers},
    },
    "objects": lambda numbers: _objects(numbers, lambda n: (n, f"é{n}")),
    "ragged": lambda numbers: _objects(numbers, lambda n: np.full(n % 4, n, np.int32)),
}


def _objects(numbers: np.ndarray, make: Callable[[int], Any]) -> np.ndarray:
    result = np.empty(numbers.shape, object)
    for index in np.ndindex(numbers.shape):
        result[index] = make(int(numbers[index]))
    return result


def rows_of(kind: str, numbers: Sequence[int]) -> Any:
    """Return the observations with the given numbers in the form of a vector environment."""
    return KINDS[kind](np.array(numbers, dtype=int))


def same(actual: Any, expected: Any) -> bool:
    """Return whether rows equal the expected rows exactly, in any container."""
    if isinstance(expected, dict):
        return set(actual.keys()) == set(expected) and all(same(actual[name], expected[name]) for name in expected)
    if isinstance(expected, np.ndarray) and expected.dtype == object:
        listed = [same(first, other) for first, other in zip(actual, expected, strict=True)] if expected.ndim else []
        return len(actual) == len(expected) and all(listed)
    if isinstance(expected, np.ndarray):
        actual = np.asarray(actual)
        return bool(actual.dtype == expected.dtype and actual.shape == expected.shape and (actual == expected).all())
    return bool(actual == expected)


# Rings


@dataclass(frozen=True)
class Step:
    """Transition: the numbers of its observations, its reward and its flags."""

    obs: int
    obs_next: int
    rew: float
    terminated: bool = False
    truncated: bool = False
    extra: bool = False

    @property
    def done(self) -> bool:
        return self.terminated or self.truncated


@dataclass
class Ring:
    """Newest `maxsize` steps, oldest first, and the running episode."""

    maxsize: int
    steps: list[Step] = field(default_factory=list)
    written: int = 0
    episode: list[float] = field(default_factory=list)
    start: int = 0

    def slots(self) -> list[int]:
        """Return the slot of each step; steps occupy consecutive slots."""
        return [(self.written - len(self.steps) + i) % self.maxsize for i in range(len(self.steps))]

    def store(self, new: Step) -> int:
        self.steps = [*self.steps, new][-self.maxsize :]
        self.written += 1
        return (self.written - 1) % self.maxsize

    def add(self, new: Step) -> tuple[int, float, int, int]:
        """Store a step; return its slot, and the return, length and first slot of its episode."""
        slot = self.store(new)
        self.episode.append(new.rew)
        actual = (slot, sum(self.episode), len(self.episode), self.start) if new.done else (slot, 0.0, 0, self.start)
        if new.done:
            self.episode, self.start = [], self.written % self.maxsize
        return actual

    def reset(self, *, keep_statistics: bool = False) -> None:
        self.steps, self.written, self.start = [], 0, 0
        if not keep_statistics:
            self.episode = []

    # By position in time, 0 being the oldest

    def prev(self, i: int) -> int:
        return i if i == 0 or self.steps[i - 1].done else i - 1

    def next(self, i: int) -> int:
        return i if i == len(self.steps) - 1 or self.steps[i].done else i + 1

    def episodes(self) -> list[tuple[list[int], bool, bool]]:
        """Split the steps into episodes: slots, finished or not, and whether the first step is certainly stored."""
        actual: list[tuple[list[int], bool, bool]] = []
        current: list[int] = []
        for slot, s in zip(self.slots(), self.steps, strict=True):
            current.append(slot)
            if s.done or s is self.steps[-1]:
                actual.append((current, s.done, bool(actual) or self.written <= self.maxsize))
                current = []
        return actual

    def frames(self, i: int, n: int) -> list[Step]:
        """Return the n newest steps of the episode up to i; the first step is repeated if there are fewer."""
        chosen = [i]
        while len(chosen) < n:
            chosen.insert(0, self.prev(chosen[0]))
        return [self.steps[j] for j in chosen]

    def next_frames(self, i: int, n: int) -> list[int]:
        """Return the numbers of the frames at the next observation, if next observations are not stored.

        At a termination, they equal the frames of the step. If the episode is truncated or running, or the next step
        belongs to another episode, the newest frame is the next observation that was added with the step.
        """
        here = self.steps[i]
        frames = [s.obs for s in self.frames(i, n)]
        if here.terminated:
            return frames
        if here.truncated or i == len(self.steps) - 1 or self.steps[i + 1].obs != here.obs_next:
            return [*frames[1:], here.obs_next]
        return [s.obs for s in self.frames(self.next(i), n)]


# Buffers


class Oracle:
    """Expected contents and results of a buffer with one or more rings.

    Parameters
    ----------
    sizes
        Slots of each ring.
    """

    def __init__(self, sizes: Sequence[int], *, stack_num: int = 1, ignore_obs_next: bool = False) -> None:
        self.rings = [Ring(size) for size in sizes]
        self.offsets = [sum(sizes[:i]) for i in range(len(sizes))]
        self.stack_num = stack_num
        self.ignore_obs_next = ignore_obs_next

    def __len__(self) -> int:
        return sum(len(ring.steps) for ring in self.rings)

    def add(self, new: Sequence[Step], rings: Sequence[int]) -> list[list[Any]]:
        """Add one step to each of some rings; return the expected result of `add`."""
        actual = []
        for s, ring in zip(new, rings, strict=True):
            slot, total, length, start = self.rings[ring].add(s)
            actual.append((slot + self.offsets[ring], total, length, start + self.offsets[ring]))
        return [list(part) for part in zip(*actual, strict=True)]

    def update(self, other: Oracle) -> list[int]:
        """Move the steps of another buffer, ring by ring, into the only ring; return the slots."""
        (ring,) = self.rings
        return [ring.store(s) for source in other.rings for s in source.steps]

    def reset(self, *, keep_statistics: bool = False) -> None:
        for ring in self.rings:
            ring.reset(keep_statistics=keep_statistics)

    def places(self) -> list[tuple[Ring, int]]:
        """Return ring and position of every step, ring by ring in time order: the expected order of `buf[:]`."""
        return [(ring, i) for ring in self.rings for i in range(len(ring.steps))]

    def indices(self) -> list[int]:
        """Return the index of every step in the order of `places`."""
        return [offset + slot for offset, ring in zip(self.offsets, self.rings, strict=True) for slot in ring.slots()]

    def episodes(self) -> list[tuple[list[int], bool, bool]]:
        """Split all rings into episodes; results as in `Ring.episodes`, with indices."""
        return [
            ([slot + offset for slot in slots], finished, is_complete)
            for ring, offset in zip(self.rings, self.offsets, strict=True)
            for slots, finished, is_complete in ring.episodes()
        ]

    def unfinished(self) -> list[int]:
        return [
            offset + ring.slots()[-1]
            for offset, ring in zip(self.offsets, self.rings, strict=True)
            if ring.steps and not ring.steps[-1].done
        ]

    def whole_stacks(self) -> list[int]:
        """Return the indices whose episode contains a complete stack of frames."""
        return [
            index
            for index, (ring, i) in zip(self.indices(), self.places(), strict=True)
            if len(set(ring.frames(i, self.stack_num))) == self.stack_num
        ]

    def frames(self, name: str) -> np.ndarray:
        """Return the observation numbers of `buf[:]`, shape (n,), or (n, stack_num) if frames are stacked."""
        rows = []
        for ring, i in self.places():
            if name == "obs":
                rows.append([s.obs for s in ring.frames(i, self.stack_num)])
            elif self.ignore_obs_next:
                rows.append(ring.next_frames(i, self.stack_num))
            else:
                rows.append([s.obs_next for s in ring.frames(i, self.stack_num)])
        numbers = np.array(rows, dtype=int).reshape(len(rows), self.stack_num)
        return numbers[:, 0] if self.stack_num == 1 else numbers

    def newest(self) -> np.ndarray:
        """Return the observation number of every step."""
        return np.array([ring.steps[i].obs for ring, i in self.places()], dtype=int)

    def column(self, name: str) -> np.ndarray:
        """Return the rewards or flags of every step."""
        dtype = float if name == "rew" else bool
        return np.array([getattr(ring.steps[i], name) for ring, i in self.places()], dtype)

    def check(self, buf: Any, kind: str = "number") -> None:
        """Compare a buffer with the oracle."""
        indices = self.indices()
        assert len(buf) == len(self)
        assert buf.maxsize == sum(ring.maxsize for ring in self.rings)
        assert buf.unfinished_index().tolist() == self.unfinished() if len(self) else True
        if not buf_samples_whole_stacks(buf):
            assert buf.sample_indices(0).tolist() == indices
        elif self.stack_num > 1:
            assert buf.sample_indices(0).tolist() == self.whole_stacks()
        if not indices:
            return
        for name in ("prev", "next"):
            expected = [
                offset + slots[getattr(ring, name)(i)]
                for offset, ring in zip(self.offsets, self.rings, strict=True)
                for slots in [ring.slots()]
                for i in range(len(ring.steps))
            ]
            assert getattr(buf, name)(np.array(indices)).tolist() == expected, name
            assert getattr(buf, name)(indices[-1]) == expected[-1]
        self.check_rows(buf[indices], kind)
        assert [int(i) for i in buf.last_index] == [
            offset + (ring.slots()[-1] if ring.steps else 0)
            for offset, ring in zip(self.offsets, self.rings, strict=True)
        ]

    def check_rows(self, rows: Any, kind: str, chosen: Sequence[int] | None = None) -> None:
        """Compare rows with the oracle's rows at the positions `chosen`, or with all rows."""
        picked = np.arange(len(self)) if chosen is None else np.array(chosen, int)
        obs = self.frames("obs")[picked]
        newest = obs if self.stack_num == 1 else obs[:, -1]
        assert same(rows.obs, KINDS[kind](obs)), f"obs of {obs.tolist()} is {rows.obs!r}"
        following = self.frames("obs_next")[picked]
        assert same(rows.obs_next, KINDS[kind](following)), f"obs_next of {following.tolist()} is {rows.obs_next!r}"
        assert same(rows.act, act_of(newest)), "act"
        for name in ("rew", "terminated", "truncated", "done"):
            assert same(rows[name], self.column(name)[picked]), f"{name}: {rows[name]}"
        assert same(rows.info.n, obs * 10), "info"
        assert same(rows.policy.logits, KINDS["vector"](obs)), "policy"
        original = self.column("extra")[picked]
        assert "extra" in rows if original.any() else True
        assert "extra" not in rows or same(rows.extra, np.where(original, newest, 0)), "extra"


class CachedOracle(Oracle):
    """Main ring, which is the first, and one ring per environment; finished episodes move to the main ring."""

    def add(self, new: Sequence[Step], rings: Sequence[int]) -> list[list[Any]]:
        """Add steps to rings of environments, numbered from 0."""
        actual = super().add(new, [ring + 1 for ring in rings])
        main = self.rings[0]
        for i, ring in enumerate(rings):
            if new[i].done:
                moved = [main.store(s) for s in self.rings[ring + 1].steps] if main.maxsize else [-1]
                self.rings[ring + 1].reset()
                actual[0][i], actual[3][i] = moved[-1], moved[0]
        return actual


def buf_samples_whole_stacks(buf: Any) -> bool:
    return bool(buf.options["sample_avail"])


def act_of(numbers: np.ndarray) -> np.ndarray:
    return _trailing(numbers, 2) * 3


def batch_of(new: Sequence[Step], kind: str = "number", **changed: Any) -> Batch:
    """Return steps as rows with a leading axis, like a collector."""
    obs, following = (np.array([getattr(s, name) for s in new], dtype=int) for name in ("obs", "obs_next"))
    text = (lambda numbers: torch.from_numpy(KINDS[kind](numbers))) if kind == "tensor" else KINDS[kind]
    if any(s.extra for s in new):
        changed["extra"] = np.where([s.extra for s in new], obs, 0)
    return Batch(
        {
            "obs": text(obs),
            "act": act_of(obs),
            "rew": np.array([s.rew for s in new]),
            "terminated": np.array([s.terminated for s in new]),
            "truncated": np.array([s.truncated for s in new]),
            "obs_next": text(following),
            "info": {"n": obs * 10},
            "policy": {"logits": KINDS["vector"](obs)},
        }
        | changed
    )


def scramble(rows: Any) -> None:
    """Overwrite the values of a batch, like an environment that reuses its memory."""
    for value in rows.values():
        if isinstance(value, Batch):
            scramble(value)
        elif isinstance(value, torch.Tensor):
            value.fill_(77)
        elif isinstance(value, np.ndarray) and value.flags.writeable:
            value[...] = None if value.dtype.hasobject else np.array(77).astype(value.dtype)


def laid_out(value: Any) -> Any:
    """Describe an object exactly with plain values; equal descriptions mean equal objects."""
    if value is None or isinstance(value, bool | int | float | complex | str | bytes | type | FunctionType):
        return value
    if isinstance(value, dict):
        return {name: laid_out(inner) for name, inner in value.items()}
    if isinstance(value, list | tuple):
        return [laid_out(inner) for inner in value]
    if isinstance(value, set | frozenset):
        return sorted(map(repr, value))
    if isinstance(value, torch.Tensor):
        return str(value.dtype), laid_out(value.numpy())
    if isinstance(value, np.ndarray):
        return value.dtype.str, value.shape, laid_out(value.tolist()) if value.dtype.hasobject else value.tobytes()
    if isinstance(value, np.generic | np.dtype):
        return repr(value)
    return [getattr(part, "__qualname__", None) or laid_out(part) for part in value.__reduce_ex__(4)]


def snapshot(buf: Any) -> list[Any]:
    """Describe the full contents of a buffer: its state and the bytes of every slot."""
    return [laid_out(buf), repr(buf._meta), [laid_out(getattr(buf, name, None)) for name in (*NAMES, "extra")]]
