"""Tables of rows of any columns: keys, columns that arrive later, consumers, groups, budgets and lag."""

from __future__ import annotations

import pickle
import signal
import threading
import time

import numpy as np
import pytest

from samplebatch import SampleBatch
from samplebatch.errors import (
    AccessError,
    ArgumentError,
    CapacityError,
    ColumnLengthError,
    ColumnMismatchError,
    ColumnTypeError,
    LimitTimeoutError,
    RowIndexError,
    SampleBatchError,
    ServiceError,
    TableClosedError,
)
from samplebatch.service import Checkpoints, ReplayClient, ReplayServer, RowClient, RowTable
from samplebatch.service.row_table import Selection
from samplebatch.service.server import render_metrics


@pytest.fixture
def table():
    return RowTable("rows", 64, group="uid", version="version", length="ids", seed=0)


@pytest.fixture
def client(table):
    with ReplayServer([table]) as server, RowClient(server.uri, "rows", timeout_s=5.0) as client:
        yield client


@pytest.fixture(params=["table", "client"])
def rows(request, table):
    if request.param == "table":
        yield table
        return
    with ReplayServer([table]) as server, RowClient(server.uri, "rows", timeout_s=5.0) as client:
        yield client


# Writing and taking


def test_rows_are_inserted_once_their_columns_are_complete(rows):
    rows.put([3, 1, 2], {"ids": [[1], [2, 3], []], "text": ["a", None, "c"]})
    rows.put([2, 3], {"reward": [0.2, 0.3]})
    batch = rows.take(2, columns=["ids", "reward"])
    assert batch["key"].tolist() == [3, 2]
    assert [row.tolist() for row in batch["ids"]] == [[1], []]
    assert batch["reward"].tolist() == [0.3, 0.2]
    assert list(batch.column_names) == ["key", "ids", "reward"]
    rows.put([1], {"reward": [0.1]})
    last = rows.take(1, columns=["text", "reward"])
    assert last["key"].tolist() == [1]
    assert list(last["text"]) == [None]
    assert len(rows) == 0


def test_a_service_preserves_the_kinds_of_row_columns(client):
    options = {
        "flag": np.array([True, False, True]),
        "small": np.array([1, 2, 3], np.uint8),
        "half": np.array([1, 2, 3], np.float16),
        "frames": np.arange(24, dtype=np.float32).reshape(3, 2, 4),
        "ids": [np.array([1, 2], np.int32), np.array([], np.int32), np.array([3], np.int32)],
        "texts": ["é", "", "c"],
    }
    expected = SampleBatch({"key": [0, 1, 2], **options}, ragged="ids")
    client.put([0, 1, 2], SampleBatch(options, ragged="ids"))
    assert client.take(3, columns=list(options)) == expected


def test_keys_are_assigned_where_none_are_given(rows):
    first = rows.put(None, {"x": [1, 2]})
    second = rows.put(None, {"x": [3]})
    keys = [*first.tolist(), *second.tolist()]
    assert len(set(keys)) == 3
    assert rows.get(keys[::-1], columns=["x"])["x"].tolist() == [3, 2, 1]


def test_keys_may_be_text(rows):
    assert rows.put(["b", "a"], {"x": [1, 2]}) == ["b", "a"]
    assert rows.wait(["a"], columns=["x"], timeout_s=1) == ["a"]
    batch = rows.take(2, columns=["x"])
    assert list(batch["key"]) == ["b", "a"]
    with pytest.raises(ArgumentError, match="all integers or all text"):
        rows.put(["c", 4], {"x": [1, 2]})


def test_keys_are_of_one_type_per_table(rows):
    rows.put(["b"], {"x": [1]})
    with pytest.raises(RowIndexError, match=r"keys must exist in the table, got 1 of 1 unknown, first 1"):
        rows.get([1], columns=["x"])
    with pytest.raises(ArgumentError, match="all integers or all text"):
        rows.put([1], {"x": [1]})


