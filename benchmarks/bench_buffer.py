"""`buffer.*`: operations on replay buffers.

A transition consists of an observation and a next observation of 17 floats each, an action of 6 floats, and scalars.
cpprb and Stable-Baselines3 store neither episodes nor infos, so their times are a lower bound for buffers.
"""

from __future__ import annotations

from functools import cache
from itertools import cycle
from typing import Any

import numpy as np

from benchmarks import bare
from benchmarks.harness import Row, Way, row

MILLION = 1_000_000
ENVS = 16
EPISODE = 100
"""Steps per episode."""
ROLLOUT = 128
"""Steps per environment in a rollout."""


def transitions(rows: int, seed: int = 7) -> dict[str, Any]:
    """Create transitions with Tianshou's column names."""
    rng = np.random.default_rng(seed)
    ends = np.arange(rows) % EPISODE == EPISODE - 1
    return {
        "obs": rng.standard_normal((rows, 17), dtype=np.float32),
        "act": rng.standard_normal((rows, 6), dtype=np.float32),
        "rew": rng.standard_normal(rows),
        "terminated": ends,
        "truncated": np.zeros(rows, bool),
        "done": ends,
        "obs_next": rng.standard_normal((rows, 17), dtype=np.float32),
    }


def first_step(columns: dict[str, Any]) -> dict[str, Any]:
    """Return the first transition as arrays and Python numbers, as an environment returns a step."""
    return {k: v[0] if v.ndim > 1 else v[0].item() for k, v in columns.items() if k != "done"}


@cache
def a_million() -> dict[str, Any]:
    """Create a million transitions; the result is cached."""
    return transitions(MILLION)


def full_buffer(lib: Any, columns: dict[str, Any]) -> Any:
    """Create a full buffer of transitions."""
    return lib.ReplayBuffer.from_data(**columns)


def add_steps(lib: Any, buffer: Any, columns: dict[str, Any], **keywords: Any) -> Any:
    """Add transitions to a buffer, one vector step per call."""
    for i in range(len(columns["rew"])):
        buffer.add(lib.Batch({k: v[i] for k, v in columns.items()}), **keywords)
    return buffer


# One transition.


def add_setup(lib: Any, columns: Any) -> Any:
    buffer = lib.ReplayBuffer(100_000)
    batch = lib.Batch(first_step(columns))
    return lambda: buffer.add(batch)


def construct_and_add_setup(lib: Any, columns: Any) -> Any:
    buffer, step, make = lib.ReplayBuffer(100_000), first_step(columns), lib.Batch
    return lambda: buffer.add(make(**step))


def rllib_add_setup(lib: Any, columns: Any) -> Any:
    buffer = lib.ReplayBuffer(100_000)
    batch = lib.SampleBatch(columns)
    return lambda: buffer.add(batch)


def sb3_add_setup(lib: Any, columns: Any) -> Any:
    buffer, rows = lib.buffer(100_000, 17, 6), {k: v[:1] for k, v in columns.items()}
    arguments = [rows[k] for k in ("obs", "obs_next", "act", "rew", "done")]
    return lambda: buffer.add(*arguments, [{}])


def cpprb_fields() -> dict[str, Any]:
    flag = {"dtype": bool}
    return {"obs": {"shape": 17}, "act": {"shape": 6}, "rew": {}, "terminated": flag, "truncated": flag, "done": flag}


def cpprb_add_setup(lib: Any, columns: Any) -> Any:
    buffer = lib.ReplayBuffer(100_000, {**cpprb_fields(), "obs_next": {"shape": 17}})
    step = first_step(columns) | {"done": False}
    return lambda: buffer.add(**step)


def bare_add_setup(_: Any, columns: Any) -> Any:
    slots = [(np.zeros((100_000, *v.shape[1:]), v.dtype), v[0]) for v in columns.values()]
    positions = cycle(range(100_000))

    def call() -> None:
        i = next(positions)
        for memory, value in slots:
            memory[i] = value

    return call


