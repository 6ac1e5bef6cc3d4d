"""One part of the library after another, each in a new process: `python tour.py PART`."""

from __future__ import annotations

import multiprocessing
import os
import signal
import sys
import time
from typing import Any

import numpy as np

import samplebatch
from samplebatch import Batch, ReplayBuffer, SampleBatch, broadcast, channel, concat_samples
from samplebatch.errors import PeerDiedError


def steps(count: int = 6, start: int = 0) -> SampleBatch:
    ids = np.arange(start, start + count)
    return SampleBatch(obs=ids.reshape(-1, 1) * np.ones((1, 3), np.float32), rewards=ids * 1.0, eps_id=ids // 3)


def batches() -> None:
    batch = steps()
    assert concat_samples([batch[:3], batch[3:]]) == batch
    assert [len(episode) for episode in batch.split_by_episode()] == [3, 3]
    assert batch.copy().compress().decompress_if_needed() == batch
    assert np.shares_memory(batch.as_batch().obs, batch["obs"])


def files() -> None:
    batch = steps()
    for name in ("a.arrow", "a.parquet"):
        batch.save(name)
        assert samplebatch.load(name) == batch
    with ReplayBuffer(20, storage="ring") as buffer:
        for i in range(30):
            buffer.add(
                obs=np.full(2, i), act=0, rew=float(i), terminated=i % 7 == 6, truncated=False, obs_next=np.ones(2)
            )
        stored = buffer.rew.tolist()
    with ReplayBuffer.open("ring") as again:
        assert again.rew.tolist() == stored


def send(producer: Any, count: int, death: bool) -> None:
    for i in range(count):
        producer.send(steps(start=i))
    if death:
        os.kill(os.getpid(), signal.SIGKILL)
    producer.close()


def use_channel() -> None:
    producer, consumer = channel(1 << 16)
    child = multiprocessing.Process(target=send, args=(producer, 50, False))
    child.start()
    received = list(consumer)
    child.join()
    assert received == [steps(start=i) for i in range(50)]


def killed_sender() -> None:
    producer, consumer = channel(1 << 16)
    child = multiprocessing.Process(target=send, args=(producer, 3, True))
    child.start()
    for i in range(3):
        assert consumer.recv(timeout_s=60) == steps(start=i)
    try:
        consumer.recv(timeout_s=60)
    except PeerDiedError:
        return
    raise AssertionError("the death of the sender must be noticed")


def receive(subscriber: Any, results: Any) -> None:
    results.put(subscriber.latest(timeout_s=60).value["rewards"].sum())


def use_broadcast() -> None:
    publisher, subscriber = broadcast(1 << 16)
    results = multiprocessing.Queue()
    child = multiprocessing.Process(target=receive, args=(subscriber, results))
    child.start()
    publisher.publish(steps())
    assert results.get(timeout=60) == 15.0
    child.join()


def put(queue: Any, done: Any) -> None:
    samplebatch.enable_shared_pickling()
    queue.put(steps(5000))
    done.wait(60)


def use_queue() -> None:
    queue, done = multiprocessing.Queue(), multiprocessing.Event()
    child = multiprocessing.Process(target=put, args=(queue, done))
    child.start()
    assert queue.get(timeout=60) == steps(5000)
    done.set()
    child.join()


def workers() -> None:
    from samplebatch import RolloutWorkers

    with RolloutWorkers("random", "CartPole-v1", num_workers=2, seed=1) as running:
        assert sum(len(fragment) for fragment in running.fragments(n_step=200)) == 200


def service() -> None:
    from samplebatch.service import ReplayClient, ReplayServer, ReplayTable

    ones, flags = np.ones(9000), np.arange(9000) % 9 == 8
    rows = Batch(obs=np.ones((9000, 3)), act=ones, rew=ones, terminated=flags, truncated=flags & False)
    table = ReplayTable("t", kind="uniform", capacity=50_000)
    with ReplayServer([table]) as server, ReplayClient(server.uri, "t") as client:
        client.extend(rows)
        client.flush()
        sample, _ = client.sample(8192)
        assert sample.obs.shape == (8192, 3)


def learning() -> None:
    import gymnasium

    from samplebatch import Collector, VectorReplayBuffer
    from samplebatch.learn import DQN, AdamOptimizerFactory, DiscreteQLearningPolicy, Net

    env = gymnasium.make("CartPole-v1")
    policy = DiscreteQLearningPolicy(model=Net(state_shape=4, action_shape=2), action_space=env.action_space)
    algorithm = DQN(policy=policy, optim=AdamOptimizerFactory(lr=1e-3))
    with Collector(policy, "CartPole-v1", num_envs=2, buffer=VectorReplayBuffer(2000, 2), seed=0) as collector:
        collector.collect(n_step=200)
        before = [parameter.detach().clone() for parameter in policy.parameters()]
        algorithm.update(buffer=collector.buffer, sample_size=64)
    assert any((a != b).any() for a, b in zip(before, policy.parameters(), strict=True))


PARTS = {
    "batches": batches,
    "files": files,
    "channel": use_channel,
    "killed_sender": killed_sender,
    "broadcast": use_broadcast,
    "queue": use_queue,
    "workers": workers,
    "service": service,
    "learning": learning,
}

if __name__ == "__main__":
    began_s = time.monotonic()
    PARTS[sys.argv[1]]()
    print(f"{time.monotonic() - began_s:.1f} s", file=sys.stderr)
    print(f"{sys.argv[1]}: passed")