def test_each_consumer_takes_each_row_once():
    table = RowTable("rows", 8, consumers=["critic", "trainer"])
    table.put([0, 1], {"x": [1, 2]})
    assert table.take(2, columns=["x"], consumer="critic")["x"].tolist() == [1, 2]
    assert len(table) == 2
    table.put([0, 1], {"value": [0.5, 0.6]})
    assert table.take(1, columns=["x", "value"])["value"].tolist() == [0.5]
    assert len(table) == 1
    with pytest.raises(LimitTimeoutError, match="1 rows are requested, and 0 are complete"):
        table.take(1, columns=["x"], consumer="critic", timeout_s=0)
    with pytest.raises(ArgumentError, match="a consumer of table 'rows', got 'critc'; did you mean 'critic'"):
        table.take(1, columns=["x"], consumer="critc")


def test_rows_of_many_writes_are_in_the_order_of_their_insertion():
    table, rng = RowTable("rows", 500), np.random.default_rng(1)
    order = rng.permutation(400)
    for part in np.array_split(order, 37):
        table.put(part, {"x": part * 2})
    for part in np.array_split(rng.permutation(400), 23):
        table.put(part, {"ids": SampleBatch(ids=[np.arange(k % 5) + k for k in part], ragged="ids")["ids"]})
    batch = table.take(400, columns=["x", "ids"])
    assert (batch["key"] == order).all()
    assert (batch["x"] == 2 * order).all()
    assert all((ids == np.arange(k % 5) + k).all() for k, ids in zip(order.tolist(), batch["ids"], strict=True))


def test_memory_of_rows_is_freed_and_reused():
    table, start = RowTable("rows", 100), 0
    for _ in range(200):
        keys = np.arange(start, start + 40)
        table.put(keys, {"x": keys})
        table.put(keys[::-1], {"y": keys[::-1] * 3})
        batch = table.take(40, columns=["x", "y"])
        assert (batch["x"] == keys).all()
        assert (batch["y"] == 3 * keys).all()
        start += 40
    assert len(table) == table.info()["nbytes"] == 0
    assert len(table._rows._keys) <= 1024


def test_a_complete_random_history_matches_a_dictionary():
    rng = np.random.default_rng(7)
    table, model, selected = RowTable("rows", 60, consumers=["a", "b"]), {}, {"a": [], "b": []}
    for step in range(600):
        action = rng.integers(5)
        if action < 2 and len(model) < 50:
            keys = rng.permutation(400)[: rng.integers(1, 8)] + 1000 * step
            table.put(keys, {"x": keys * 2})
            model.update({key: {"x"} for key in keys.tolist()})
        elif action == 2:
            keys = [key for key in rng.permutation(list(model)).tolist() if "y" not in model[key]][:5]
            if keys:
                table.put(keys, {"y": np.array(keys) * 3})
                for key in keys:
                    model[key].add("y")
        elif action > 2:
            consumer = "ab"[action - 3]
            columns = ["x", "y"] if rng.integers(2) else ["x"]
            completed = [key for key in model if model[key] >= set(columns) and key not in selected[consumer]]
            n = int(rng.integers(1, 6))
            if len(completed) < n:
                with pytest.raises(LimitTimeoutError):
                    table.take(n, columns=columns, consumer=consumer, timeout_s=0)
                continue
            batch = table.take(n, columns=columns, consumer=consumer)
            assert batch["key"].tolist() == completed[:n]
            assert (batch["x"] == 2 * batch["key"]).all()
            selected[consumer] += completed[:n]
            removed = [key for key in completed[:n] if key in selected["a"] and key in selected["b"]]
            for key in removed:
                del model[key]
        assert len(table) == len(model)


# Waiting


def test_a_wait_ends_when_the_columns_are_complete(rows):
    actual = []
    waiting = threading.Thread(target=lambda: actual.append(rows.wait([4, 5], columns=["reward"], timeout_s=5)))
    waiting.start()
    rows.put([5, 4], {"x": [1, 2]})
    rows.put([4], {"reward": [1.0]})
    assert not actual
    rows.put([5], {"reward": [1.0]})
    waiting.join(5)
    assert actual[0].tolist() == [4, 5]
    assert rows.wait(2, columns=["x"]).tolist() == [5, 4]


