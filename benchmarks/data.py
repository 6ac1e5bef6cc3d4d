"""Input data of the rows; every call draws the same random numbers."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import numpy.typing as npt

Columns = dict[str, npt.NDArray[Any]]

EPISODE = 100
"""Steps per episode."""


def columns(rows: int, seed: int = 7) -> Columns:
    """Create eight columns: observations and next observations of 17 floats, actions of 6 floats, and five scalars."""
    rng = np.random.default_rng(seed)
    step = np.arange(rows)
    return {
        "obs": rng.standard_normal((rows, 17), dtype=np.float32),
        "new_obs": rng.standard_normal((rows, 17), dtype=np.float32),
        "actions": rng.standard_normal((rows, 6), dtype=np.float32),
        "rewards": rng.standard_normal(rows, dtype=np.float32),
        "terminateds": step % EPISODE == EPISODE - 1,
        "truncateds": np.zeros(rows, bool),
        "eps_id": step // EPISODE,
        "t": step % EPISODE,
    }


NAMES = list(columns(1))


def flat(rows: int) -> Callable[[], Columns]:
    """Return a function that creates eight columns of `rows` rows."""
    return lambda: columns(rows)


def fragments(count: int, rows: int) -> Callable[[], list[Columns]]:
    """Return a function that creates `count` batches of eight columns."""
    return lambda: [columns(rows, seed) for seed in range(count)]


def without(name: str, rows: int) -> Callable[[], Columns]:
    """Return a function that creates the columns except one."""
    return lambda: {k: v for k, v in columns(rows).items() if k != name}


def nested_columns(rows: int, seed: int = 7) -> dict[str, Any]:
    """Create columns whose observations are a nested dict."""
    flat = columns(rows, seed)
    sensors = {"joints": flat["obs"], "touch": flat["actions"]}
    return {
        "obs": {"sensors": sensors, "goal": flat["obs"][:, :3].copy()},
        "actions": flat["actions"].copy(),
        "rewards": flat["rewards"],
        "terminateds": flat["terminateds"],
    }


def sequences() -> Columns:
    """Create 200 concatenated sequences of 1 to 20 steps."""
    lengths = np.random.default_rng(7).integers(1, 21, 200).astype(np.int32)
    return {**columns(int(lengths.sum())), "seq_lens": lengths}


def floats() -> npt.NDArray[np.float32]:
    """Create 1000 rows of 17 random floats, which do not compress."""
    return columns(1000)["obs"]


def images() -> npt.NDArray[np.uint8]:
    """Create 128 stacks of four 84 x 84 frames, with a constant upper half and a random lower half."""
    frames = np.full((128, 84, 84, 4), 87, np.uint8)
    frames[:, 42:] = np.random.default_rng(7).integers(0, 256, (128, 42, 84, 4), np.uint8)
    return frames


def policies(rows: int, seed: int = 7) -> dict[str, Columns]:
    """Create eight columns for each of four policies."""
    return {f"policy_{p}": columns(rows, seed + p) for p in range(4)}


def agents(env_steps: int) -> dict[str, Columns]:
    """Create the steps of eight agents in lockstep, two agents per policy.

    The columns of a policy contain the steps of its first agent, then the steps of its second agent.
    """
    policies_columns = {}
    for p in range(4):
        parts = [columns(env_steps, seed=2 * p + a) for a in range(2)]
        joint_columns = {name: np.concatenate([part[name] for part in parts]) for name in NAMES if name != "truncateds"}
        policies_columns[f"policy_{p}"] = {**joint_columns, "agent_index": np.repeat([2 * p, 2 * p + 1], env_steps)}
    return policies_columns
