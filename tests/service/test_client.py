"""A client of a replay service has a buffer's methods and returns the results of a local buffer."""

from __future__ import annotations

import pickle
import threading
import time
from collections.abc import Iterator
from contextlib import ExitStack
from typing import Any

import numpy as np
import pytest

from samplebatch import ActionUnit, Batch, MultiAgentBatch, PrioritizedReplayBuffer, ReplayBuffer, SampleBatch
from samplebatch.column import RaggedColumn, RaggedTorchColumn
from samplebatch.column.types import TORCH_NBYTES
from samplebatch.errors import (
    AccessError,
    ArgumentError,
    CapacityError,
    ColumnLengthError,
    ColumnMismatchError,
    ColumnTypeError,
    LimitTimeoutError,
    PriorityError,
    RowIndexError,
    SampleBatchError,
    ServiceError,
    UntrustedPickleError,
)
from samplebatch.service import RateLimiter, ReplayClient, ReplayServer, ReplayTable
from samplebatch.service.protocol import MAX_ASKED, Draw
from tests.service.table_rows import episode, fragment


@pytest.fixture(scope="module")
def server() -> Iterator[ReplayServer]:
    tables = [
        ReplayTable("replay", capacity=1000, seed=3),
        ReplayTable("prio", kind="prioritized", capacity=1000, alpha=0.6, beta=0.4, seed=3),
        ReplayTable("queue", kind="queue", capacity=20),
        ReplayTable("levels", kind="key", capacity=20),
    ]
    with ReplayServer(tables) as server:
        yield server


@pytest.fixture
def client(server: ReplayServer, request: pytest.FixtureRequest) -> Iterator[ReplayClient]:
    name = getattr(request, "param", "replay")
    with ReplayClient(server.uri, name) as client:
        client.reset()
        yield client


def fill(*buffers: Any) -> None:
    for number in range(12):
        for buffer in buffers:
            buffer.extend(episode(number, range(10)))


def assert_alike(remote: tuple[Any, Any], local: tuple[Any, Any]) -> None:
    assert list(remote[0].keys()) == list(local[0].keys())
    assert remote[0] == local[0]
    assert remote[1].tolist() == local[1].tolist()


def new_table(kind: str = "uniform", **options: Any) -> ReplayTable:
    return ReplayTable("replay", kind=kind, capacity=1000, seed=3, **options)  # type: ignore[arg-type]


def test_the_same_seed_gives_the_samples_of_a_local_buffer() -> None:
    local = ReplayBuffer(1000, random_seed=3)
    with ReplayServer([new_table()]) as server, ReplayClient(server.uri, "replay") as remote:
        fill(remote, local)
        assert len(remote) == len(local) == 120
        for _ in range(3):
            assert_alike(remote.sample(16), local.sample(16))
        assert_alike(remote.sample(16, n_step=3, gamma=0.9), local.sample(16, n_step=3, gamma=0.9))
        assert_alike(remote.sample_sequences(8, 5, burn_in=2), local.sample_sequences(8, 5, burn_in=2))
        assert_alike(remote.sample_sequences(8, 5, padded=False), local.sample_sequences(8, 5, padded=False))
        sequences = [buffer.sample_sequences(8, 5, per_sequence="rew") for buffer in (remote, local)]
        assert_alike(*sequences)
        assert sequences[0].batch.rew.shape == (8,)
        episodes = [zip(*buffer.sample_episodes(3), strict=True) for buffer in (remote, local)]
        for first, other in zip(*episodes, strict=True):
            assert_alike(first, other)
        # A stream draws ahead, therefore it is the last.
        streamed = next(remote.stream(8, mode="sequences", length=5, per_sequence=["rew"]))
        assert_alike((streamed, streamed.pop("batch_indexes")), local.sample_sequences(8, 5, per_sequence="rew"))


