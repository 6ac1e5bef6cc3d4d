"""NumPy kernels and the compiled kernels that replace them return bitwise equal results."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

from samplebatch import deferred_kernels, kernels

SEEDS = range(60)


def plain(name: str) -> Callable[..., Any]:
    """Return NumPy's version of a kernel."""
    version: Callable[..., Any] = PLAIN[name]
    return version


PLAIN = {name: getattr(deferred_kernels, name).__wrapped__ for name in ("tree_set", "tree_find", "windows", "gae")}


def assert_same_bits(expected: Any, actual: Any) -> None:
    assert expected.dtype == actual.dtype
    assert expected.tobytes() == actual.tobytes()


def rough(rng: np.random.Generator, shape: Any) -> Any:
    """Draw numbers of very different magnitudes, whose sums depend on the order."""
    return rng.standard_normal(shape) * 10.0 ** rng.integers(-12, 12, shape)


@pytest.mark.parametrize("seed", SEEDS)
def test_sum_trees(seed: int) -> None:
    rng = np.random.default_rng(seed)
    size = int(rng.integers(1, 70))
    leaves = 1 << (size - 1).bit_length()
    limit = float(np.finfo(np.float64).max) / leaves
    compiled = np.zeros(2 * leaves)
    tree = compiled.copy()
    for _ in range(8):
        slots = rng.integers(0, size, int(rng.integers(0, 2 * size)))
        weights = np.abs(rough(rng, len(slots))) * (rng.random(len(slots)) < 0.7)
        if len(slots) and rng.random() < 0.3:
            position = int(rng.integers(len(slots)))
            if rng.random() < 0.5:
                slots[position] = rng.choice([-1, size, 1 << 40])
            else:
                weights[position] = rng.choice([np.nan, np.inf, -1.0, 2 * limit])
        rejected = kernels.tree_set(compiled, leaves, size, limit, slots, weights)
        assert plain("tree_set")(tree, leaves, size, limit, slots, weights) == rejected
        assert_same_bits(compiled, tree)
        if not compiled[1] > 0.0:
            continue
        values = np.append(rng.random(50) * compiled[1], [0.0, compiled[1], np.nextafter(compiled[1], 0.0)])
        expected, actual = np.empty((2, len(values)), np.intp)
        kernels.tree_find(compiled, leaves, values, expected)
        plain("tree_find")(tree, leaves, values, actual)
        assert_same_bits(expected, actual)


@pytest.mark.parametrize("seed", SEEDS)
def test_windows_of_several_steps(seed: int) -> None:
    rng = np.random.default_rng(seed)
    lengths = rng.integers(0, 12, int(rng.integers(1, 6)))
    lengths[int(rng.integers(len(lengths)))] += 3
    edges = np.concatenate([[0], np.cumsum(lengths)])
    rows = int(edges[-1])
    newest = edges[:-1] + np.maximum(rng.integers(0, np.maximum(lengths, 1)), 0)
    rewards = rough(rng, (rows, int(rng.integers(0, 3))))
    rewards[rng.random(rewards.shape) < 0.1] = np.inf
    terminated = rng.random(rows) < 0.15
    done = terminated | (rng.random(rows) < 0.1)
    slots = rng.integers(0, rows, int(rng.integers(0, 30)))
    if len(slots) and rng.random() < 0.2:
        slots[int(rng.integers(len(slots)))] = rng.choice([-1, rows])
    n_step, gamma = int(rng.choice([1, 2, 3, 7, 1 << 40])), float(rng.choice([0.0, 0.9, 0.99, 1.0]))
    outcomes = []
    for function in (kernels.windows, plain("windows")):
        outputs = np.empty((len(slots), rewards.shape[1])), np.empty(len(slots)), np.empty(len(slots), np.intp)
        with np.errstate(all="ignore"):
            invalid = function(rewards, terminated, done, edges, newest, slots, n_step, gamma, *outputs)
        outcomes.append((invalid, *(() if invalid >= 0 else outputs)))
    assert outcomes[0][0] == outcomes[1][0]
    for expected, actual in zip(outcomes[0][1:], outcomes[1][1:], strict=True):
        np.testing.assert_array_equal(expected, actual)
        assert_same_bits(np.nan_to_num(expected), np.nan_to_num(actual))


@pytest.mark.parametrize("seed", SEEDS)
def test_advantages(seed: int) -> None:
    rng = np.random.default_rng(seed)
    rows = int(rng.integers(0, 80))
    rewards, values, next_values = rough(rng, (3, rows))
    terminated = rng.random(rows) < 0.1
    cut = terminated | (rng.random(rows) < 0.1)
    next_values[rng.random(rows) < 0.1] = np.nan
    outcomes = []
    for function in (kernels.gae, plain("gae")):
        outputs = np.empty(rows), np.empty(rows)
        with np.errstate(all="ignore"):
            function(rewards, terminated, cut, values, next_values, 0.99, 0.95, *outputs)
        outcomes.append(outputs)
    for expected, actual in zip(*outcomes, strict=True):
        np.testing.assert_array_equal(expected, actual)
        assert_same_bits(np.nan_to_num(expected), np.nan_to_num(actual))


FIRST_USE = """
import sys
import numpy as np
from samplebatch import Batch, PrioritizedReplayBuffer, deferred_kernels
from samplebatch.returns import gae
buffer = PrioritizedReplayBuffer(100, alpha=0.6, beta=0.4, random_seed=1)
for n in range(50):
    buffer.add(Batch(obs=n, act=n, rew=float(n), terminated=n % 9 == 8, truncated=False, obs_next=n + 1))
def draw():
    batch, indices = buffer.sample(8, n_step=3)
    buffer.update_weight(indices, batch.rew + 1.0)
    return indices.tolist(), batch.weight.tolist(), batch.returns.tolist()
results = [draw() for _ in range(3)]
ones, never = np.ones(4), np.zeros(4, bool)
estimates = gae(ones, never, never, values=ones, next_values=ones, gamma=0.9, gae_lambda=0.9)
results.append([part.tolist() for part in estimates])
print("numba" in sys.modules)
deferred_kernels.BUDGET_S = 0.0 if len(sys.argv) > 1 else 0.5
results += [draw() for _ in range(3)]
print("numba" in sys.modules)
print(results)
"""


def test_numba_is_imported_when_the_budget_is_spent() -> None:
    outputs = [
        subprocess.run(
            [sys.executable, "-c", FIRST_USE, *arguments], check=True, capture_output=True, text=True
        ).stdout.splitlines()
        for arguments in ([], ["switch"])
    ]
    assert [lines[:2] for lines in outputs] == [["False", "False"], ["False", "True"]]
    assert outputs[0][2] == outputs[1][2]
