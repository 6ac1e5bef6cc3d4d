"""`returns.*`: advantages and n-step returns of steps in a buffer, from precomputed value estimates."""

from __future__ import annotations

from functools import partial
from typing import Any

import numpy as np

from benchmarks.harness import Row, Way, row

GAMMA, LAMBDA, STEPS = 0.99, 0.95, 5
EPISODE = 100
"""Steps per episode."""


def steps(rows: int) -> dict[str, Any]:
    """Create the columns of complete episodes, with value estimates of observations and next observations."""
    rng = np.random.default_rng(7)
    ends = np.arange(rows) % EPISODE == EPISODE - 1
    numbers = np.zeros(rows, np.float32)
    return {
        "obs": numbers,
        "act": numbers,
        "rew": rng.standard_normal(rows),
        "terminated": ends,
        "truncated": np.zeros(rows, bool),
        "done": ends,
        "obs_next": numbers,
        "values": rng.standard_normal(rows),
        "next_values": rng.standard_normal(rows),
    }


def buffer_of(lib: Any, data: dict[str, Any]) -> Any:
    """Create a buffer that contains all steps."""
    buffer = lib.ReplayBuffer.from_data(**{k: v for k, v in data.items() if "values" not in k})
    # By default, Tianshou's buffer treats the first slot as the newest.
    buffer.last_index[0] = len(data["rew"]) - 1
    return buffer


def rounded(result: Any) -> Any:
    """Round results, because their last digits depend on the order of additions."""
    arrays = result if isinstance(result, tuple) else (result["returns"],)
    return [np.round(np.asarray(array).reshape(-1), 6) for array in arrays]


# Advantages


def gae_setup(function: Any, lib: Any, data: Any) -> Any:
    buffer, slots = buffer_of(lib, data), np.arange(len(data["rew"]))
    batch, v, v_next = buffer[slots], data["values"], data["next_values"]
    return lambda: function(batch, buffer, slots, v_next, v, GAMMA, LAMBDA)


def our_gae_setup(lib: Any, data: Any) -> Any:
    from samplebatch.returns import compute_episodic_return

    return gae_setup(compute_episodic_return, lib, data)


def tianshou_gae_setup(lib: Any, data: Any) -> Any:
    from tianshou.algorithm import Algorithm

    return gae_setup(Algorithm.compute_episodic_return, lib, data)


def bare_gae_setup(_: Any, data: Any) -> Any:
    shape = (len(data["rew"]) // EPISODE, EPISODE)
    rewards, values, next_values = (data[k].reshape(shape) for k in ("rew", "values", "next_values"))
    is_continued = 1.0 - data["terminated"].reshape(shape)
    advantages, returns, scratch, decay = np.ones(shape), np.ones(shape), np.ones(shape[0]), GAMMA * LAMBDA

    def call() -> Any:
        np.multiply(next_values, is_continued, out=advantages)
        np.multiply(advantages, GAMMA, out=advantages)
        np.add(advantages, rewards, out=advantages)
        np.subtract(advantages, values, out=advantages)
        for t in range(EPISODE - 2, -1, -1):
            np.multiply(advantages[:, t + 1], decay, out=scratch)
            advantages[:, t] += scratch
        np.add(advantages, values, out=returns)
        return returns, advantages

    return call


# n-step returns


def nstep_setup(function: Any, lib: Any, data: Any, slots: Any) -> Any:
    import torch

    buffer, estimates = buffer_of(lib, data), torch.from_numpy(data["next_values"][: len(slots)])
    batch = buffer[slots]
    return lambda: function(batch, buffer, slots, lambda buffer, last: estimates, GAMMA, STEPS)


def our_nstep_setup(slots: Any, lib: Any, data: Any) -> Any:
    from samplebatch.returns import compute_nstep_return

    return nstep_setup(compute_nstep_return, lib, data, slots)


def tianshou_nstep_setup(slots: Any, lib: Any, data: Any) -> Any:
    from tianshou.algorithm import Algorithm

    return nstep_setup(Algorithm.compute_nstep_return, lib, data, slots)


def bare_nstep_setup(slots: Any, _: Any, data: Any) -> Any:
    rewards, done, terminated = data["rew"], data["done"], data["terminated"]
    estimates, n = data["next_values"][: len(slots)], len(slots)
    positions, is_continued, has_bootstrap, reward = slots.copy(), np.ones(n, bool), np.ones(n, bool), np.ones(n)
    returns, discount = np.ones(n), np.ones(n)

    def call() -> Any:
        np.copyto(positions, slots)
        rewards.take(positions, out=returns, mode="clip")
        discount.fill(GAMMA)
        for _ in range(STEPS - 1):
            np.logical_not(done.take(positions, out=is_continued, mode="clip"), out=is_continued)
            np.add(positions, is_continued, out=positions)
            np.multiply(rewards.take(positions, out=reward, mode="clip"), is_continued, out=reward)
            np.multiply(reward, discount, out=reward)
            np.add(returns, reward, out=returns)
            np.multiply(discount, GAMMA, out=discount, where=is_continued)
        np.logical_not(terminated.take(positions, out=has_bootstrap, mode="clip"), out=has_bootstrap)
        np.multiply(discount, has_bootstrap, out=discount)
        np.multiply(discount, estimates, out=reward)
        np.add(returns, reward, out=returns)
        return {"returns": returns}

    return call


def nstep_row(name: str, rows: int, slots: Any, *, traffic: bool = False) -> Row:
    """Declare a row of five-step returns of some slots of a buffer."""
    return row(
        f"returns.{name}",
        lambda: steps(rows),
        traffic=traffic,
        view=rounded,
        ours=Way(partial(our_nstep_setup, slots)),
        tianshou=Way(partial(tianshou_nstep_setup, slots)),
        bare=Way(partial(bare_nstep_setup, slots)),
    )


ROWS = [
    row(
        "returns.gae.1e5",
        lambda: steps(100_000),
        traffic=True,
        view=rounded,
        ours=Way(our_gae_setup),
        tianshou=Way(tianshou_gae_setup),
        bare=Way(bare_gae_setup),
    ),
    nstep_row("nstep5.1e5", 100_000, np.arange(100_000), traffic=True),
    nstep_row("nstep5.256of1e6", 1_000_000, np.random.default_rng(3).integers(0, 999_995, 256)),
]