def test_columns_per_sequence_must_be_names_of_columns(client: ReplayClient) -> None:
    fill(client)
    for names, message in (
        ("reward", "per_sequence must name columns of the rows, got 'reward'; did you mean 'rew'"),
        ([3], "per_sequence must contain column names, got a int"),
    ):
        with pytest.raises(ArgumentError, match=message):
            client.sample_sequences(4, 3, per_sequence=names)  # type: ignore[arg-type]
    with pytest.raises(ArgumentError, match="per_sequence must be a list of column names, got a dict"):
        Draw.read(b'{"table": "replay", "per_sequence": {"rew": 1}}', "the ticket")
    with pytest.raises(CapacityError, match="per_sequence must have at most 256 bytes"):
        Draw.read(b'{"table": "replay", "per_sequence": ["' + b"x" * 300 + b'"]}', "the ticket")
    with pytest.raises(ArgumentError, match="samples of steps have no option 'per_sequence'"):
        next(client.stream(4, per_sequence="rew"))
    # The session stays open after a rejected request.
    assert client.sample_sequences(4, 3)[0].rew.shape == (4, 3)


@pytest.mark.parametrize("mode", ["uniform", "counted"])
def test_columns_per_sequence_have_the_rows_of_the_first_steps(mode: str) -> None:
    table = new_table(max_times_sampled=4) if mode == "counted" else new_table()
    with ReplayServer([table]) as server, ReplayClient(server.uri, "replay") as client:
        client.extend(SampleBatch(episode(0, range(10)), h=np.arange(20.0).reshape(10, 2)))
        batch, indices = client.sample_sequences(6, 4, burn_in=1, per_sequence=["h"])
        assert (batch.h == np.stack([2 * indices[:, 0], 2 * indices[:, 0] + 1], 1)).all()
        assert batch.obs.shape[:2] == (6, 4)


def test_priorities_are_returned_with_their_generations() -> None:
    local = PrioritizedReplayBuffer(1000, alpha=0.6, beta=0.4, random_seed=3)
    table = new_table("prioritized", alpha=0.6, beta=0.4)
    with ReplayServer([table]) as server, ReplayClient(server.uri, "replay") as remote:
        fill(remote, local)
        for turn in range(5):
            sample, is_present = remote.sample(16), local.sample(16)
            assert_alike(sample, is_present)
            for buffer, (batch, indices) in ((remote, sample), (local, is_present)):
                buffer.update_weight(indices, batch.rew + turn, generation=batch.generation)


def test_priorities_of_overwritten_rows_are_dropped() -> None:
    table = ReplayTable("replay", kind="prioritized", capacity=4, alpha=1.0, seed=3)
    with ReplayServer([table]) as server, ReplayClient(server.uri, "replay") as client:
        client.extend(episode(0, range(4)))
        batch, indices = client.sample(32)
        client.extend(episode(1, range(4)))
        client.update_weight(indices, np.full(32, 1e6), generation=batch.generation)
        client.info()
        assert client.info()["size"] == 4
    assert table._items.buffer.weight[:].max() == 1.0  # type: ignore[attr-defined]


@pytest.mark.parametrize("fragment_steps", [1, 4])
def test_priorities_and_fragments_are_applied_in_their_order(fragment_steps: int) -> None:
    local = PrioritizedReplayBuffer(64, alpha=0.6, beta=0.4, random_seed=3)
    table = ReplayTable("prio", kind="prioritized", capacity=64, seed=3)
    with (
        ReplayServer([table]) as server,
        ReplayClient(server.uri, "prio", fragment_steps=fragment_steps) as client,
    ):
        for number in range(300):
            # Most rows are written over, so that the priorities of many come late.
            rows = episode(number, range(24))
            for buffer in (local, client):
                buffer.extend(rows)
            (batch, indices), (other, places) = local.sample(16), client.sample(16)
            assert (indices == places).all()
            assert (batch.obs == other.obs).all()
            assert np.allclose(batch.weight, other.weight)
            priorities = 1.0 + batch.obs % 7
            for buffer, generation in ((local, batch.generation), (client, other.generation)):
                for part in range(0, 16, 4):
                    few = slice(part, part + 4)
                    buffer.update_weight(indices[few], priorities[few], generation=generation[few])


