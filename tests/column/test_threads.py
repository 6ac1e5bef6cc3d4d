"""Two threads share large copies: all jobs are done in any order without deadlocks."""

from __future__ import annotations

import gc
import multiprocessing
import os
import threading
import weakref

import numpy as np
import pytest

from samplebatch.column import memory, threads
from samplebatch.column.tensor import TensorColumn

ROWS = 3 * threads.WORTHWHILE // 8


def test_every_job_runs_once() -> None:
    recorded: list[int] = []
    threads.share([(1, lambda i=i: recorded.append(i)) for i in range(500)])  # type: ignore[misc]
    assert sorted(recorded) == list(range(500))


@pytest.mark.skipif(len(os.sched_getaffinity(0)) == 1, reason="one core has no helper")
def test_the_helper_thread_runs_part_of_the_jobs() -> None:
    observed = set()
    both = threading.Barrier(2, timeout=30)

    def job() -> None:
        observed.add(threading.get_ident())
        both.wait()

    threads.share([(1, job), (1, job)])
    assert len(observed) == 2


def test_an_error_in_a_job_is_raised_and_the_helper_thread_continues() -> None:
    def fail() -> None:
        raise KeyError("column")

    for _ in range(50):
        with pytest.raises(KeyError, match="column"):
            threads.share([(1, fail), *[(1, lambda: None)] * 5])
    test_every_job_runs_once()


def test_jobs_started_within_a_job_complete() -> None:
    recorded: list[int] = []
    inner = [(1, lambda i=i: recorded.append(i)) for i in range(10)]  # type: ignore[misc]
    threads.share([(1, lambda: threads.share(inner)) for _ in range(10)])
    assert len(recorded) == 100


def test_several_threads_share_the_helper() -> None:
    source = np.arange(ROWS)
    wrong: list[int] = []

    def call() -> None:
        for _ in range(5):
            if not np.array_equal(memory.copy_of(source), source):
                wrong.append(1)

    callers = [threading.Thread(target=call) for _ in range(6)]
    for caller in callers:
        caller.start()
    for caller in callers:
        caller.join(timeout=60)
        assert not caller.is_alive()
    assert wrong == []


def test_a_finished_job_retains_no_references() -> None:
    source = np.zeros(ROWS)
    copy = memory.copy_of(source)
    reference = weakref.ref(source)
    del source
    gc.collect()
    assert reference() is None
    assert copy.sum() == 0


@pytest.mark.parametrize("shape", [(ROWS,), (ROWS // 7, 7), (3, ROWS), (1, ROWS)])
def test_large_columns_are_copied_gathered_and_joined_by_threads(shape: tuple[int, ...]) -> None:
    values = np.random.default_rng(0).integers(0, 1000, shape)
    column = TensorColumn(values)
    assert np.array_equal(column.copy().values, values)
    order = np.random.default_rng(1).permutation(len(values))
    assert np.array_equal(column.take(order).values, values[order])
    cuts = [TensorColumn(part) for part in np.array_split(values, 5)]
    assert np.array_equal(TensorColumn.concat(cuts, "a").values, values)
    assert np.array_equal(TensorColumn.concat([column], "a").values, values)


def _copy_in_child(ends: multiprocessing.Queue[bool]) -> None:
    source = np.arange(ROWS)
    ends.put(bool(np.array_equal(memory.copy_of(source), source)))


@pytest.mark.filterwarnings("ignore:This process .* is multi-threaded:DeprecationWarning")
def test_a_forked_child_has_its_own_helper_thread() -> None:
    memory.copy_of(np.zeros(ROWS))
    context = multiprocessing.get_context("fork")
    ends: multiprocessing.Queue[bool] = context.Queue()
    child = context.Process(target=_copy_in_child, args=(ends,))
    child.start()
    assert ends.get(timeout=60)
    child.join(timeout=60)
    assert child.exitcode == 0


@pytest.mark.parametrize(("rows", "nbytes"), [(0, 0), (1, 1 << 30), (10, 2 << 20), (1000, 8 << 20), (7, 0)])
def test_pieces_cover_all_rows(rows: int, nbytes: int) -> None:
    covered = [row for part in threads.pieces(rows, nbytes) for row in range(part.start, part.stop)]
    assert covered == list(range(rows))