def test_a_put_continues_while_the_same_client_waits(client):
    actual = []
    taking = threading.Thread(target=lambda: actual.append(client.take(1, columns=["x"])))
    taking.start()
    time.sleep(0.1)
    client.put([1], {"x": [1]})
    taking.join(5)
    assert actual[0]["x"].tolist() == [1]


def test_a_timeout_reports_missing_columns_with_row_counts(rows):
    rows.put([1, 2, 3], {"x": [1, 2, 3]})
    rows.put([1], {"reward": [1.0]})
    with pytest.raises(LimitTimeoutError) as error:
        rows.take(4, columns=["x", "reward", "advantage"], timeout_s=0.05)
    assert (
        "4 rows are requested, and 0 are complete; 3 lack 'advantage', 2 lack 'reward'; 1 rows do not exist yet"
        in str(error.value)
    )
    with pytest.raises(LimitTimeoutError, match="2 rows are requested, and 1 are complete; 1 rows do not exist yet"):
        rows.wait([3, 9], columns=["x"], timeout_s=0.05)
    assert rows.take(3, columns=["x"])["x"].tolist() == [1, 2, 3]


def test_a_full_table_blocks_new_rows_but_not_new_columns():
    table = RowTable("rows", 2)
    table.put([1, 2], {"x": [1, 2]})
    with pytest.raises(LimitTimeoutError, match="2 of 2 rows, no room for 1 more"):
        table.put([3], {"x": [3]}, timeout_s=0.01)
    table.put([1], {"y": [1]})
    table.take(1, columns=["x", "y"])
    table.put([3], {"x": [3]}, timeout_s=0.01)
    assert len(table) == 2


# Errors


@pytest.mark.parametrize(
    ("keys", "columns", "kind", "message"),
    [
        ([1, 5], {"x": [1, 2]}, ArgumentError, "column 'x' must be written once per key, got 1 of 2 keys with it"),
        ([5, 5], {"x": [1, 2]}, ArgumentError, "keys must be unique, got 1 repeated of 2"),
        ([5, 6], {"x": [1, 2, 3]}, ColumnLengthError, "'x' must have 2 rows"),
        ([5, 6], {"x": [1, 2], "y": [1]}, ColumnLengthError, "'y'"),
        ([5], {"x": [1.5]}, ColumnMismatchError, "column 'x' must be tensor of int64"),
        ([5], {"new": [object()]}, ColumnTypeError, "column 'new' must contain numbers, flags or text"),
        ([5], {}, ArgumentError, "columns must contain at least one column, got none"),
        ([0.5], {"x": [1]}, ArgumentError, "keys must be integers or text, got float64"),
        ([2**64], {"x": [1]}, ArgumentError, "keys must be integers or text"),
        ("ab", {"x": [1, 2]}, ArgumentError, "keys must be a list of integers or text, got a str"),
        ([5], {"key": [1]}, ArgumentError, "columns must not contain 'key'"),
        (range(65), {"x": np.arange(65)}, CapacityError, "a put must have at most 64 rows, got 65"),
        (["k" * 300], {"x": [1]}, CapacityError, "keys must have at most 256"),
        ([5], {"uid": [0.5]}, ColumnTypeError, "column 'uid' must have one integer per row"),
    ],
)
def test_a_put_that_is_rejected_stores_nothing(rows, keys, columns, kind, message):
    rows.put([1], {"x": [1]})
    with pytest.raises(kind, match=message):
        rows.put(keys, columns)
    assert len(rows) == 1
    assert sorted(rows.info()["columns"]) == ["x"]
    rows.put([5], {"x": [6]})
    assert rows.take(2, columns=["x"])["x"].tolist() == [1, 6]