@pytest.mark.parametrize("shards", [0, 2])
@pytest.mark.parametrize("form", ["sequence", "steps", "one"])
@pytest.mark.parametrize("burn_in", [0, 2])
def test_each_sequence_has_one_priority(shards: int, form: str, burn_in: int) -> None:
    tables = [ReplayTable("prio", kind="prioritized", capacity=64, alpha=1.0, seed=3) for _ in range(max(shards, 1))]
    local = PrioritizedReplayBuffer(64, alpha=1.0, beta=0.4)
    with ExitStack() as stack:
        uris = [stack.enter_context(ReplayServer([table])).uri for table in tables]
        # With shards, the rows are those of the second.
        result = ReplayClient(uris, "prio", shares=[1e-9, 1.0]) if shards else ReplayClient(uris[0], "prio")
        client: Any = stack.enter_context(result)
        for buffer in (local, client):
            buffer.extend(episode(0, range(9)))
        client.flush()
        batch, indices = client.sample_sequences(6, 5, burn_in=burn_in)
        places = np.where(indices < 0, -1, indices & 0xFFFF)
        priorities: Any = np.arange(6) + 2.0
        options = {"generation": batch.generation} | ({"burn_in": batch.burn_in} if burn_in else {})
        expected = np.ones(9)
        sampled = places[np.arange(6), batch.burn_in.sum(1)]
        if form == "steps":
            priorities, options = np.arange(30).reshape(6, 5) + 2.0, {}
            for slot, priority in zip(places.ravel(), priorities.ravel(), strict=True):
                if slot >= 0:
                    expected[slot] = priority
        else:
            priorities = 5.0 if form == "one" else priorities
            expected[sampled] = priorities
        assert (indices < 0).any()
        client.update_weight(indices, priorities, **options)
        client.flush()
        local.update_weight(places, priorities, **({"burn_in": batch.burn_in} if "burn_in" in options else {}))
        sampler: Any = tables[-1]._items
        assert np.allclose(sampler.buffer.weight[:][:9], expected)
        assert np.allclose(local.weight[:][:9], expected)
        with pytest.raises(ColumnLengthError):
            client.update_weight(indices, np.ones(4))
        with pytest.raises(ColumnLengthError, match="burn_in must have the shape of the indices"):
            local.update_weight(places, np.ones(6), burn_in=np.zeros((6, 4), bool))


@pytest.mark.parametrize("prefetch", [0, 4])
def test_flush_and_close_wait_for_priorities(prefetch: int) -> None:
    table = ReplayTable("prio", kind="prioritized", capacity=64, alpha=1.0, limiter=RateLimiter(8))
    with ReplayServer([table]) as server:
        with ReplayClient(server.uri, "prio", prefetch=prefetch) as client:
            client.extend(episode(0, range(8)))
            client.sample(4)
            for number in range(200):
                client.update_weight(np.arange(8), np.full(8, number + 2.0))
            client.flush()
            assert table.info()["weight"] == pytest.approx(8 * 201.0)
            client.update_weight([99], [1.0])
            with pytest.raises(RowIndexError):
                client.extend(episode(1, range(3)))
            # It was sent, though the update before it was refused.
            assert len(client) == 11
            client.update_weight(np.arange(11), np.full(11, 5.0))
        assert table.info()["weight"] == pytest.approx(55.0)


def test_prefetched_samples_do_not_block_fragments_after_priorities() -> None:
    limits = RateLimiter(8, samples_per_insert=1.0, error_buffer=8.0)
    table = ReplayTable("prio", kind="prioritized", capacity=64, limiter=limits)
    with (
        ReplayServer([table]) as server,
        ReplayClient(server.uri, "prio", prefetch=8) as client,
    ):
        client.extend(episode(0, range(8)))
        for number in range(20):
            _, indices = client.sample(4)
            # The samples ahead wait for the inserts that follow.
            client.update_weight(indices, np.full(4, 2.0))
            client.extend(episode(number + 1, range(4)))
            client.flush()
        assert len(client) == 64
        info = client.info()
        assert info["inserted"] == 88
        assert info["sampled"] >= 80


