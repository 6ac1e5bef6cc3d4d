"""Threads that share a table: blocked by its limits, with the reason, and woken; rows are never torn."""

from __future__ import annotations

import pickle
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import Future
from contextlib import contextmanager, suppress
from typing import Any

import numpy as np
import pytest

from samplebatch.errors import LimitTimeoutError, TableClosedError
from samplebatch.service import RateLimiter, ReplayTable
from tests.service.limiter_rounds import run, settings_of
from tests.service.table_rows import episode, fragment
from tests.soaks import rounds


@contextmanager
def running(*calls: Callable[[], Any]) -> Iterator[list[Future[Any]]]:
    """Run calls in daemon threads, so that a failed test does not wait for them."""

    def run(call: Callable[[], Any], future: Future[Any]) -> None:
        try:
            future.set_result(call())
        except Exception as error:
            future.set_exception(error)

    futures = [Future[Any]() for _ in calls]
    threads = [threading.Thread(target=run, args=pair, daemon=True) for pair in zip(calls, futures, strict=True)]
    for thread in threads:
        thread.start()
    yield futures
    for thread in threads:
        thread.join(30)
        assert not thread.is_alive()


def wait_for_held(table: ReplayTable, count: int) -> list[dict[str, Any]]:
    """Wait until a table blocks `count` callers; return the callers."""
    for _ in range(2000):
        stored: list[dict[str, Any]] = table.info()["held_back"]
        if len(stored) == count:
            return stored
        time.sleep(0.005)
    raise AssertionError(f"{count} should be held back, there are {stored}")


def test_a_sample_waits_for_items_and_reports_the_reason() -> None:
    table = ReplayTable("replay", capacity=10, limiter=RateLimiter(3))
    started = time.time()
    with running(lambda: table.sample(2, reader="learner-0")) as (sampling,):
        (stored,) = wait_for_held(table, 1)
        assert (stored["who"], stored["action"]) == ("learner-0", "sample")
        assert stored["why"] == "sampling requires 3 items, and there are 0"
        assert started <= stored["since"] <= time.time()
        table.extend(episode(0, range(2)))
        assert wait_for_held(table, 1)[0]["why"] == "sampling requires 3 items, and there are 2"
        table.extend(episode(1, range(2)))
        sample = sampling.result(5)
    assert len(sample.indices) == 2
    assert sample.held_s > 0
    assert table.info()["held_back"] == []


def test_inserts_and_samples_alternate_within_the_ratio() -> None:
    table = ReplayTable("replay", capacity=100, limiter=RateLimiter(4, samples_per_insert=2.0, error_buffer=8.0))
    furthest: list[float] = []

    def insert() -> None:
        for i in range(100):
            table.extend(episode(i, range(3)), writer="w")

    def sample() -> None:
        for _ in range(74):
            table.sample(8)
            info = table.info()
            furthest.append(info["sampled"] - 2.0 * (info["inserted"] - 4))

    with running(insert, sample) as calls:
        for call in calls:
            call.result(30)
    info = table.info()
    assert (info["inserted"], info["sampled"]) == (300, 592)
    # The buffer, and the rest of the request that went over it.
    assert min(furthest) >= -8 - 2 * 3
    assert max(furthest) <= 8 + 8


def test_a_full_queue_blocks_writers_until_it_is_read() -> None:
    table = ReplayTable("queue", kind="queue", capacity=2)

    def insert() -> None:
        for i in range(50):
            table.extend(fragment(i), writer="worker")

    with running(insert) as (inserting,):
        (stored,) = wait_for_held(table, 1)
        assert stored["why"] == "it is full with 2 fragments, and only sampling removes them"
        assert [table.sample(1, timeout_s=5).indices.item() for _ in range(50)] == list(range(50))
        inserting.result(5)