def test_an_update_checks_whether_its_keys_exist(rows):
    rows.put([1], {"x": [1]}, update=False)
    with pytest.raises(RowIndexError, match="got 1 of 2 unknown, first 2"):
        rows.put([1, 2], {"y": [1, 2]}, update=True)
    with pytest.raises(ArgumentError, match="keys must be new, got 1 of 2 existing, first 1"):
        rows.put([2, 1], {"y": [1, 2]}, update=False)
    assert len(rows) == 1
    assert "y" not in rows.info()["columns"]


@pytest.mark.parametrize(
    ("arguments", "kind", "message"),
    [
        ({"n": 0}, ArgumentError, "n must be"),
        ({"n": -3}, ArgumentError, "n must be"),
        ({"n": 1 << 20}, CapacityError, "n must be at most 65536 rows"),
        ({"n": 1, "max_tokens": -1}, ArgumentError, "max_tokens must be"),
        ({"n": 1, "max_lag": -1}, ArgumentError, "max_lag must be"),
        ({"n": 1, "at_least": 2}, ArgumentError, "at_least must be at most n, 1, got 2"),
        ({"n": 1, "columns": "x"}, ArgumentError, "columns must be a list of names"),
        ({"n": 1, "columns": ["x", "x"]}, ArgumentError, "columns must be one or more unique names"),
    ],
)
def test_a_request_that_is_out_of_range_is_rejected(rows, arguments, kind, message):
    rows.put([1], {"x": [1]})
    with pytest.raises(kind, match=message):
        rows.take(**arguments)


def test_selection_requires_the_selector_columns_of_the_table():
    table = RowTable("rows", 4)
    table.put([1], {"x": [1]})
    for option, value in (("by_group", True), ("max_tokens", 3), ("max_lag", 0)):
        with pytest.raises(ArgumentError, match=f"to select by {option}, got none"):
            table.take(1, columns=["x"], **{option: value})


def test_reading_unknown_or_incomplete_rows_is_rejected(rows):
    rows.put([1, 2], {"x": [1, 2]})
    rows.put([1], {"y": [1]})
    with pytest.raises(RowIndexError, match="got 1 of 2 unknown, first 7"):
        rows.get([1, 7], columns=["x"])
    with pytest.raises(ArgumentError, match="1 lack 'y'"):
        rows.get([1, 2], columns=["x", "y"])
    assert rows.remove([1, 7]) == 1
    assert len(rows) == 1


# Groups, budgets, lag


def test_groups_are_taken_with_all_of_their_rows_or_none(rows):
    rows.put(range(6), {"uid": ["a", "b", "a", "b", "a", "c"], "x": np.arange(6)})
    rows.put([0, 1, 3, 5], {"reward": [0.0, 1.0, 3.0, 5.0]})
    batch = rows.take(3, columns=["x", "reward"], by_group=True, timeout_s=1)
    assert batch["key"].tolist() == [1, 3, 5]
    with pytest.raises(LimitTimeoutError, match="2 lack 'reward'"):
        rows.take(3, columns=["x", "reward"], by_group=True, timeout_s=0.05)
    rows.put([2, 4], {"reward": [2.0, 4.0]})
    assert rows.take(3, columns=["reward"], by_group=True)["reward"].tolist() == [0.0, 2.0, 4.0]


def test_a_group_waits_for_its_size():
    table = RowTable("rows", 16, group="uid", group_size=3)
    table.put([0, 1], {"uid": [7, 7]})
    with pytest.raises(LimitTimeoutError):
        table.take(4, by_group=True, at_least=1, timeout_s=0)
    table.put([2], {"uid": [7]})
    assert table.take(4, by_group=True, at_least=1)["key"].tolist() == [0, 1, 2]