def test_a_bad_priority_update_is_raised_by_the_next_call(server: ReplayServer) -> None:
    with ReplayClient(server.uri, "prio") as client:
        client.extend(episode(0, range(4)))
        _, indices = client.sample(2)
        client.update_weight(indices, [1.0, np.nan])
        with pytest.raises(PriorityError):
            client.sample(2)
        client.sample(2)
        with pytest.raises(ColumnLengthError, match="'priority' must have one value per row, 2"):
            client.update_weight(indices, [1.0, 2.0, 3.0])


def test_prefetched_samples_equal_samples_drawn_one_by_one() -> None:
    actual: list[list[list[int]]] = []
    # The last one is more than a request may ask for.
    for prefetch in (0, 4, MAX_ASKED + 100):
        with ReplayServer([new_table()]) as server, ReplayClient(server.uri, "replay", prefetch=prefetch) as client:
            fill(client)
            actual.append([client.sample(16)[1].tolist() for _ in range(8)])
    assert actual[0] == actual[1] == actual[2]


def test_a_seeded_sample_does_not_change_the_generator_of_the_table(client: ReplayClient) -> None:
    fill(client)
    assert client.sample(8, seed=5)[1].tolist() == client.sample(8, seed=5)[1].tolist()


def test_steps_are_added_one_by_one_and_by_environment() -> None:
    local = ReplayBuffer(100, random_seed=3)
    table = ReplayTable("replay", capacity=100, seed=3)
    with ReplayServer([table]) as server, ReplayClient(server.uri, "replay") as remote:
        for i in range(20):
            step = Batch(obs={"x": i}, act=0, rew=1.0, terminated=i % 5 == 4, truncated=False, info={"n": i})
            remote.add(step)
            local.add(step)
        assert_alike(remote.sample(16), local.sample(16))
    table = ReplayTable("replay", capacity=20, streams=2, seed=3)
    with ReplayServer([table]) as server, ReplayClient(server.uri, "replay") as remote:
        flags = np.zeros(2, bool)
        for i in range(4):
            remote.add(
                Batch(obs=[i, 10 + i], act=[0, 0], rew=[0.0, 0.0], terminated=flags, truncated=flags), buffer_ids=[0, 1]
            )
        remote.flush()
    assert table._items.buffer[:].obs.tolist() == [0, 1, 2, 3, 10, 11, 12, 13]  # type: ignore[attr-defined]


@pytest.mark.parametrize("client", ["queue"], indirect=True)
def test_a_queue_returns_each_fragment_once(client: ReplayClient) -> None:
    for number in range(6):
        client.extend(fragment(number, rows=number + 1))
    client.flush()
    stream = client.stream(prefetch=1)
    assert [next(stream)["number"].tolist() for _ in range(6)] == [[n] * (n + 1) for n in range(6)]
    stream.close()
    assert len(client) == 0
    client.extend(fragment(6))
    batch, numbers = client.sample(1)
    assert isinstance(batch, SampleBatch)
    assert len(numbers) == 1


@pytest.mark.parametrize("client", ["queue"], indirect=True)
def test_fragments_of_several_agents_are_received_unchanged(client: ReplayClient) -> None:
    sent = [
        MultiAgentBatch({"cat": fragment(n, rows=n + 1), "dog": SampleBatch(bark=np.ones((n + 2, 3)))}, n + 2)
        for n in range(3)
    ]
    for batch in sent:
        client.extend(batch)
    for batch in sent:
        actual, _ = client.sample(1)
        assert isinstance(actual, MultiAgentBatch)
        assert actual == batch
        assert actual.env_steps() == batch.env_steps()


@pytest.mark.parametrize("client", ["levels"], indirect=True)
def test_fragments_are_read_by_key(client: ReplayClient) -> None:
    client.extend(fragment(1), key="one")
    client.extend(fragment(2), key="two")
    assert client.sample(1, key="one")[0]["number"].tolist() == [1, 1]