# One step of sixteen environments.


def add16_setup(lib: Any, columns: Any) -> Any:
    buffer = lib.VectorReplayBuffer(100_000, ENVS)
    batch = lib.Batch({k: v for k, v in columns.items() if k != "done"})
    return lambda: buffer.add(batch)


def rllib_add16_setup(lib: Any, columns: Any) -> Any:
    buffer = lib.ReplayBuffer(100_000)
    steps = [lib.SampleBatch({k: v[i : i + 1] for k, v in columns.items()}) for i in range(ENVS)]

    def call() -> None:
        for step in steps:
            buffer.add(step)

    return call


def sb3_add16_setup(lib: Any, columns: Any) -> Any:
    buffer = lib.buffer(100_000, 17, 6, n_envs=ENVS)
    arguments = [columns[k] for k in ("obs", "obs_next", "act", "rew", "done")]
    infos: list[dict[str, Any]] = [{} for _ in range(ENVS)]
    return lambda: buffer.add(*arguments, infos)


def bare_add16_setup(_: Any, columns: Any) -> Any:
    length = 100_000 // ENVS
    slots = [(np.zeros((length, *v.shape), v.dtype), v) for v in columns.values()]
    positions = cycle(range(length))

    def call() -> None:
        i = next(positions)
        for memory, values in slots:
            memory[i] = values

    return call


# One rollout: many steps of sixteen environments.


def by_step(columns: Any) -> list[dict[str, Any]]:
    """Split a rollout into steps of all environments."""
    return [{k: v[i : i + ENVS] for k, v in columns.items()} for i in range(0, ROLLOUT * ENVS, ENVS)]


def our_rollout_setup(lib: Any, columns: Any) -> Any:
    buffer = lib.VectorReplayBuffer(100_000, ENVS)
    batch = lib.Batch({k: v for k, v in columns.items() if k != "done"})
    ids = np.tile(np.arange(ENVS), ROLLOUT)
    return lambda: buffer.add(batch, buffer_ids=ids)


def tianshou_rollout_setup(lib: Any, columns: Any) -> Any:
    buffer = lib.VectorReplayBuffer(100_000, ENVS)
    batches = [lib.Batch({k: v for k, v in step.items() if k != "done"}) for step in by_step(columns)]

    def call() -> None:
        for batch in batches:
            buffer.add(batch)

    return call


def sb3_rollout_setup(lib: Any, columns: Any) -> Any:
    buffer = lib.buffer(100_000, 17, 6, n_envs=ENVS)
    steps = [[step[k] for k in ("obs", "obs_next", "act", "rew", "done")] for step in by_step(columns)]
    infos: list[dict[str, Any]] = [{} for _ in range(ENVS)]

    def call() -> None:
        for step in steps:
            buffer.add(*step, infos)

    return call


def bare_rollout_setup(_: Any, columns: Any) -> Any:
    length = 100_000 // ENVS
    columns_by_env = [v.reshape(ROLLOUT, ENVS, *v.shape[1:]).swapaxes(0, 1) for v in columns.values()]
    slots = [(np.zeros((ENVS, length, *v.shape[2:]), v.dtype), v) for v in columns_by_env]
    starts = cycle(range(0, length - ROLLOUT, ROLLOUT))

    def call() -> None:
        start = next(starts)
        for memory, values in slots:
            memory[:, start : start + ROLLOUT] = values

    return call


# Sampling.


def sample_setup(lib: Any, columns: Any) -> Any:
    buffer = full_buffer(lib, columns)
    return lambda: buffer.sample(256)


def cpprb_sample_setup(lib: Any, columns: Any) -> Any:
    buffer = lib.ReplayBuffer(len(columns["rew"]), {**cpprb_fields(), "obs_next": {"shape": 17}})
    buffer.add(**columns)
    return lambda: buffer.sample(256)


