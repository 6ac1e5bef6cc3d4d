"""Tianshou's own algorithms, unmodified, learn over our batches and buffers just as they do over its own.

Where both draw the same rows, the parameters after training are the same to the last bit.
"""

from __future__ import annotations

import warnings

import numpy as np
import pytest
import torch

pytest.importorskip("tianshou.algorithm")

with warnings.catch_warnings():
    warnings.simplefilter("ignore")
    from benchmarks.training.tianshou_classes import OURS, THEIRS, classes_of, matched_draws
    from benchmarks.training.tianshou_runs import RUNS, Parameters

OFTEN = {"dqn", "dqn with priorities", "drqn", "sac", "ppo", "cql", "several agents", "hindsight"}
"""Runs of every time; the others are for long runs."""

UNMATCHED = {"hindsight"}
"""Tianshou relabels whole stretches of episodes, we single steps: other rows are drawn."""

ROUNDED = {"cql"}
"""It asks for a batch in float32, and Tianshou leaves rewards in float64."""


def train(name: str, library: str) -> Parameters:
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        with warnings.catch_warnings(), classes_of(library) as data, matched_draws(data):
            warnings.simplefilter("ignore")
            return RUNS[name](data, 6)
    finally:
        torch.set_num_threads(threads)


@pytest.mark.parametrize(
    "name", [pytest.param(name, marks=() if name in OFTEN else pytest.mark.long) for name in sorted(RUNS)]
)
def test_parameters_after_training_are_the_same(name: str) -> None:
    ours, theirs = train(name, OURS), train(name, THEIRS)
    assert ours.keys() == theirs.keys()
    for parameter, values in ours.items():
        assert np.isfinite(values).all(), parameter
        if name in UNMATCHED:
            assert values.shape == theirs[parameter].shape
        elif name in ROUNDED:
            np.testing.assert_allclose(values, theirs[parameter], rtol=1e-4, atol=1e-6, err_msg=parameter)
        else:
            np.testing.assert_array_equal(values, theirs[parameter], err_msg=parameter)


def test_training_changes_the_parameters() -> None:
    with warnings.catch_warnings(), classes_of(OURS) as data:
        warnings.simplefilter("ignore")
        before, after = RUNS["dqn"](data, 0), RUNS["dqn"](data, 2)
    assert any((before[name] != after[name]).any() for name in before)


def test_tianshou_modules_are_restored_after_the_tests() -> None:
    import tianshou.data
    from tianshou.algorithm import algorithm_base

    with classes_of(OURS) as data:
        assert algorithm_base.Batch is data.Batch
    assert algorithm_base.Batch is tianshou.data.Batch