def test_learners_receive_late_columns_and_object_columns(client: ReplayClient) -> None:
    client.extend(episode(0, range(3)))
    before, _ = client.sample(4)
    client.extend(episode(1, range(3), bonus=7.0))
    after, _ = client.sample(64)
    assert "bonus" not in before
    assert set(after.bonus.tolist()) == {0.0, 7.0}
    words = episode(2, range(3))
    words["word"] = np.array(["a", "b", None], object)
    client.extend(words)
    assert set(client.sample(256)[0].word.tolist()) == {"a", "b", None}


def test_samples_of_a_service_have_the_ragged_columns_of_a_buffer() -> None:
    steps = episode(0, range(10))
    steps["obs"] = steps["new_obs"] = [np.full(t % 4, float(t)) for t in range(10)]
    ragged = ("obs", "obs_next")
    local = ReplayBuffer(1000, random_seed=3, ragged=ragged)
    with ReplayServer([new_table(ragged=ragged)]) as server, ReplayClient(server.uri, "replay") as remote:
        for buffer in (remote, local):
            buffer.extend(steps)
        for request in ({}, {"n_step": 3, "gamma": 0.9}):
            sample = remote.sample(16, **request)
            assert isinstance(sample[0].obs, RaggedColumn)
            assert isinstance(sample[0].to_torch().obs_next, RaggedTorchColumn)
            assert_alike(sample, local.sample(16, **request))


def test_large_samples_equal_those_of_a_local_buffer() -> None:
    local = ReplayBuffer(1000, random_seed=3)
    rows = episode(0, range(100))
    rows["obs"] = np.random.default_rng(0).integers(0, 255, (100, 32, 32, 4), np.uint8)
    rows["new_obs"] = rows["obs"] + 1
    local.extend(rows)
    for shared in (True, False):
        with (
            ReplayServer([new_table()]) as server,
            ReplayClient(server.uri, "replay", shared_memory=shared, prefetch=2) as client,
        ):
            client.extend(rows)
            assert_alike(client.sample(64), ReplayBuffer.sample(pickle.loads(pickle.dumps(local)), 64))


def test_samples_are_tensors_on_demand(client: ReplayClient) -> None:
    fill(client)
    batch, indices = client.sample(8, device="cpu", floats="float32")
    assert str(batch.rew.dtype) == "torch.float32"
    assert isinstance(indices, np.ndarray)


def test_weights_are_published_and_received(client: ReplayClient) -> None:
    torch = pytest.importorskip("torch")
    weights = {"layer": {"w": np.eye(2), "b": torch.ones(3, dtype=torch.bfloat16)}, "step": torch.tensor(7)}
    assert client.latest(name="mine") is None
    assert client.publish(weights, name="mine") == 1
    actual = client.latest(name="mine")
    assert actual is not None
    assert actual.version == 1
    assert actual.value["layer"]["w"].tolist() == [[1.0, 0.0], [0.0, 1.0]]
    assert torch.equal(actual.value["layer"]["b"], weights["layer"]["b"])  # type: ignore[index]
    assert actual.value["step"].item() == 7
    assert client.latest(newer_than=1, name="mine") is None
    assert client.publish({"step": 8}, name="mine") == 2


def test_weights_of_every_supported_dtype_are_received(client: ReplayClient) -> None:
    torch = pytest.importorskip("torch")
    names = [name for name in TORCH_NBYTES if hasattr(torch, name)]
    weights = {name: torch.zeros(64, dtype=torch.uint8) for name in names}
    weights = {name: bits.view(getattr(torch, name)) for name, bits in weights.items()}
    client.publish({**weights, "big": np.array([1.5, 2.5], ">f4")}, name="dtypes")
    actual = client.latest(name="dtypes")
    assert actual is not None
    assert actual.value.pop("big").tolist() == [1.5, 2.5]
    for name, tensor in actual.value.items():
        assert tensor.dtype == getattr(torch, name)
        assert tensor.view(torch.uint8).tolist() == [0] * 64