def sb3_sample_setup(lib: Any, columns: Any) -> Any:
    rows = len(columns["rew"])
    buffer = lib.buffer(rows, 17, 6)
    for name, sb3_name in (("obs", "observations"), ("obs_next", "next_observations"), ("act", "actions")):
        getattr(buffer, sb3_name)[:, 0] = columns[name]
    buffer.rewards[:, 0], buffer.dones[:, 0] = columns["rew"], columns["done"]
    buffer.full = True
    return lambda: buffer.sample(256)


def bare_sample_setup(_: Any, columns: Any) -> Any:
    rng, rows = np.random.default_rng(7), len(columns["rew"])
    pairs = [(v, np.ones((256, *v.shape[1:]), v.dtype)) for v in columns.values()]

    def call() -> None:
        indices = rng.integers(0, rows, 256)
        for values, out in pairs:
            values.take(indices, 0, out, "clip")

    return call


# Stacked frames.

FRAMES = 10_000


@cache
def frames() -> dict[str, Any]:
    """Create transitions whose observations are greyscale frames of 84 x 84 pixels."""
    rng = np.random.default_rng(7)
    images = rng.integers(0, 256, (FRAMES, 84, 84), np.uint8)
    ends = np.arange(FRAMES) % EPISODE == EPISODE - 1
    return {"obs": images, "act": np.zeros(FRAMES, np.int64), "rew": np.zeros(FRAMES), "terminated": ends}


def stack_setup(available: bool) -> Any:
    def setup(lib: Any, columns: Any) -> Any:
        buffer = lib.ReplayBuffer(FRAMES, stack_num=4, ignore_obs_next=True, sample_avail=available)
        batch, truncated = lib.Batch, False
        for obs, act, rew, end in zip(*columns.values(), strict=True):
            buffer.add(batch(obs=obs, act=act, rew=rew, terminated=end, truncated=truncated, obs_next=obs))
        return lambda: buffer.sample(32)

    return setup


def cpprb_stack_setup(lib: Any, columns: Any) -> Any:
    fields = {"obs": {"shape": (84, 84, 4), "dtype": np.uint8}, "act": {"dtype": np.int64}, "rew": {}, "done": {}}
    buffer = lib.ReplayBuffer(FRAMES, fields, next_of="obs", stack_compress="obs")
    images = columns["obs"]
    for i in range(3, FRAMES - 1):
        obs, next_obs = (np.moveaxis(images[j - 3 : j + 1], 0, -1) for j in (i, i + 1))
        end = bool(columns["terminated"][i])
        buffer.add(obs=obs, next_obs=next_obs, act=0, rew=0.0, done=end)
        if end:
            buffer.on_episode_end()
    return lambda: buffer.sample(32)


def bare_stack_setup(_: Any, columns: Any) -> Any:
    rng, images = np.random.default_rng(7), columns["obs"]
    offsets, outs = np.arange(-3, 1), [np.ones((32, 4, 84, 84), np.uint8) for _ in range(2)]

    def call() -> None:
        indices = rng.integers(4, FRAMES - 1, 32)
        for shift, out in enumerate(outs):
            images.take(indices[:, None] + (offsets + shift), 0, out, "clip")

    return call


# Adjacent steps in episodes, and reading slices.

INDICES = np.random.default_rng(3).integers(0, MILLION, 256)
INDICES_16 = np.random.default_rng(3).integers(0, 100_000, 256)


def adjacent_setup(lib: Any, columns: Any) -> Any:
    buffer = full_buffer(lib, columns)
    return lambda: (buffer.prev(INDICES), buffer.next(INDICES))


def bare_adjacent_setup(_: Any, columns: Any) -> Any:
    done = columns["done"]

    def call() -> Any:
        previous = (INDICES - 1) % MILLION
        return np.where(done[previous], INDICES, previous), np.where(done[INDICES], INDICES, (INDICES + 1) % MILLION)

    return call


def vector_setup(lib: Any, columns: Any) -> Any:
    steps = len(columns["rew"]) // ENVS
    by_step = {k: v.reshape(steps, ENVS, *v.shape[1:]) for k, v in columns.items() if k != "done"}
    return add_steps(lib, lib.VectorReplayBuffer(steps * ENVS, ENVS), by_step)


