"""Shared memory for receivers that are not known in advance: ownership and reuse."""

from __future__ import annotations

import os
import signal
import threading
import time
from multiprocessing.reduction import ForkingPickler

import leaks
import numpy as np
import pytest

from samplebatch.errors import FormatError, PeerDiedError, SharedMemoryError
from samplebatch.transport import shared_queue as module
from samplebatch.transport.region import Region
from samplebatch.transport.shared_queue import MAX_PARCELS, SharedQueueMemory, receive

pytestmark = pytest.mark.filterwarnings("ignore:This process .* is multi-threaded:DeprecationWarning")
"""Newer Pythons warn of threads at a fork, and other tests of the session may have started some."""

KIB, MIB = 1 << 10, 1 << 20


@pytest.fixture
def memory():
    with leaks.nothing_left():
        result = SharedQueueMemory(keep_nbytes=8 * MIB)
        yield result
        result.close()


def content(nbytes: int, seed: int = 0) -> np.ndarray:
    return np.random.default_rng(seed).integers(0, 256, nbytes, np.uint8)


def pages(memory: SharedQueueMemory) -> int:
    """Return the number of bytes that the regions occupy."""
    return sum(os.stat(parcel.region.fileno()).st_blocks * 512 for parcel in (*memory._sent, *memory._retained))


@pytest.mark.parametrize(
    "sizes", [[1], [0, 5, 0], [100, 64, 63], [3 * MIB], [5 * MIB, 1, 700 * KIB]], ids=lambda sizes: f"{len(sizes)}"
)
def test_received_bytes_equal_sent_bytes(memory, sizes) -> None:
    buffers = [content(nbytes, seed) for seed, nbytes in enumerate(sizes)]
    address, spans = memory.send([buffer.data for buffer in buffers])
    received = receive(address, spans)
    for actual, sent in zip(received, buffers, strict=True):
        np.testing.assert_array_equal(actual, sent)
        assert actual.ctypes.data % 64 == 0
        assert actual.flags.writeable


def test_memory_is_reused_after_the_last_view_is_deleted(memory) -> None:
    address, spans = memory.send([content(100 * KIB), content(10)])
    first, second = receive(address, spans)
    assert memory.unreceived == 0
    nbytes = memory.nbytes
    del first
    other, _ = memory.send([content(100 * KIB)])
    assert other.handle != address.handle
    assert memory.nbytes == 2 * nbytes
    del second
    again, spans = memory.send([content(100 * KIB, seed=1)])
    assert (again.handle, again.generation) == (address.handle, 2)
    assert memory.nbytes == 2 * nbytes
    np.testing.assert_array_equal(receive(again, spans)[0], content(100 * KIB, seed=1))


def test_a_message_reuses_memory_of_at_most_twice_its_size(memory) -> None:
    address, spans = memory.send([content(MIB)])
    receive(address, spans)
    tiny, _ = memory.send([content(100)])
    assert tiny.handle != address.handle
    half, _ = memory.send([content(600 * KIB)])
    assert half.handle == address.handle


def test_the_receiver_releases_the_pages_of_regions_that_are_not_reused(memory) -> None:
    memory.keep(0)
    address, spans = memory.send([content(MIB)])
    received = receive(address, spans)
    assert pages(memory) > MIB
    del received
    assert pages(memory) == 4096
    memory.send([content(10)])
    assert memory.nbytes == 4096