@pytest.mark.parametrize("dtype_name", ["qint8", "quint8", "quint4x2", "quint2x4"])
def test_quantized_weights_are_rejected_by_the_publisher(client: ReplayClient, dtype_name: str) -> None:
    torch = pytest.importorskip("torch")
    weights = {"layer": {"w": torch.zeros(4, dtype=torch.uint8).view(getattr(torch, dtype_name))}}
    with pytest.raises(ColumnTypeError, match=rf"column 'layer\.w' must have a dtype .* got torch\.{dtype_name}"):
        client.publish(weights)


def test_weights_that_are_too_deep_are_rejected(client: ReplayClient) -> None:
    weights: dict[str, Any] = {"w": np.zeros(1)}
    for _ in range(31):
        weights = {"a": weights}
    client.publish(weights, name="deep")
    assert client.latest(name="deep") is not None
    endless: dict[str, Any] = {}
    endless["a"] = endless
    for refused in ({"a": weights}, endless):
        with pytest.raises(ColumnTypeError, match=r"at most 32 dicts deep, got another dict in 'a\.a"):
            client.publish(refused)


def test_limits_are_changed_and_blocked_clients_are_reported(client: ReplayClient, server: ReplayServer) -> None:
    client.extend(episode(0, range(4)))
    client.set_limits(min_size=10)
    with (
        ReplayClient(server.uri, "replay", timeout_s=0.2) as hasty,
        pytest.raises(LimitTimeoutError, match="sampling requires 10 items, and there are 4") as caught,
    ):
        hasty.sample(2)
    assert caught.value.why == "sampling requires 10 items, and there are 4"
    assert caught.value.since > 0.0
    client.set_limits(min_size=1)
    assert len(client.sample(2)[1]) == 2


def test_a_rejected_fragment_is_reported_and_the_others_are_accepted(client: ReplayClient) -> None:
    client.extend(episode(0, range(2)))
    bad = episode(1, range(2))
    bad["obs"] = np.zeros((2, 3))
    client.extend(bad)
    with pytest.raises(ColumnMismatchError, match="'obs'"):
        client.flush()
    client.extend(episode(4, range(2)))
    client.flush()
    assert (client.written.fragments, client.written.refused) == (2, 1)
    assert len(client) == 4


def test_fragments_after_one_that_is_rejected_are_sent_again(client: ReplayClient) -> None:
    bad = episode(1, range(2))
    bad["terminateds"] = np.full(2, 7.0)
    client.extend(bad)
    refusals = 0
    for number in range(20):
        try:
            client.extend(episode(number, range(2)))
        except ColumnMismatchError:
            refusals += 1
    while True:
        try:
            client.flush()
            break
        except ColumnMismatchError:
            refusals += 1
    assert refusals == client.written.refused == 1
    assert len(client) == client.written.rows == 40


def test_objects_that_would_be_pickled_are_rejected(client: ReplayClient) -> None:
    client.extend(SampleBatch(obs=[1, 2], infos=np.array([{1, 2}, {"a": 1}], object)))
    with pytest.raises(UntrustedPickleError, match="'infos'"):
        client.flush()


@pytest.mark.parametrize("values", [["a", "b", "a"], np.array(["a", "b", "a"], object), [0.0, 0.5, np.nan]])
@pytest.mark.parametrize("writer", ["someone", ""])
def test_environments_of_several_rings_must_be_numbered(values: Any, writer: str) -> None:
    table = ReplayTable("replay", capacity=100, streams=2)
    rows = episode(0, range(3))
    rows["env_id"] = values
    with ReplayServer([table]) as server, ReplayClient(server.uri, "replay", writer=writer) as client:
        client.extend(rows)
        with pytest.raises(ColumnTypeError, match="column 'env_id' must have one integer"):
            client.flush()
        assert len(table) == 0


