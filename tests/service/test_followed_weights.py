"""Actors follow published weights by themselves, and a learner trains on what they write to a queue of a service."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

from samplebatch import Collector, MultiAgentCollector, VectorReplayBuffer, broadcast
from samplebatch.errors import ArgumentError, ColumnNotFoundError, ServiceError
from samplebatch.rollout.followed_weights import FollowedWeights
from samplebatch.service import RemoteActors, ReplayClient, ReplayServer, ReplayTable
from tests.optional import HAS_TORCH


class Steady:
    """Policy that returns the action in its weights."""

    action = 0

    def __call__(self, obs: Any) -> Any:
        return np.full(len(obs), self.action)

    def set_weights(self, weights: Any) -> None:
        self.action = int(weights["action"][0])


def weights_of(action: int) -> dict[str, Any]:
    return {"action": np.array([action])}


def queue(capacity: int = 16) -> ReplayTable:
    return ReplayTable("queue", kind="queue", capacity=capacity)


def wait_for(condition: Callable[[], bool]) -> None:
    deadline = time.monotonic() + 30
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.01)


def test_a_collector_follows_the_weights_of_a_service() -> None:
    with (
        ReplayServer([queue()]) as server,
        ReplayClient(server.uri, "queue") as client,
        Collector(Steady(), "CartPole-v1", num_envs=2, seed=1, weights=client) as collector,
    ):
        first = collector.collect(n_step=10).batch
        assert set(first["weights_version"].tolist()) == {0}
        assert set(first["actions"].tolist()) == {0}
        assert client.publish(weights_of(1)) == 1
        wait_for(lambda: collector.collect(n_step=2).batch["weights_version"][0] == 1)
        assert set(collector.collect(n_step=10).batch["actions"].tolist()) == {1}


def test_a_collector_follows_a_subscription_at_its_next_collection() -> None:
    publisher, subscription = broadcast(1 << 20)
    with publisher, Collector(Steady(), "CartPole-v1", weights=subscription) as collector:
        assert collector.collect(n_step=4).batch["weights_version"].tolist() == [0] * 4
        publisher.publish(weights_of(1))
        batch = collector.collect(n_step=4).batch
        assert batch["weights_version"].tolist() == [1] * 4
        assert batch["actions"].tolist() == [1] * 4
    subscription.close()


def test_policies_of_several_agents_follow_weights_by_their_ids() -> None:
    publisher, subscription = broadcast(1 << 20)
    policies = {"adversary": Steady(), "agent": Steady()}
    with publisher, MultiAgentCollector(policies, "mpe2/simple_tag_v3", weights=subscription) as collector:
        publisher.publish({"agent": weights_of(3)})
        batch = collector.collect(n_step=5).batch
    subscription.close()
    assert set(batch["agent"]["actions"].tolist()) == {3}
    assert set(batch["adversary"]["actions"].tolist()) == {0}
    assert set(batch["adversary"]["weights_version"].tolist()) == {1}


class Counting:
    """Source of weights that counts requests and records their threads."""

    def __init__(self) -> None:
        self.requests: list[threading.Thread] = []
        self.answer: Any = None

    def __copy__(self) -> Counting:
        return self

    def latest(self, newer_than: int = 0) -> Any:
        self.requests.append(threading.current_thread())
        return self.answer


def test_collecting_sends_no_message_if_weights_are_unchanged() -> None:
    source: Any = Counting()
    followed = FollowedWeights(source, poll_s=3600.0)
    for _ in range(1000):
        followed.load_newest(Steady())
    wait_for(lambda: bool(source.requests))
    assert len(source.requests) == 1
    assert source.requests[0] is not threading.current_thread()
    followed.close()


def test_a_lost_service_is_reported_and_reconnected() -> None:
    server = ReplayServer([queue()]).start()
    port = int(server.uri.rpartition(":")[2])
    client = ReplayClient(server.uri, "queue", reconnect_s=0.1)
    with Collector(Steady(), "CartPole-v1", weights=client) as collector:
        client.publish(weights_of(1))
        wait_for(lambda: collector.collect(n_step=1).batch["weights_version"][0] == 1)
        server.close()

        def is_reported() -> bool:
            try:
                collector.collect(n_step=1)
            except ServiceError:
                return True
            return False

        wait_for(is_reported)
        with ReplayServer([queue()], port=port) as restarted, ReplayClient(restarted.uri, "queue") as other:
            other.publish(weights_of(0))

            def follows_again() -> bool:
                return not is_reported() and collector.policy.action == 0

            wait_for(follows_again)
    client._end()


def test_weights_must_be_a_source() -> None:
    with pytest.raises(ArgumentError, match="weights must be a ReplayClient or a Subscription, got a dict"):
        Collector("random", "CartPole-v1", weights={})  # type: ignore[arg-type]


def test_closing_a_collector_ends_its_thread_and_leaves_the_client_open() -> None:
    with ReplayServer([queue()]) as server, ReplayClient(server.uri, "queue") as client:
        collector = Collector(Steady(), "CartPole-v1", weights=client)
        collector.collect(n_step=1)
        followed = collector._weights
        assert followed is not None
        thread = followed._thread
        collector.close()
        assert thread is not None
        wait_for(lambda: not thread.is_alive())
        assert client.publish(weights_of(1)) == 1


# The learner's side


def test_remote_actors_deliver_fragments_and_drop_stale_ones() -> None:
    with (
        ReplayServer([queue()]) as server,
        ReplayClient(server.uri, "queue") as client,
        ReplayClient(server.uri, "queue") as reader,
    ):
        actors = RemoteActors(reader, VectorReplayBuffer(200, 4), max_lag=1)
        with Collector(Steady(), "CartPole-v1", client, num_envs=2, worker_index=1, weights=client) as collector:
            collector.collect(n_step=20)
            assert [actors.publish(weights_of(1)) for _ in range(2)] == [1, 2]
            wait_for(lambda: collector._weights._newest is not None)  # type: ignore[union-attr]
            collector.collect(n_step=30)
        client.flush()
        report = actors.receive(20)
    assert report.n_collected_steps == 30
    assert (actors.stale_fragments, actors.stale_steps) == (1, 20)
    rows, _ = actors.buffer.sample(0)
    assert set(rows.weights_version.tolist()) == {2}
    assert len(actors.buffer) == 30
    assert actors.receive().n_collected_steps == 0


def test_max_lag_needs_the_version_of_each_fragment() -> None:
    with (
        ReplayServer([queue()]) as server,
        ReplayClient(server.uri, "queue") as client,
        Collector("random", "CartPole-v1", client) as collector,
    ):
        collector.collect(n_step=5)
        with pytest.raises(ColumnNotFoundError, match="weights=client"):
            RemoteActors(client, VectorReplayBuffer(20, 1), max_lag=0).receive(5)
    with pytest.raises(ArgumentError, match="client must be a ReplayClient"):
        RemoteActors("queue", VectorReplayBuffer(20, 1))  # type: ignore[arg-type]


@pytest.mark.skipif(not HAS_TORCH, reason="needs torch")
def test_impala_learns_from_actors_of_a_service() -> None:
    from samplebatch.learn import OnPolicyTrainerParams, policy_within_training_step
    from tests.learn.tasks import Match
    from tests.learn.test_impala import IMPALA, make

    algorithm = make(IMPALA, lr=0.02)
    with ReplayServer([queue(4)]) as server, ReplayClient(server.uri, "queue") as client:
        has_ended = threading.Event()
        errors: list[Exception] = []

        def act(index: int) -> None:
            ours = make(IMPALA).policy
            writer = ReplayClient(server.uri, "queue", reconnect_s=0.1)
            try:
                with (
                    Collector(ours, [Match] * 2, writer, seed=index, worker_index=index, weights=writer) as collector,
                    policy_within_training_step(ours),
                ):
                    while not has_ended.is_set():
                        collector.collect(n_step=20)
            except Exception as error:
                # Whoever waits for room in the queue is ended with the service.
                if not has_ended.is_set():
                    errors.append(error)
            finally:
                writer._end()

        threads = [threading.Thread(target=act, args=(index,), daemon=True) for index in range(2)]
        for thread in threads:
            thread.start()
        actors = RemoteActors(client, VectorReplayBuffer(2000, 4), max_lag=8)
        params = OnPolicyTrainerParams(
            training_collector=actors,
            max_epochs=4,
            epoch_num_steps=1000,
            collection_step_num_env_steps=40,
            batch_size=20,
            asynchronous=True,
            verbose=False,
            show_progress=False,
        )
        try:
            info = algorithm.run_training(params)
        finally:
            has_ended.set()
    for thread in threads:
        thread.join(20)
    assert not errors
    assert not any(thread.is_alive() for thread in threads)
    assert info.train_step >= 4000
    with Collector(algorithm.policy, [Match], seed=9) as collector:
        assert collector.collect(n_episode=20).returns.mean() >= 7.5


def test_remote_actors_need_an_asynchronous_training() -> None:
    pytest.importorskip("torch")
    from samplebatch.learn import OnPolicyTrainerParams

    with ReplayServer([queue()]) as server, ReplayClient(server.uri, "queue") as client:
        actors = RemoteActors(client, VectorReplayBuffer(10, 1))
        with pytest.raises(ArgumentError, match="asynchronous must be True for RemoteActors"):
            OnPolicyTrainerParams(training_collector=actors)