def test_a_fragment_that_is_sent_again_while_it_is_blocked_is_inserted_once() -> None:
    table = ReplayTable("queue", kind="queue", capacity=1)

    def insert() -> int:
        return table.extend(fragment(1), writer="w", stream="s", number=2, timeout_s=20).inserted

    table.extend(fragment(0), writer="w", stream="s", number=1)
    with running(insert, insert) as calls:
        wait_for_held(table, 2)
        table.sample(1)
        assert sorted(call.result(20) for call in calls) == [0, 2]
    assert table.taken("w", "s") == 2
    assert table.info()["inserted"] == 2


def test_every_fragment_of_many_writers_is_read_once() -> None:
    table = ReplayTable("queue", kind="queue", capacity=3)
    recorded: list[int] = []

    def write(start: int) -> None:
        for i in range(start, start + 100):
            table.extend(fragment(i), writer=str(start))

    def read() -> None:
        for _ in range(200):
            recorded.append(int(table.sample(1).batch["number"][0]))

    with running(*(lambda start=start: write(start) for start in (0, 100, 200, 300)), read, read) as calls:
        for call in calls:
            call.result(60)
    assert sorted(recorded) == list(range(400))
    assert (table.info()["inserted"], table.info()["sampled"]) == (400, 400)


def test_writers_are_not_blocked_by_a_ratio_while_a_learner_lacks_items() -> None:
    limiter = RateLimiter(1, samples_per_insert=1.0, error_buffer=1.0)
    table = ReplayTable("once", capacity=40, max_times_sampled=1, limiter=limiter)

    def insert() -> None:
        for i in range(10):
            table.extend(episode(i, range(2)), timeout_s=10)

    with running(lambda: table.sample(20, timeout_s=10), lambda: table.sample(2, timeout_s=10), insert) as calls:
        table.extend(episode(11, range(4)), timeout_s=10)
        for call in calls:
            call.result(15)
    assert (table.info()["inserted"], table.info()["sampled"]) == (24, 22)


def test_two_learners_that_lack_items_do_not_wake_each_other() -> None:
    table = ReplayTable("once", capacity=40, max_times_sampled=1)
    table.extend(episode(0, range(1)))
    with running(lambda: table.sample(5), lambda: table.sample(5)) as calls:
        wait_for_held(table, 2)
        before = time.thread_time(), time.process_time()
        time.sleep(0.3)
        others = (time.process_time() - before[1]) - (time.thread_time() - before[0])
        table.extend(episode(1, range(9)))
        for call in calls:
            call.result(5)
    assert others < 0.15, "threads that wait are to sleep"


@pytest.mark.parametrize(
    ("tables", "seed"), [pytest.param(80, 0, id="few"), pytest.param(rounds(20), 1, id="many", marks=pytest.mark.long)]
)
def test_no_accepted_settings_stop_writers_and_readers_for_good(tables: int, seed: int) -> None:
    outcomes = [(run(settings), settings) for settings in settings_of(tables, seed)]
    assert not [(outcome, settings) for outcome, settings in outcomes if outcome not in ("refused", "done")]
    assert sum(outcome == "done" for outcome, _ in outcomes) > tables / 3


@pytest.mark.parametrize("kind", ["uniform", "fifo", "lifo", "prioritized"])
def test_a_full_table_is_sampled_until_there_is_room_for_any_ratio(kind: Any) -> None:
    limiter = RateLimiter(4, samples_per_insert=4, error_buffer=4)
    table = ReplayTable(
        "t", kind=kind, items="fragments", capacity=4, remover="none", max_times_sampled=4, limiter=limiter, seed=0
    )
    for number in range(4):
        table.extend(fragment(number), timeout_s=0)
    table.sample(4, timeout_s=0)
    with pytest.raises(LimitTimeoutError, match="samples are 4 ahead, with a limit of 4"):
        table.sample(1, timeout_s=0)
    assert len(table) == 4

    def read() -> None:
        while table.info()["inserted"] < 5:
            with suppress(LimitTimeoutError):
                table.sample(1, timeout_s=0.05)

    with running(lambda: table.extend(fragment(9), timeout_s=20), read) as (inserting, reading):
        assert inserting.result(25).inserted == 2
        reading.result(25)


