"""SampleBatch as a pytree of JAX's."""

from __future__ import annotations

import pickle

import numpy as np
import pytest

from samplebatch import SampleBatch, concat_samples
from samplebatch.convert import register_with_jax
from tests.convert.experience import two_episodes

jax = pytest.importorskip("jax")


@pytest.fixture(autouse=True)
def registered() -> None:
    register_with_jax()
    register_with_jax()


def test_leaves_are_the_columns_and_are_restored() -> None:
    batch = two_episodes(nested=True)
    leaves, structure = jax.tree.flatten(batch)
    assert all(leaf is batch[path] for leaf, path in zip(leaves, batch.column_names, strict=True))
    again = jax.tree.unflatten(structure, leaves)
    assert again == batch
    assert again["obs"].keys() == batch["obs"].keys()
    assert again["obs.x"] is batch["obs.x"]
    paths = [jax.tree_util.keystr(path) for path, _ in jax.tree_util.tree_leaves_with_path(batch)]
    assert paths[0] == "['obs.x']"


def test_compiled_functions_accept_batches_and_compile_once() -> None:
    traced = []

    @jax.jit
    def double(batch: SampleBatch) -> SampleBatch:
        traced.append(len(batch))
        assert batch["obs"]["x"].shape == (5, 2)
        return jax.tree.map(lambda column: column * 2, batch.select("obs", "rewards"))

    batch = two_episodes(nested=True)
    actual = double(batch)
    assert isinstance(actual, SampleBatch)
    assert actual["rewards"].tolist() == (batch["rewards"] * 2).tolist()
    assert actual["obs"]["pair"][1].tolist() == (batch["obs.pair.1"] * 2).tolist()
    double(two_episodes(nested=True))
    assert traced == [5]


def test_gradients_are_batches() -> None:
    batch = SampleBatch(obs=np.ones((3, 2), np.float32), rewards=np.arange(3, dtype=np.float32))
    gradient = jax.grad(lambda steps: (steps["rewards"] ** 2).sum() + steps["obs"].sum())(batch)
    assert gradient["rewards"].tolist() == [0, 2, 4]
    assert gradient["obs"].shape == (3, 2)


def test_vmap_maps_over_rows() -> None:
    batch = SampleBatch(obs=np.ones((3, 2), np.float32), rewards=np.arange(3, dtype=np.float32))
    assert jax.vmap(lambda step: step["obs"].sum() + step["rewards"])(batch).tolist() == [2, 3, 4]


def test_batches_of_jax_arrays_support_all_operations() -> None:
    host = SampleBatch(obs=np.ones((4, 2), np.float32), rewards=np.arange(4.0, dtype="f4"))
    batch = jax.tree.map(jax.numpy.asarray, host)
    assert len(batch) == 4
    assert batch[1:3]["rewards"].tolist() == [1, 2]
    assert batch.take([3, 0])["rewards"].tolist() == [3, 0]
    assert concat_samples([batch, batch]) == concat_samples([host, host])
    assert SampleBatch.from_arrow(batch.to_arrow()) == host
    assert pickle.loads(pickle.dumps(batch)) == host
    assert batch.copy() == host


def test_sequences_and_flags_are_preserved() -> None:
    batch = SampleBatch(obs=np.arange(3.0), state_in_0=np.zeros((2, 4)), seq_lens=[1, 2])
    batch.set_training(True)
    again = jax.tree.map(lambda column: column, batch)
    assert again == batch
    assert again.is_training
    assert again.max_seq_len == 2
