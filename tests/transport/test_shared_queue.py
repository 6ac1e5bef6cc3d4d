"""Shared memory on its way to processes that nobody knows yet: whose it is, and that it comes back."""

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
from samplebatch.transport.shared_queue import MOST_PARCELS, Outbox, receive

pytestmark = pytest.mark.filterwarnings("ignore:This process .* is multi-threaded:DeprecationWarning")
"""Newer Pythons warn of threads at a fork, and other tests of the session may have started some."""

KIB, MIB = 1 << 10, 1 << 20


@pytest.fixture
def outbox():
    with leaks.nothing_left():
        made = Outbox(keep_nbytes=8 * MIB)
        yield made
        made.close()


def content(nbytes: int, seed: int = 0) -> np.ndarray:
    return np.random.default_rng(seed).integers(0, 256, nbytes, np.uint8)


def pages(outbox: Outbox) -> int:
    """Count the bytes that the regions really take."""
    return sum(os.stat(parcel.region.fileno()).st_blocks * 512 for parcel in (*outbox._sent, *outbox._kept))


@pytest.mark.parametrize(
    "sizes", [[1], [0, 5, 0], [100, 64, 63], [3 * MIB], [5 * MIB, 1, 700 * KIB]], ids=lambda sizes: f"{len(sizes)}"
)
def test_what_arrives_is_what_was_sent(outbox, sizes) -> None:
    buffers = [content(nbytes, seed) for seed, nbytes in enumerate(sizes)]
    address, spans = outbox.send([buffer.data for buffer in buffers])
    received = receive(address, spans)
    for got, sent in zip(received, buffers, strict=True):
        np.testing.assert_array_equal(got, sent)
        assert got.ctypes.data % 64 == 0
        assert got.flags.writeable


def test_memory_comes_back_with_the_last_view_and_is_used_again(outbox) -> None:
    address, spans = outbox.send([content(100 * KIB), content(10)])
    first, second = receive(address, spans)
    assert outbox.unreceived == 0
    nbytes = outbox.nbytes
    del first
    other, _ = outbox.send([content(100 * KIB)])
    assert other.way != address.way
    assert outbox.nbytes == 2 * nbytes
    del second
    again, spans = outbox.send([content(100 * KIB, seed=1)])
    assert (again.way, again.generation) == (address.way, 2)
    assert outbox.nbytes == 2 * nbytes
    np.testing.assert_array_equal(receive(again, spans)[0], content(100 * KIB, seed=1))


def test_a_smaller_message_takes_what_is_not_more_than_twice_its_size(outbox) -> None:
    address, spans = outbox.send([content(MIB)])
    receive(address, spans)
    tiny, _ = outbox.send([content(100)])
    assert tiny.way != address.way
    half, _ = outbox.send([content(600 * KIB)])
    assert half.way == address.way


def test_what_is_not_kept_is_given_back_by_the_receiver(outbox) -> None:
    outbox.keep(0)
    address, spans = outbox.send([content(MIB)])
    received = receive(address, spans)
    assert pages(outbox) > MIB
    del received
    assert pages(outbox) == 4096
    outbox.send([content(10)])
    assert outbox.nbytes == 4096