def test_a_group_larger_than_the_budget_is_reported(rows):
    rows.put([0, 1, 2], {"uid": [4, 4, 4], "ids": [[1, 2], [3, 4], [5, 6]]})
    with pytest.raises(CapacityError, match="the next group must have at most n = 2 rows, got 3"):
        rows.take(2, columns=["ids"], by_group=True)
    with pytest.raises(CapacityError, match="the next group must have at most max_tokens = 5 tokens, got 6"):
        rows.take(3, columns=["ids"], by_group=True, max_tokens=5)
    with pytest.raises(CapacityError, match="the next row must have at most max_tokens = 1 tokens, got 2"):
        rows.take(3, columns=["ids"], max_tokens=1)
    assert len(rows) == 3
    assert rows.info()["held_back"] == []


def test_a_token_budget_bounds_the_rows(rows):
    rows.put(range(5), {"ids": [[0] * k for k in (3, 2, 5, 1, 1)]})
    assert rows.take(5, columns=["ids"], max_tokens=6)["key"].tolist() == [0, 1]
    assert rows.take(2, columns=["ids"], max_tokens=100)["key"].tolist() == [2, 3]


def test_rows_that_lag_too_far_are_not_taken(rows):
    rows.put(range(4), {"version": [1, 5, 3, 4], "x": [0, 1, 2, 3]})
    assert rows.take(3, columns=["x"], max_lag=1, at_least=1)["key"].tolist() == [1, 3]
    assert len(rows) == 2


def test_rows_that_lag_too_far_are_evicted_when_weights_are_published():
    table = RowTable("rows", 8, version="version", max_lag=1)
    with ReplayServer([table]) as server, RowClient(server.uri, "rows") as client:
        assert client.publish({"w": np.zeros(2)}) == 1
        client.put(range(3), {"version": [0, 1, 1]})
        assert len(client) == 3
        client.publish({"w": np.ones(2)})
        assert client.take(2, columns=["version"])["key"].tolist() == [1, 2]
        assert client.info()["evicted"] == 1