def reading_row(key: slice) -> Row:
    """Declare the row for reading a slice of a buffer of 20,000 transitions."""
    name = "all.20k" if key == slice(None) else f"slice{key.stop - key.start}"

    def setup(lib: Any, columns: Any) -> Any:
        buffer = full_buffer(lib, columns)
        return lambda: buffer[key]

    def columns_of(result: Any) -> dict[str, Any]:
        return {k: result[k] for k in ("obs", "act", "rew", "terminated", "truncated", "done", "obs_next")}

    return row(
        f"buffer.getitem.{name}",
        lambda: transitions(20_000),
        traffic=True,
        view=columns_of,
        ours=Way(setup),
        tianshou=Way(setup),
        bare=Way(lambda lib, columns: bare.copy_setup(lib, {k: v[key] for k, v in columns.items()}), bare.copy),
    )


ROWS = [
    row(
        "buffer.add1",
        lambda: transitions(1),
        view=None,
        ours=Way(add_setup),
        rllib=Way(rllib_add_setup),
        tianshou=Way(add_setup),
        sb3=Way(sb3_add_setup),
        cpprb=Way(cpprb_add_setup),
        bare=Way(bare_add_setup),
    ),
    row(
        "buffer.add1+construct",
        lambda: transitions(1),
        view=None,
        ours=Way(construct_and_add_setup),
        tianshou=Way(construct_and_add_setup),
        cpprb=Way(cpprb_add_setup),
    ),
    row(
        "buffer.add16",
        lambda: transitions(ENVS),
        view=None,
        ours=Way(add16_setup),
        rllib=Way(rllib_add16_setup),
        tianshou=Way(add16_setup),
        sb3=Way(sb3_add16_setup),
        bare=Way(bare_add16_setup),
    ),
    row(
        "buffer.add16.rollout128",
        lambda: transitions(ENVS * ROLLOUT),
        view=None,
        traffic=True,
        ours=Way(our_rollout_setup),
        tianshou=Way(tianshou_rollout_setup),
        sb3=Way(sb3_rollout_setup),
        bare=Way(bare_rollout_setup),
    ),
    row(
        "buffer.sample256.1e6",
        a_million,
        view=None,
        ours=Way(sample_setup),
        tianshou=Way(sample_setup),
        cpprb=Way(cpprb_sample_setup),
        sb3=Way(sb3_sample_setup),
        bare=Way(bare_sample_setup),
    ),
    row(
        "buffer.sample32.stack4",
        frames,
        traffic=True,
        view=None,
        ours=Way(stack_setup(False)),
        tianshou=Way(stack_setup(False)),
        cpprb=Way(cpprb_stack_setup),
        bare=Way(bare_stack_setup),
    ),
    row(
        "buffer.sample32.stack4.avail",
        frames,
        traffic=True,
        view=None,
        ours=Way(stack_setup(True)),
        tianshou=Way(stack_setup(True)),
        bare=Way(bare_stack_setup),
    ),
    row(
        "buffer.prev+next256.1e6",
        a_million,
        ours=Way(adjacent_setup),
        tianshou=Way(adjacent_setup),
        bare=Way(bare_adjacent_setup),
    ),
    row(
        "buffer.vec16.prev+next256",
        lambda: transitions(100_000),
        ours=Way(vector_setup, lambda buffer: (buffer.prev(INDICES_16), buffer.next(INDICES_16))),
        tianshou=Way(vector_setup, lambda buffer: (buffer.prev(INDICES_16), buffer.next(INDICES_16))),
    ),
    row(
        "buffer.vec16.sample256",
        lambda: transitions(100_000),
        view=None,
        ours=Way(vector_setup, lambda buffer: buffer.sample(256)),
        tianshou=Way(vector_setup, lambda buffer: buffer.sample(256)),
    ),
    reading_row(slice(100, 1100)),
    reading_row(slice(None)),
]