def test_no_more_is_kept_than_allowed(outbox) -> None:
    outbox.keep(5 * MIB // 2)
    sent = [outbox.send([content(MIB - KIB)]) for _ in range(4)]
    assert [address.kept for address, _ in sent] == [True, True, False, False]
    for address, spans in sent:
        receive(address, spans)
    outbox.send([content(100)])
    assert outbox.nbytes == 2 * MIB + 4096
    big, _ = outbox.send([content(2 * MIB)])
    assert big.kept
    assert outbox.nbytes < 5 * MIB // 2
    outbox.keep(0)
    assert {parcel.nbytes for parcel in outbox._kept} == set()


def test_a_full_outbox_takes_no_more_until_something_is_received(outbox) -> None:
    sent = [outbox.send([b"x"]) for _ in range(MOST_PARCELS)]
    assert None not in sent
    assert outbox.unreceived == MOST_PARCELS
    assert outbox.send([b"x"]) is None
    receive(*sent[77])
    assert outbox.send([b"x"]) is not None


def test_kept_memory_of_other_sizes_makes_room(outbox) -> None:
    before = len(leaks.descriptors())
    for address, spans in [outbox.send([content(100)]) for _ in range(MOST_PARCELS - 1)]:
        receive(address, spans)
    outbox.keep(8 * MIB)
    assert len(outbox._kept) == MOST_PARCELS - 1
    for _ in range(3):
        assert outbox.send([content(MIB)]) is not None
    assert len(leaks.descriptors()) <= before + MOST_PARCELS
    assert len(outbox._kept) + len(outbox._sent) == MOST_PARCELS


@pytest.mark.parametrize("error", [SharedMemoryError("short"), OSError(24, "Too many open files")])
def test_without_memory_nothing_is_sent(outbox, monkeypatch, error) -> None:
    def fail(nbytes: int) -> Region:
        raise error

    monkeypatch.setattr(Region, "create", fail)
    assert outbox.send([b"x"]) is None
    assert not outbox._filling


def test_a_message_is_received_once(outbox) -> None:
    address, spans = outbox.send([b"hello"])
    received = receive(address, spans)
    for _ in range(2):
        with pytest.raises(FormatError, match="can be received once"):
            receive(address, spans)
    assert bytes(received[0]) == b"hello"
    del received
    with pytest.raises(FormatError, match="can be received once"):
        receive(address, spans)
    outbox.send([b"other"])
    with pytest.raises(FormatError, match="can be received once"):
        receive(address, spans)


def test_another_file_under_the_number_is_found_out(outbox) -> None:
    address, spans = outbox.send([b"hello"])
    with Region.create(address.nbytes) as other:
        forged = address._replace(way=f"/proc/self/fd/{other.fileno()}")
        with pytest.raises(FormatError, match="can be received once"):
            receive(forged, spans)
    with pytest.raises(FormatError, match="must be a file of 8192 bytes"):
        receive(address._replace(nbytes=8192), spans)
    assert bytes(receive(address, spans)[0]) == b"hello"


@pytest.mark.parametrize("span", [(0, 5), (64, -1), (64, 4033), (5000, 1), (-10, 5), (64, 1 << 70)])
def test_a_buffer_outside_is_refused(outbox, span) -> None:
    address, spans = outbox.send([b"hello"])
    with pytest.raises(FormatError, match="must lie within 4096 bytes"):
        receive(address, [*spans, span])
    assert bytes(receive(address, spans)[0]) == b"hello"


def test_a_sender_that_is_gone(outbox) -> None:
    address, spans = outbox.send([b"hello"])
    with pytest.raises(PeerDiedError, match=f"while its sender runs, and /proc/{1 << 30}/fd/3 is gone"):
        receive(address._replace(way=f"/proc/{1 << 30}/fd/3"), spans)


def test_without_the_right_to_open_the_error_says_what_is_needed(outbox, monkeypatch) -> None:
    def refuse(*_: object) -> int:
        raise PermissionError(13, "Permission denied")

    address, spans = outbox.send([b"hello"])
    monkeypatch.setattr(os, "open", refuse)
    with pytest.raises(PermissionError) as refused:
        receive(address, spans)
    assert "the right to open its sender's descriptors" in refused.value.__notes__[0]


def test_what_was_received_outlives_the_outbox(outbox) -> None:
    received = receive(*outbox.send([content(MIB)]))
    outbox.close()
    np.testing.assert_array_equal(received[0], content(MIB))


def test_receivers_hold_no_descriptors(outbox) -> None:
    sent = [outbox.send([content(KIB)]) for _ in range(20)]
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


def test_a_dead_receivers_memory_is_let_go_and_not_used_again(outbox, monkeypatch) -> None:
    monkeypatch.setattr(module, "_LOOK_S", 0.0)
    address, spans = outbox.send([content(MIB)])

    def hold() -> None:
        received = receive(address, spans)
        time.sleep(60)
        del received

    pid = fork(hold)
    deadline = time.monotonic() + 20
    while outbox.unreceived and time.monotonic() < deadline:
        time.sleep(0.001)
    outbox.send([b"x"])
    assert outbox.nbytes > MIB
    os.kill(pid, signal.SIGKILL)
    os.waitid(os.P_PID, pid, os.WEXITED | os.WNOWAIT)
    again, _ = outbox.send([content(MIB)])
    assert again.token != address.token
    assert outbox.nbytes < 2 * MIB + 64 * KIB
    os.waitpid(pid, 0)


def test_the_forked_child_of_a_receiver_does_not_give_memory_back(outbox) -> None:
    received = receive(*outbox.send([content(KIB)]))

    def drop() -> None:
        received.clear()

    os.waitpid(fork(drop), 0)
    outbox.keep(8 * MIB)
    assert not outbox._kept
    received.clear()
    outbox.keep(8 * MIB)
    assert len(outbox._kept) == 1


def test_through_a_duplicate_where_there_are_no_paths() -> None:
    outbox = Outbox(keep_nbytes=MIB, by_path=False)
    for turn in range(3):
        address, spans = outbox.send([content(KIB, seed=turn)])
        way = ForkingPickler.loads(bytes(ForkingPickler.dumps(address.way)))
        np.testing.assert_array_equal(receive(address._replace(way=way), spans)[0], content(KIB, seed=turn))
    assert outbox.nbytes == 4096
    outbox.close()


def test_waiting_until_all_is_received(outbox) -> None:
    address, spans = outbox.send([b"x"])
    begun = time.monotonic()
    outbox.wait_until_received(0.05)
    assert time.monotonic() - begun > 0.04
    outbox.wait_until_received(60, while_true=lambda: False)
    timer = threading.Timer(0.05, receive, (address, spans))
    timer.start()
    outbox.wait_until_received(60)
    assert time.monotonic() - begun < 30
    timer.join()


def test_threads_do_not_disturb_each_other(outbox) -> None:
    wrong: list[int] = []

    def work(seed: int) -> None:
        for turn in range(100):
            sent = content(1000 + 500 * (turn % 7), seed=seed * 1000 + turn)
            received = receive(*outbox.send([sent]))
            if not np.array_equal(received[0], sent):
                wrong.append(turn)

    threads = [threading.Thread(target=work, args=(seed,)) for seed in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not wrong
    assert outbox.unreceived == 0


def test_a_receiver_that_spoils_the_words_of_a_parcel_keeps_nobody_from_sending() -> None:
    outbox = Outbox(keep_nbytes=1 << 20)
    sent = outbox.send([np.arange(3)])
    assert sent is not None
    words = outbox._sent[0].words
    for word in range(5):
        words[word] = (1 << 64) - 1 if word != 2 else 0
    again = outbox.send([np.arange(4)])
    assert again is not None
    assert again[0].token == sent[0].token
    assert np.frombuffer(receive(*again)[0], int).tolist() == [0, 1, 2, 3]
    outbox.close()