def test_retained_memory_does_not_exceed_the_limit(memory) -> None:
    memory.keep(5 * MIB // 2)
    sent = [memory.send([content(MIB - KIB)]) for _ in range(4)]
    assert [address.is_reused for address, _ in sent] == [True, True, False, False]
    for address, spans in sent:
        receive(address, spans)
    memory.send([content(100)])
    assert memory.nbytes == 2 * MIB + 4096
    big, _ = memory.send([content(2 * MIB)])
    assert big.is_reused
    assert memory.nbytes < 5 * MIB // 2
    memory.keep(0)
    assert {parcel.nbytes for parcel in memory._retained} == set()


def test_full_memory_accepts_no_batch_until_one_is_received(memory) -> None:
    sent = [memory.send([b"x"]) for _ in range(MAX_PARCELS)]
    assert None not in sent
    assert memory.unreceived == MAX_PARCELS
    assert memory.send([b"x"]) is None
    receive(*sent[77])
    assert memory.send([b"x"]) is not None


def test_retained_memory_of_other_sizes_is_evicted(memory) -> None:
    before = len(leaks.descriptors())
    for address, spans in [memory.send([content(100)]) for _ in range(MAX_PARCELS - 1)]:
        receive(address, spans)
    memory.keep(8 * MIB)
    assert len(memory._retained) == MAX_PARCELS - 1
    for _ in range(3):
        assert memory.send([content(MIB)]) is not None
    assert len(leaks.descriptors()) <= before + MAX_PARCELS
    assert len(memory._retained) + len(memory._sent) == MAX_PARCELS


@pytest.mark.parametrize("error", [SharedMemoryError("short"), OSError(24, "Too many open files")])
def test_without_memory_nothing_is_sent(memory, monkeypatch, error) -> None:
    def fail(nbytes: int) -> Region:
        raise error

    monkeypatch.setattr(Region, "create", fail)
    assert memory.send([b"x"]) is None
    assert not memory._filling


def test_a_message_is_received_once(memory) -> None:
    address, spans = memory.send([b"hello"])
    received = receive(address, spans)
    for _ in range(2):
        with pytest.raises(FormatError, match="must be received only once"):
            receive(address, spans)
    assert bytes(received[0]) == b"hello"
    del received
    with pytest.raises(FormatError, match="must be received only once"):
        receive(address, spans)
    memory.send([b"other"])
    with pytest.raises(FormatError, match="must be received only once"):
        receive(address, spans)


def test_another_file_under_the_same_descriptor_is_detected(memory) -> None:
    address, spans = memory.send([b"hello"])
    with Region.create(address.nbytes) as other:
        forged = address._replace(handle=f"/proc/self/fd/{other.fileno()}")
        with pytest.raises(FormatError, match="must be received only once"):
            receive(forged, spans)
    with pytest.raises(FormatError, match="must be a file of 8192 bytes"):
        receive(address._replace(nbytes=8192), spans)
    assert bytes(receive(address, spans)[0]) == b"hello"


@pytest.mark.parametrize("span", [(0, 5), (64, -1), (64, 4033), (5000, 1), (-10, 5), (64, 1 << 70)])
def test_a_buffer_outside_the_region_is_rejected(memory, span) -> None:
    address, spans = memory.send([b"hello"])
    with pytest.raises(FormatError, match="must be within 4096 bytes"):
        receive(address, [*spans, span])
    assert bytes(receive(address, spans)[0]) == b"hello"


def test_receiving_from_an_ended_sender_is_an_error(memory) -> None:
    address, spans = memory.send([b"hello"])
    with pytest.raises(
        PeerDiedError, match=f"while its sender runs, got one whose /proc/{1 << 30}/fd/3 no longer exists"
    ):
        receive(address._replace(handle=f"/proc/{1 << 30}/fd/3"), spans)


def test_missing_permission_to_open_memory_is_reported_with_a_fix(memory, monkeypatch) -> None:
    def refuse(*_: object) -> int:
        raise PermissionError(13, "Permission denied")

    address, spans = memory.send([b"hello"])
    monkeypatch.setattr(os, "open", refuse)
    with pytest.raises(PermissionError) as refused:
        receive(address, spans)
    assert "the right to open its sender's descriptors" in refused.value.__notes__[0]


def test_received_bytes_remain_valid_after_the_memory_is_closed(memory) -> None:
    received = receive(*memory.send([content(MIB)]))
    memory.close()
    np.testing.assert_array_equal(received[0], content(MIB))


def test_receivers_keep_no_open_descriptors(memory) -> None:
    sent = [memory.send([content(KIB)]) for _ in range(20)]
    before = len(leaks.descriptors())
    received = [receive(address, spans) for address, spans in sent]
    assert len(leaks.descriptors()) == before
    assert len(received) == 20


def fork(child) -> int:
    pid = os.fork()
    if not pid:
        signal.alarm(30)
        try:
            child()
        finally:
            os._exit(0)
    return pid


def test_a_dead_receivers_memory_is_released_and_not_used_again(memory, monkeypatch) -> None:
    monkeypatch.setattr(module, "_LOOK_S", 0.0)
    address, spans = memory.send([content(MIB)])

    def hold() -> None:
        received = receive(address, spans)
        time.sleep(60)
        del received

    pid = fork(hold)
    deadline = time.monotonic() + 20
    while memory.unreceived and time.monotonic() < deadline:
        time.sleep(0.001)
    memory.send([b"x"])
    assert memory.nbytes > MIB
    os.kill(pid, signal.SIGKILL)
    os.waitid(os.P_PID, pid, os.WEXITED | os.WNOWAIT)
    again, _ = memory.send([content(MIB)])
    assert again.token != address.token
    assert memory.nbytes < 2 * MIB + 64 * KIB
    os.waitpid(pid, 0)


def test_a_forked_child_of_a_receiver_does_not_release_memory(memory) -> None:
    received = receive(*memory.send([content(KIB)]))

    def drop() -> None:
        received.clear()

    os.waitpid(fork(drop), 0)
    memory.keep(8 * MIB)
    assert not memory._retained
    received.clear()
    memory.keep(8 * MIB)
    assert len(memory._retained) == 1


def test_descriptors_are_duplicated_if_paths_are_unavailable() -> None:
    memory = SharedQueueMemory(keep_nbytes=MIB, by_path=False)
    for turn in range(3):
        address, spans = memory.send([content(KIB, seed=turn)])
        handle = ForkingPickler.loads(bytes(ForkingPickler.dumps(address.handle)))
        np.testing.assert_array_equal(receive(address._replace(handle=handle), spans)[0], content(KIB, seed=turn))
    assert memory.nbytes == 4096
    memory.close()


def test_wait_until_received_returns_after_the_last_receive(memory) -> None:
    address, spans = memory.send([b"x"])
    started = time.monotonic()
    memory.wait_until_received(0.05)
    assert time.monotonic() - started > 0.04
    memory.wait_until_received(60, while_true=lambda: False)
    timer = threading.Timer(0.05, receive, (address, spans))
    timer.start()
    memory.wait_until_received(60)
    assert time.monotonic() - started < 30
    timer.join()


def test_threads_do_not_disturb_each_other(memory) -> None:
    wrong: list[int] = []

    def work(seed: int) -> None:
        for turn in range(100):
            sent = content(1000 + 500 * (turn % 7), seed=seed * 1000 + turn)
            received = receive(*memory.send([sent]))
            if not np.array_equal(received[0], sent):
                wrong.append(turn)

    threads = [threading.Thread(target=work, args=(seed,)) for seed in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not wrong
    assert memory.unreceived == 0


def test_invalid_counters_of_a_receiver_do_not_block_the_sender() -> None:
    memory = SharedQueueMemory(keep_nbytes=1 << 20)
    sent = memory.send([np.arange(3)])
    assert sent is not None
    words = memory._sent[0].words
    for word in range(5):
        words[word] = (1 << 64) - 1 if word != 2 else 0
    again = memory.send([np.arange(4)])
    assert again is not None
    assert again[0].token == sent[0].token
    assert np.frombuffer(receive(*again)[0], int).tolist() == [0, 1, 2, 3]
    memory.close()