def test_rejected_calls_report_the_argument(client: ReplayClient, server: ReplayServer) -> None:
    with pytest.raises(ArgumentError, match="gamma must be a number from 0 to 1"):
        client.sample(4, n_step=3, gamma=7.0)
    with pytest.raises(ArgumentError, match="did you mean 'replay'"):
        ReplayClient(server.uri, "replay_").sample(1)
    with pytest.raises(ArgumentError, match="use sample, which returns both"):
        client.sample_indices(4)
    with pytest.raises(ArgumentError, match="a folder for checkpoints"):
        client.checkpoint()


def test_a_client_can_be_sent_to_other_processes_by_its_address(client: ReplayClient) -> None:
    fill(client)
    client.flush()
    with pickle.loads(pickle.dumps(client)) as other:
        assert (other.uris, other.table, other.writer) == (client.uris, client.table, client.writer)
        assert len(other) == 120


def test_a_closed_client_rejects_calls(server: ReplayServer) -> None:
    client = ReplayClient(server.uri, "replay")
    client.close()
    client.close()
    with pytest.raises(ServiceError, match="got a closed one"):
        client.sample(1)


def test_only_clients_with_the_token_are_served() -> None:
    with ReplayServer([new_table()], token="open-sesame") as server:
        with ReplayClient(server.uri, "replay", token="open-sesame") as client:
            fill(client)
            client.sample(4)
            client.publish({"a": 1})
        for token in (None, "open", "open-sesame-"):
            with pytest.raises(AccessError, match="must have the token of the service"):
                ReplayClient(server.uri, "replay", token=token).sample(4)
            with pytest.raises(AccessError):
                ReplayClient(server.uri, "replay", token=token).extend(episode(0, range(2)))
            with pytest.raises(AccessError):
                ReplayClient(server.uri, "replay", token=token).info()
    with pytest.raises(ArgumentError, match="visible ASCII"):
        ReplayServer([new_table()], token="öpen")
    with pytest.raises(ArgumentError, match="visible ASCII"):
        ReplayClient("grpc://127.0.0.1:1", "replay", token="two words")


def leave_by_an_error(client: Any) -> None:
    with client:
        for number in range(2):
            client.extend(fragment(number))
        raise KeyError


def test_an_error_exits_the_client_without_waiting_for_fragments() -> None:
    tables = [ReplayTable("queue", kind="queue", capacity=1) for _ in range(2)]
    with ReplayServer(tables[:1]) as server, ReplayServer(tables[1:]) as unused:
        shards = ReplayClient([server.uri, unused.uri], "queue", shares=[1.0, 1e-9])
        for client in (ReplayClient(server.uri, "queue"), shards):
            began = time.monotonic()
            with pytest.raises(KeyError):
                leave_by_an_error(client)
            assert time.monotonic() - began < 20.0


def test_a_rejected_fragment_does_not_prevent_the_next_one() -> None:
    with (
        ReplayServer([ReplayTable("replay", capacity=10)]) as server,
        ReplayClient(server.uri, "replay", max_unacknowledged=1) as client,
    ):
        client.extend(episode(0, range(11)))
        with pytest.raises(CapacityError, match="at most 10 steps"):
            client.extend(episode(1, range(4)))
        assert len(client) == client.written.rows == 4
        assert (client.written.sent, client.written.fragments, client.written.refused) == (2, 1, 1)


@pytest.mark.parametrize("prefetch", [0, 2])
def test_closing_ends_the_wait_of_a_thread_for_a_sample(client: ReplayClient, prefetch: int) -> None:
    actual: list[BaseException] = []

    def draw() -> None:
        try:
            learner.sample(4)
        except SampleBatchError as error:
            actual.append(error)

    with ReplayClient(client.uris, "replay", prefetch=prefetch) as learner:
        thread = threading.Thread(target=draw)
        thread.start()
        while not client.info()["held_back"]:
            time.sleep(0.01)
    thread.join(20)
    assert [type(error) for error in actual] == [ServiceError]
    assert "the client must be open, got a closed one" in str(actual[0])


