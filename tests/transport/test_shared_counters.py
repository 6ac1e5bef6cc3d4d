"""Shared counters: atomic, ordered and awaitable numbers in shared memory."""

from __future__ import annotations

import multiprocessing
import os
import signal
import threading
import time

import pytest
import shared_counters_children

from samplebatch.transport import region as region_module
from samplebatch.transport.region import Region, SharedCounters, fence

pytestmark = pytest.mark.filterwarnings("ignore:This process .* is multi-threaded:DeprecationWarning")
"""Newer Pythons warn of threads at a fork, and other tests of the session may have started some."""


@pytest.fixture(params=["kernel", "naps"])
def way(request, monkeypatch):
    """Wait with and without the kernel's futex."""
    if request.param == "naps":
        monkeypatch.setattr(region_module, "_FUTEX", None)
    return request.param


@pytest.fixture
def region():
    with Region.create(4096) as result:
        yield result


def test_counters_return_the_last_written_value(region) -> None:
    first, second = SharedCounters(region.array, 8), SharedCounters(region.read_only().array, 8)
    for value in (1, 2**32, 2**64 - 1, 0):
        first[7] = value
        assert second[7] == value
    with pytest.raises(TypeError, match="read-only"):
        second[7] = 1
    with pytest.raises(IndexError):
        first[8]
    with pytest.raises(ValueError, match="invalid value"):
        first[0] = 2**64


def test_counters_retain_their_memory(region) -> None:
    retained = SharedCounters(region.array, 8)
    region.close()
    retained[1] = 5
    assert retained[1] == 5


@pytest.mark.usefixtures("way")
def test_a_wait_ends_in_time(region) -> None:
    started = time.monotonic()
    SharedCounters(region.array, 1).wait(0, last_value=0, timeout_s=0.05)
    assert 0.04 < time.monotonic() - started < 5


@pytest.mark.usefixtures("way")
@pytest.mark.parametrize("observed", [0, 8, 1 << 31])
def test_a_wait_returns_immediately_if_the_counter_has_changed(region, observed) -> None:
    shared = SharedCounters(region.array, 1)
    shared[0] = 7
    started = time.monotonic()
    shared.wait(0, last_value=observed, timeout_s=30)
    assert time.monotonic() - started < 5


@pytest.mark.usefixtures("way")
def test_all_waiting_threads_are_woken(region) -> None:
    shared = SharedCounters(region.array, 2)
    observed = SharedCounters(region.read_only().array, 2)
    ended: list[int] = []

    def wait() -> None:
        while observed[1] == 0:
            observed.wait(1, last_value=0, timeout_s=30)
        ended.append(observed[1])

    threads = [threading.Thread(target=wait) for _ in range(3)]
    for thread in threads:
        thread.start()
    time.sleep(0.05)
    shared[1] = 1 << 33 | 1
    shared.wake(1)
    for thread in threads:
        thread.join(20)
    assert ended == [1 << 33 | 1] * 3


def test_a_child_process_is_woken(region) -> None:
    context = multiprocessing.get_context("forkserver")
    shared = SharedCounters(region.array, 2)
    process = context.Process(target=shared_counters_children.answer, args=(region.read_only(), region))
    process.start()
    for turn in range(1, 101):
        shared[0] = turn
        shared.wake(0)
        while shared[1] != turn:
            shared.wait(1, last_value=turn - 1, timeout_s=30)
    process.join(30)
    assert process.exitcode == 0


def test_a_child_forked_during_a_fence_has_its_own_lock() -> None:
    with region_module._lock:
        child = os.fork()
        if not child:
            signal.alarm(20)
            fence()
            os._exit(7)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 7