def test_samples_are_uniform_without_replacement_and_keep_the_rows(rows):
    rows.put(range(10), {"x": np.arange(10), "uid": np.arange(10) // 5})
    sample = [sorted(rows.sample(5, columns=["x"], seed=seed)["x"].tolist()) for seed in range(40)]
    assert all(len(set(item)) == 5 for item in sample)
    assert {value for item in sample for value in item} == set(range(10))
    assert rows.sample(5, columns=["x"], seed=3) == rows.sample(5, columns=["x"], seed=3)
    groups = {tuple(rows.sample(9, columns=["x"], by_group=True, seed=seed)["x"].tolist()) for seed in range(20)}
    assert groups == {(0, 1, 2, 3, 4), (5, 6, 7, 8, 9)}
    assert len(rows) == 10


def test_the_oldest_rows_are_evicted_by_a_fifo_remover():
    table = RowTable("rows", 3, remover="fifo")
    for key in range(6):
        table.put([key], {"x": [key]})
    assert table.take(3, columns=["x"])["x"].tolist() == [3, 4, 5]
    assert table.info()["evicted"] == 3


# Exactly once


def test_a_lease_that_is_not_committed_returns_its_rows(table):
    table.put([1, 2], {"x": [1, 2]})
    selection = Selection.of(2, {"columns": ["x"]})
    lease = table.lease(selection, "trainer", reader="r", number=1)
    with pytest.raises(LimitTimeoutError):
        table.take(1, columns=["x"], timeout_s=0)
    assert not table.settle("r", 1)
    assert not table.commit(lease)
    again = table.lease(selection, "trainer", reader="r", number=2)
    assert table.commit(again)
    assert table.settle("r", 2)
    assert len(table) == 0


def test_a_repeated_put_is_stored_once(table):
    for _ in range(2):
        table.put([1], {"x": [1]}, writer="w", stream="s", number=1)
    assert len(table) == 1
    assert table.taken("w", "s") == 1


def test_rows_of_a_client_killed_while_taking_go_to_another(table):
    with ReplayServer([table]) as server, RowClient(server.uri, "rows", timeout_s=5.0) as client:
        client.put([1, 2], {"x": [1, 2]})
        with RowClient(server.uri, "rows") as dying:
            dying._open_session().ask({"ask": "take", "n": 2, "consumer": "trainer", "reader": "d", "number": 1})
            with pytest.raises(LimitTimeoutError):
                client.take(1, columns=["x"], timeout_s=0.05)
        assert client.take(2, columns=["x"])["x"].tolist() == [1, 2]


# The service


def test_a_client_is_pickled_and_closed(client):
    with pickle.loads(pickle.dumps(client)) as other:
        other.put([1], {"x": [1]})
    assert client.take(1, columns=["x"])["x"].tolist() == [1]
    client.close()
    client.close()
    with pytest.raises(ServiceError, match="the client must be open"):
        client.put([2], {"x": [1]})


def test_closing_ends_a_take_of_another_thread(client):
    errors = []

    def take():
        try:
            client.take(1, columns=["x"])
        except ServiceError as error:
            errors.append(error)

    taking = threading.Thread(target=take)
    taking.start()
    time.sleep(0.2)
    client.close()
    taking.join(5)
    assert len(errors) == 1


class Interrupt(Exception):
    """Exception that a signal handler raises."""


@pytest.mark.skipif(not hasattr(signal, "SIGUSR1"), reason="needs a signal for users")
@pytest.mark.parametrize(
    "call",
    [
        lambda rows: rows.wait([5], columns=["reward"], timeout_s=60.0),
        lambda rows: rows.take(1, columns=["reward"], timeout_s=60.0),
        lambda rows: rows.sample(1, columns=["reward"], timeout_s=60.0),
        lambda rows: rows.put([8, 9], {"ids": [1, 2]}, timeout_s=60.0),
    ],
    ids=["wait", "take", "sample", "put"],
)
def test_a_signal_handler_interrupts_a_blocked_call(call):
    def interrupt(*_):
        raise Interrupt

    table = RowTable("rows", 2)
    previous = signal.signal(signal.SIGUSR1, interrupt)
    try:
        with ReplayServer([table]) as server, RowClient(server.uri, "rows") as rows:
            rows.put([1], {"ids": [1]})
            threading.Timer(0.3, signal.pthread_kill, [threading.main_thread().ident, signal.SIGUSR1]).start()
            started = time.monotonic()
            with pytest.raises(Interrupt):
                call(rows)
            assert time.monotonic() - started < 50
            # No later call gets the answer to the interrupted one.
            assert rows.get([1], columns=["ids"])["ids"].tolist() == [1]
            assert rows.take(1, columns=["ids"])["key"].tolist() == [1]
    finally:
        signal.signal(signal.SIGUSR1, previous)


def test_a_client_of_rows_has_one_service():
    with pytest.raises(ArgumentError, match="uri must be the address of one service, got a list; use one RowClient"):
        RowClient(["grpc://127.0.0.1:1", "grpc://127.0.0.1:2"], "rows")


def test_a_closed_table_rejects_requests(table):
    table.close()
    with pytest.raises(TableClosedError):
        table.put([1], {"x": [1]})
    with pytest.raises(TableClosedError):
        table.take(1)


def test_a_service_of_rows_requires_its_token(table):
    with ReplayServer([table], token="sesame") as server, RowClient(server.uri, "rows", token="open") as client:
        with pytest.raises(AccessError):
            client.put([1], {"x": [1]})
        with pytest.raises(AccessError):
            client.take(1)


def test_clients_of_steps_are_advised_to_use_another(table):
    with (
        ReplayServer([table]) as server,
        ReplayClient(server.uri, "rows") as client,
        pytest.raises(ArgumentError, match="table 'rows' must contain steps or fragments, got rows"),
    ):
        client.sample(1)


def test_messages_beyond_the_bound_are_rejected(table):
    with (
        ReplayServer([table], max_message_nbytes=2000) as server,
        RowClient(server.uri, "rows", timeout_s=1.0) as client,
    ):
        with pytest.raises(CapacityError, match="at most 2000 bytes"):
            client.put([1], {"x": np.zeros((1, 500))})
        for key in range(4):
            client.put([key], {"x": np.zeros((1, 100))})
        with pytest.raises(CapacityError, match="rows must have at most 2000 bytes"):
            client.take(4, columns=["x"])
        assert len(client.take(1, columns=["x"])) == 1


def test_metrics_escape_the_names_of_rows():
    table = RowTable('a "b"\n', 4)
    text = render_metrics([table.info()])
    assert 'samplebatch_table_capacity{table="a \\"b\\"\\n"} 4' in text.splitlines()


# Checkpoints


def test_a_checkpoint_restores_rows_keys_marks_and_columns(tmp_path):
    arguments = {"consumers": ["critic", "trainer"], "group": "uid", "length": "ids", "version": "version"}
    table = RowTable("rows", 50, **arguments)
    table.put(range(6), {"ids": [[0] * k for k in range(6)], "uid": list("aabbcc"), "version": np.arange(6)})
    table.put([4, 1], {"reward": [4.0, 1.0]})
    table.put([0, 1], {"text": ["zero", None]})
    table.take(2, columns=["ids"], consumer="critic")
    lease = table.lease(Selection.of(1, {"columns": ["ids"]}), "trainer", reader="r", number=1)
    table.remove([3])
    with Checkpoints(tmp_path / "service") as checkpoints:
        written = checkpoints.write([table])
        assert written.sizes == {"rows": 5}
        again = RowTable("rows", 50, **arguments)
        checkpoints.restore([again])
    assert not again.commit(lease)
    assert again.info()["columns"] == table.info()["columns"]
    assert again.take(3, columns=["ids"], consumer="critic")["key"].tolist() == [2, 4, 5]
    batch = again.take(2, columns=["ids", "reward"])
    assert batch["key"].tolist() == [1, 4]
    assert batch["ids"].lengths.tolist() == [1, 4]
    assert list(again.get([0], columns=["text"])["text"]) == ["zero"]
    with pytest.raises(RowIndexError, match="first 4, which was taken"):
        again.put([4], {"text": ["complete"]})
    with pytest.raises(RowIndexError, match="first 3, which was removed"):
        again.put([3], {"text": ["complete"]})
    again.put([0], {"reward": [0.0]}, update=True)
    assert again.take(2, columns=["uid"], by_group=True)["uid"].tolist() == ["a", "b"]
    assert again.take(1, columns=["ids"])["key"].tolist() == [5]


def test_checkpoints_of_other_consumers_are_rejected(tmp_path):
    table = RowTable("rows", 5, consumers=["critic"])
    table.put([1], {"x": [1]})
    with Checkpoints(tmp_path / "service") as checkpoints:
        checkpoints.write([table])
        other = RowTable("rows", 5)
        with pytest.raises(ColumnMismatchError, match="consumers must include 'critic'"):
            checkpoints.restore([other])
        assert len(other) == 0


def test_a_writer_continues_while_checkpoints_are_written(tmp_path):
    table, stop = RowTable("rows", 5000), threading.Event()

    def write():
        for key in range(3000):
            table.put([key], {"x": [key]})
            table.put([key], {"y": [key]})
        stop.set()

    writing = threading.Thread(target=write)
    with Checkpoints(tmp_path / "service") as checkpoints:
        writing.start()
        while not stop.is_set():
            checkpoints.write([table])
        writing.join()
        checkpoints.write([table])
        again = RowTable("rows", 5000)
        checkpoints.restore([again])
    batch = again.take(3000, columns=["x", "y"])
    assert (batch["x"] == np.arange(3000)).all()
    assert (batch["y"] == np.arange(3000)).all()


@pytest.mark.parametrize(
    ("name", "value"),
    [("numbers", [1, 1]), ("numbers", [1]), ("marks", {"trainer": [True]}), ("next_key", -1), ("counts", ["x", 0, 0])],
)
def test_a_damaged_state_does_not_change_the_table(name, value):
    table, other = RowTable("rows", 5), RowTable("rows", 5)
    table.put([1, 2], {"x": [1, 2]})
    other.put([9], {"z": [1]})
    with pytest.raises(SampleBatchError):
        other.load_state_dict({**table.freeze(), name: value})
    assert other.take(1, columns=["z"])["key"].tolist() == [9]


def test_text_groups_remain_distinct_after_old_names_are_dropped():
    table = RowTable("rows", 20, group="uid")
    table.put([-1, -2], {"uid": ["first", "first"]})
    for step in range(1500):
        table.put([2 * step, 2 * step + 1], {"uid": [f"g{step}", f"g{step}"]})
        if step < 3:
            continue
        table.remove([2 * (step - 3), 2 * (step - 3) + 1])
    assert len(table._rows._groups) < 1100
    assert table.take(2, by_group=True)["uid"].tolist() == ["first", "first"]
    for step in (1497, 1498, 1499):
        assert table.take(2, by_group=True)["uid"].tolist() == [f"g{step}", f"g{step}"]


def test_a_late_column_does_not_recreate_an_evicted_row():
    table = RowTable("rows", 8, version="version", max_lag=1)
    table.put([1, 2], {"version": [1, 1], "x": [1, 2]})
    table.put([3], {"version": [5], "x": [3]})
    with pytest.raises(RowIndexError, match="got 1 of 2, first 1, which was evicted; put the others, or pass update"):
        table.put([3, 1], {"y": [3, 1]})
    assert table.info()["size"] == 1
    assert "y" not in table.info()["columns"]
    table.put([3], {"y": [3]})
    restored = RowTable("rows", 8, version="version", max_lag=1)
    restored.load_state_dict(table.freeze())
    for either in (table, restored):
        with pytest.raises(RowIndexError, match="got 1 of 1, first 2, which was evicted"):
            either.put([2], {"y": [2]}, timeout_s=0)
        either.put([1], {"version": [5]}, update=False)
        either.put([1], {"y": [1]})
        assert either.get([1], columns=["y"])["y"].tolist() == [1]


@pytest.mark.parametrize("removal", ["taken", "removed"])
def test_a_late_column_does_not_recreate_a_removed_row(rows, removal):
    rows.put([1, 2], {"x": [1, 2]})
    if removal == "taken":
        rows.take(1, columns=["x"])
    else:
        rows.remove([1])
    message = f"keys must not belong to removed rows, got 1 of 2, first 1, which was {removal}; put the others"
    with pytest.raises(RowIndexError, match=message):
        rows.put([2, 1], {"y": [2, 1]})
    with pytest.raises(RowIndexError, match="got 1 of 1 unknown, first 1"):
        rows.put([1], {"y": [1]}, update=True)
    assert len(rows) == 1
    assert list(rows.info()["columns"]) == ["x"]
    rows.put([2], {"y": [2]})
    rows.put([1], {"x": [3], "y": [3]}, update=False)
    assert rows.take(2, columns=["x", "y"])["x"].tolist() == [2, 3]


def test_a_row_taken_by_one_of_two_consumers_accepts_late_columns():
    table = RowTable("rows", 4, consumers=["critic", "trainer"])
    table.put([1], {"x": [1]})
    table.take(1, columns=["x"], consumer="critic")
    table.put([1], {"value": [0.5]})
    table.take(1, columns=["value"])
    with pytest.raises(RowIndexError, match="first 1, which was taken"):
        table.put([1], {"late": [1]})


def test_a_full_table_rejects_columns_of_evicted_rows_without_waiting():
    table = RowTable("rows", 1, version="version", max_lag=0)
    table.put(["a"], {"version": [1]})
    table.set_version(2)
    table.put(["b"], {"version": [2]})
    with pytest.raises(RowIndexError, match="got 1 of 1, first 'a', which was evicted"):
        table.put(["a"], {"y": [1]}, timeout_s=5)


def test_text_of_which_all_values_are_missing_is_text(rows):
    rows.put([1, 2], {"text": [None, None]})
    rows.put([3], {"text": ["three"]})
    assert rows.take(3, columns=["text"])["text"].tolist() == [None, None, "three"]