def test_an_error_does_not_wait_for_a_thread_with_blocked_fragments(server: ReplayServer) -> None:
    actual: list[BaseException] = []

    def write() -> None:
        try:
            for number in range(40):
                writer.extend(fragment(number))
        except SampleBatchError as error:
            actual.append(error)

    with ReplayClient(server.uri, "queue") as reader:
        reader.reset()
        writer = ReplayClient(server.uri, "queue", max_unacknowledged=1)
        thread = threading.Thread(target=write)
        thread.start()
        while not reader.info()["held_back"]:
            time.sleep(0.01)
        writer.__exit__(KeyError, KeyError(), None)
        reader.sample(20)
        thread.join(20)
    assert [type(error) for error in actual] == [ServiceError]


def test_available_samples_do_not_wait_for_later_requests() -> None:
    table = ReplayTable("once", capacity=100, max_times_sampled=1)
    with ReplayServer([table]) as server, ReplayClient(server.uri, "once", timeout_s=0.3) as client:
        client.extend(episode(0, range(24)))
        client.flush()
        actual: list[int] = []
        samples = client.stream(2, prefetch=16)
        for _ in range(12):
            actual += next(samples).batch_indexes.tolist()
        with pytest.raises(LimitTimeoutError):
            next(samples)
        assert sorted(actual) == list(range(24))


def test_added_values_of_several_environments_may_be_overwritten(
    client: ReplayClient, monkeypatch: pytest.MonkeyPatch
) -> None:
    retained = []
    monkeypatch.setattr(client._only._writer, "put", lambda rows, fragment: retained.append(rows))
    obs = np.zeros((2, 3))
    columns = {"act": [0, 0], "rew": [0.0, 0.0], "terminated": [False, False], "truncated": [False, False]}
    client.add(obs=obs, obs_next=obs.copy(), buffer_ids=[0, 1], **columns)
    obs[:] = 7.0
    # A fragment that is lost on its way is sent again.
    assert not SampleBatch.from_arrow(retained[0])["obs"].any()


def _pendulum_steps(scale: bool, seed: int = 0) -> SampleBatch:
    rng = np.random.default_rng(seed)
    steps = SampleBatch(
        obs=rng.normal(size=(6, 3)),
        actions=rng.uniform(-1, 1, (6, 1)),
        rewards=np.zeros(6),
        terminateds=np.arange(6) == 5,
        truncateds=np.zeros(6, bool),
        eps_id=np.full(6, seed),
        t=np.arange(6),
    )
    steps.action_unit = ActionUnit("scale", -2.0, 2.0) if scale else ActionUnit()
    return steps


def _put(client: ReplayClient, steps: SampleBatch) -> None:
    client.extend(steps)
    client.flush()


@pytest.mark.parametrize("kind", ["uniform", "prioritized"])
def test_samples_of_steps_preserve_the_action_unit(kind: str) -> None:
    with (
        ReplayServer([ReplayTable("unit", kind=kind, capacity=1000)]) as server,
        ReplayClient(server.uri, "unit") as client,
    ):
        client.extend(_pendulum_steps(scale=True))
        client.add(_pendulum_steps(scale=True, seed=1)[:1].as_batch("tianshou"), buffer_ids=[0])
        client.flush()
        unit = ActionUnit("scale", -2.0, 2.0)
        assert client.sample(4)[0].action_unit == unit
        assert client.sample_sequences(2, 3)[0].action_unit == unit
        with pytest.raises(ColumnMismatchError, match="must be in one unit"):
            _put(client, _pendulum_steps(scale=False, seed=2))


def test_fragments_of_a_table_must_have_one_action_unit() -> None:
    with ReplayServer([ReplayTable("unit", kind="queue", capacity=20)]) as server:
        with ReplayClient(server.uri, "unit") as client:
            _put(client, _pendulum_steps(scale=True))
            with pytest.raises(ColumnMismatchError, match="must be in one unit"):
                _put(client, _pendulum_steps(scale=False))
        with ReplayClient(server.uri, "unit") as client:
            assert client.sample(1)[0].action_unit == ActionUnit("scale", -2.0, 2.0)
