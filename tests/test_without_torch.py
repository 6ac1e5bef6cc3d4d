"""Batches, buffers, channels, files and collectors work where torch cannot be imported."""

from __future__ import annotations

import subprocess
import sys

import pytest

BLOCKED = """
import sys

class Absent:
    def find_spec(self, name, path=None, target=None):
        if name.partition(".")[0] == "torch":
            raise ModuleNotFoundError(f"No module named {name!r}", name=name)

sys.meta_path.insert(0, Absent())
import pickle
import numpy as np
from samplebatch import *
"""

BATCHES = """
batch = SampleBatch(obs={"x": np.zeros((4, 2))}, rewards=np.arange(4.0), eps_id=[0, 0, 1, 1], infos=[{}] * 4)
parts = batch.split_by_episode()
assert concat_samples(parts) == batch == SampleBatch.from_arrow(batch.to_arrow()) == pickle.loads(pickle.dumps(batch))
assert [len(part) for part in batch.copy().shuffle(0).minibatches(3, floats="float32")] == [3, 1]
assert batch.to_numpy(floats="float32")["rewards"].dtype == np.float32
assert len(batch.compress(columns={"rewards"}).decompress_if_needed(columns={"rewards"})) == 4
nested = batch.drop("infos").as_batch(convention="tianshou")
assert Batch.stack([nested[0], nested[1]]) == nested[:2]
assert Batch.cat([nested, nested]).to_numpy(floats="float32").rew.dtype == np.float32
assert (Batch(rew=nested.rew) + 1).rew[0] == 1
assert len(list(nested.split(2, shuffle=False))) == 2
assert pickle.loads(pickle.dumps(nested)) == nested
together = MultiAgentBatch({"p": batch}, 4)
assert together.copy() == together
assert str(together) and together._repr_html_() and repr(nested) and list(batch.rows())
"""

BUFFERS = """
def fill(buffer):
    for i in range(10):
        step = Batch(obs=np.full(2, float(i)), act=i, rew=float(i), terminated=i == 3, truncated=False)
        step.obs_next = step.obs + 1
        buffer.add(Batch.stack([step]) if isinstance(buffer, VectorReplayBuffer) else step)
    return buffer

makers = (
    lambda: ReplayBuffer(8),
    lambda: PrioritizedReplayBuffer(8, alpha=0.6, beta=0.4),
    lambda: VectorReplayBuffer(8, 1),
    lambda: ReplayBuffer(8, compress=True),
)
for make in makers:
    buffer = fill(make())
    rows, indices = buffer.sample(4, n_step=3, floats="float32")
    assert rows.rew.dtype == rows.returns.dtype == np.float32
    assert sum(len(part) for part, _ in buffer.minibatches(3)) == len(buffer) == 8
    assert buffer.sample_sequences(2, 3)[0].obs.shape == (2, 3, 2)
    again = make()
    again.load_state_dict(buffer.state_dict())
    assert (again[:].obs == buffer[:].obs).all() and (pickle.loads(pickle.dumps(buffer))[:].obs == buffer[:].obs).all()
    if isinstance(buffer, PrioritizedReplayBuffer):
        buffer.update_weight(indices, np.ones(4), generation=rows.generation)
    assert repr(buffer)
agents = MultiAgentReplayBuffer(8)
rows = {"obs": np.zeros((4, 2)), "actions": [0] * 4, "rewards": [0.5] * 4, "dones": [False] * 4}
agents.add(MultiAgentBatch({"p": SampleBatch(rows)}, 4))
assert agents.sample(3).batch["p"]["obs"].shape == (3, 2)
"""

TRANSPORT = """
import multiprocessing

def work(producer, subscription):
    bias = subscription.wait_for(1, timeout_s=60).value["bias"]
    with producer:
        producer.send(SampleBatch(obs=np.ones((3, 2)), rewards=bias, infos=[{"x": 1}] * 3))
        producer.send(MultiAgentBatch({"p": SampleBatch(a=[1, 2])}, 2))
        producer.send(Batch(a=np.arange(3), b={"c": np.zeros(3)}))
        with producer.reserve({"t": "i8"}, 4) as block:
            block["t"][:] = range(4)

producer, consumer = channel(1 << 20)
publisher, subscription = broadcast(1 << 16)
worker = multiprocessing.get_context("fork").Process(target=work, args=(producer, subscription))
worker.start()
producer.close()
publisher.publish({"bias": np.arange(3.0)})
steps, policies, nested, reserved = consumer
assert steps["rewards"].tolist() == [0, 1, 2] and policies["p"]["a"].tolist() == [1, 2]
assert nested.b.c.shape == (3,) and reserved["t"].tolist() == [0, 1, 2, 3]
worker.join(60)
assert worker.exitcode == 0
enable_shared_pickling()
"""

FILES = """
import os, tempfile
from samplebatch.returns import discounted_returns, gae

with tempfile.TemporaryDirectory() as folder:
    batch = SampleBatch(obs=np.zeros((4, 2)), rewards=np.arange(4.0), infos=[{"x": 1}] * 4)
    for write, read in ((write_arrow, read_arrow), (write_parquet, read_parquet)):
        path = os.path.join(folder, "steps" + (".arrow" if read is read_arrow else ".parquet"))
        write(batch, path)
        assert read(path) == batch
    buffer = ReplayBuffer(4)
    buffer.add(Batch(obs=7, act=0, rew=1.0, terminated=False, truncated=False))
    buffer.save(os.path.join(folder, "buffer.arrow"))
    assert ReplayBuffer.load(os.path.join(folder, "buffer.arrow"))[0].obs == 7
assert discounted_returns(np.ones(3), np.array([False, False, True]), gamma=0.5)[0] == 1.75
"""

COLLECT = """
import gymnasium

envs = gymnasium.make_vec("CartPole-v1", num_envs=2, vectorization_mode="sync")
collector = Collector(RandomPolicy(envs.single_action_space, seed=1), envs, seed=1)
assert len(collector.collect(n_step=20).batch) == 20
"""


@pytest.mark.parametrize(
    "work", [BATCHES, BUFFERS, TRANSPORT, FILES, COLLECT], ids=["batches", "buffers", "transport", "files", "collect"]
)
def test_torch_is_not_needed_for(work: str) -> None:
    end = "\nassert 'torch' not in sys.modules\nprint('done')"
    run = subprocess.run([sys.executable, "-c", BLOCKED + work + end], capture_output=True, text=True, timeout=300)
    assert (run.returncode, run.stdout) == (0, "done\n"), run.stderr


TENSORS = {
    "nested": "Batch(a=[1]).to_torch()",
    "flat": "SampleBatch(a=[1]).to_torch()",
    "minibatches": "next(iter(SampleBatch(a=[1]).minibatches(1, device='cpu')))",
    "buffer": "buf = ReplayBuffer(4); buf.extend(SampleBatch(obs=[1], actions=[0], rewards=[1.0], terminateds=[True]));"
    "buf.sample(1, device='cpu')",
    "learn": "from samplebatch.learn import PPO",
}


@pytest.mark.parametrize("work", TENSORS.values(), ids=TENSORS)
def test_missing_torch_is_reported_with_the_install_command(work: str) -> None:
    run = subprocess.run([sys.executable, "-c", BLOCKED + work], capture_output=True, text=True, timeout=300)
    last = run.stderr.strip().splitlines()[-1]
    assert last.startswith("samplebatch.errors.MissingExtraError: 'torch' is not installed"), run.stderr
    assert last.endswith("install it with: pip install 'samplebatch[torch]'")