def test_a_key_is_replaced_in_a_full_table() -> None:
    table = ReplayTable("t", kind="key", capacity=2, remover="none")
    for number, key in enumerate("abba"):
        table.extend(fragment(number), keys=key, timeout_s=0)
    assert [table.sample(1, key=key).indices.item() for key in "ab"] == [3, 2]
    with pytest.raises(LimitTimeoutError, match="it is full with 2 fragments"):
        table.extend(fragment(4), keys="c", timeout_s=0)


def test_a_change_of_limits_wakes_waiting_threads() -> None:
    table = ReplayTable("replay", capacity=10, limiter=RateLimiter(8))
    table.extend(episode(0, range(4)))
    with running(lambda: table.sample(2)) as (sampling,):
        wait_for_held(table, 1)
        table.set_limits(min_size=4)
        assert len(sampling.result(5).indices) == 2
    assert table.info()["limits"]["min_size"] == 4


def test_closing_wakes_waiting_threads_and_rejects_new_requests() -> None:
    table = ReplayTable("queue", kind="queue", capacity=1)
    other = ReplayTable("replay", capacity=4)
    table.extend(fragment(0))
    with running(lambda: table.extend(fragment(1)), lambda: other.sample(1)) as calls:
        wait_for_held(table, 1)
        wait_for_held(other, 1)
        for first, call in zip((table, other), calls, strict=True):
            first.close()
            with pytest.raises(TableClosedError, match=f"table {first.name!r} is closed"):
                call.result(5)
    for refused in (lambda: table.extend(fragment(2)), lambda: table.sample(1)):
        with pytest.raises(TableClosedError):
            refused()
    assert table.closed
    assert table.info()["closed"]


def test_a_timeout_is_reported_with_its_reason_and_start_time() -> None:
    table = ReplayTable("replay", capacity=10)
    started = time.time()
    with pytest.raises(
        LimitTimeoutError, match=r"table 'replay' blocked the sample of 'l' for 0\.1 s: sampling"
    ) as reported:
        table.sample(1, reader="l", timeout_s=0.1)
    assert time.time() - started >= 0.1
    assert reported.value.why == "sampling requires 1 items, and there are 0"
    assert started <= reported.value.since <= time.time()
    again = pickle.loads(pickle.dumps(reported.value))
    assert (str(again), again.why, again.since) == (str(reported.value), reported.value.why, reported.value.since)


def test_unknown_limits_and_limits_that_do_not_fit_change_nothing() -> None:
    table = ReplayTable("replay", capacity=10, max_times_sampled=2)
    before = table.info()
    for limits, message in (
        ({"min_sise": 2}, "a table has no limit 'min_sise'; did you mean 'min_size'"),
        ({"min_size": 11}, "min_size must be at most the capacity, 10 steps, got 11"),
        ({"min_size": 5, "samples_per_insert": 3.0}, "samples_per_insert must be at most max_times_sampled, 2, got 3"),
        ({"max_times_sampled": -1, "min_size": 5}, "max_times_sampled must be a whole number from 0, got -1"),
    ):
        with pytest.raises(ValueError, match=message):
            table.set_limits(**limits)
    assert table.info() == before


@pytest.mark.parametrize("kind", ["uniform", "prioritized"])
def test_samples_are_consistent_while_writers_insert(kind: Any) -> None:
    table = ReplayTable("replay", kind=kind, capacity=64, streams=2, seed=0)
    stop = threading.Event()

    def insert(writer: int) -> None:
        for i in range(100_000):
            table.extend(episode(2 * i + writer, range(5)), writer=str(writer))
            if stop.is_set():
                return

    with running(lambda: insert(0), lambda: insert(1)):
        try:
            for _ in range(200):
                sample = table.sample(32)
                rows = sample.batch
                np.testing.assert_array_equal(rows.obs, 100.0 * rows.eps_id + rows.t)
                np.testing.assert_array_equal(rows.obs_next, rows.obs + 1)
                if kind == "prioritized":
                    table.update_weight(sample.indices, np.ones(32), sample.generation)
        finally:
            stop.set()
