"""The fragment channel: whole fragments, in order, or a clear end."""

from __future__ import annotations

import multiprocessing
import os
import threading
import time
from collections.abc import Iterator
from multiprocessing.connection import wait

import numpy as np
import pytest

from samplebatch import MultiAgentBatch, SampleBatch
from samplebatch.errors import FormatError, WorkerError
from samplebatch.rollout.channel import FragmentReceiver, FragmentSender, fragment_channel


def fragment(n: int = 3) -> MultiAgentBatch:
    steps = SampleBatch(
        obs={"x": np.arange(n * 4, dtype=np.float32).reshape(n, 4), "y": np.arange(n)},
        infos=[{"i": i} for i in range(n)],
    )
    return MultiAgentBatch({"a": steps, "b": SampleBatch(t=np.arange(n, dtype=np.int8))}, n)


@pytest.fixture
def channel() -> Iterator[tuple[FragmentReceiver, FragmentSender]]:
    receiver, sender = fragment_channel(multiprocessing.get_context("spawn"))
    yield receiver, sender
    receiver.close()
    sender.close()


def test_fragments_arrive_whole_and_in_order(channel: tuple[FragmentReceiver, FragmentSender]) -> None:
    receiver, sender = channel
    for n in (3, 0, 50):
        sender.send(fragment(n))
    sender.close()
    assert wait([receiver], timeout=1) == [receiver]
    for n in (3, 0, 50):
        got = receiver.recv(timeout_s=1)
        assert got == fragment(n)
        got["b"]["t"][:] = 1
    for _ in range(2):
        with pytest.raises(EOFError):
            receiver.recv(timeout_s=1)


def test_a_fragment_larger_than_the_pipe_waits_for_the_reader(channel: tuple[FragmentReceiver, FragmentSender]) -> None:
    receiver, sender = channel
    big = fragment(300_000)
    thread = threading.Thread(target=sender.send, args=(big,))
    thread.start()
    thread.join(0.1)
    assert thread.is_alive(), "the pipe must hold the writer back"
    got = receiver.recv(timeout_s=20)
    thread.join()
    assert got == big
    assert got["a"]["obs.x"].ctypes.data % 64 == 0


def test_a_timeout_keeps_what_has_come(channel: tuple[FragmentReceiver, FragmentSender]) -> None:
    receiver, sender = channel
    with pytest.raises(TimeoutError):
        receiver.recv(timeout_s=0)
    whole = written(fragment(1000))
    pieces = np.array_split(np.frombuffer(whole, np.uint8), 7)
    for piece in pieces[:-1]:
        os.write(sender._connection.fileno(), piece.tobytes())
        with pytest.raises(TimeoutError):
            receiver.recv(timeout_s=0.01)
    os.write(sender._connection.fileno(), pieces[-1].tobytes())
    assert receiver.recv(timeout_s=1) == fragment(1000)


def written(one: MultiAgentBatch) -> bytes:
    """Return the bytes that sending a fragment writes."""
    receiver, sender = fragment_channel(multiprocessing.get_context("spawn"))
    sender.send(one)
    sender.close()
    parts = []
    while part := os.read(receiver.fileno(), 1 << 20):
        parts.append(part)
    receiver.close()
    return b"".join(parts)


def test_half_a_fragment_is_dropped_wherever_it_breaks_off() -> None:
    whole = written(fragment())
    for length in range(1, len(whole), 7):
        receiver, sender = fragment_channel(multiprocessing.get_context("spawn"))
        os.write(sender._connection.fileno(), whole + whole[:length])
        sender.close()
        assert receiver.recv(timeout_s=1) == fragment()
        with pytest.raises(EOFError):
            receiver.recv(timeout_s=1)
        receiver.close()


def test_bytes_that_are_no_fragment_end_the_stream(channel: tuple[FragmentReceiver, FragmentSender]) -> None:
    receiver, sender = channel
    os.write(sender._connection.fileno(), b"something else entirely")
    with pytest.raises(FormatError):
        receiver.recv(timeout_s=1)
    with pytest.raises(EOFError):
        receiver.recv(timeout_s=1)


def test_a_worker_says_why_it_cannot_go_on(channel: tuple[FragmentReceiver, FragmentSender]) -> None:
    receiver, sender = channel
    sender.fail("the floor is lava", "line 3")
    with pytest.raises(WorkerError, match="the floor is lava") as caught:
        receiver.recv(timeout_s=1)
    assert caught.value.__notes__ == ["line 3"]


def test_a_sender_without_a_receiver_is_told(channel: tuple[FragmentReceiver, FragmentSender]) -> None:
    receiver, sender = channel
    receiver.close()
    with pytest.raises(BrokenPipeError):
        sender.send(fragment())


def test_an_interrupted_read_ends_the_stream(
    channel: tuple[FragmentReceiver, FragmentSender], monkeypatch: pytest.MonkeyPatch
) -> None:
    receiver, sender = channel
    sender.send(fragment())
    sender.send(fragment())
    read = os.readv

    def interrupted(*arguments: object) -> int:
        read(*arguments)  # type: ignore[arg-type]
        raise KeyboardInterrupt

    monkeypatch.setattr(os, "readv", interrupted)
    with pytest.raises(KeyboardInterrupt):
        receiver.recv(timeout_s=1)
    monkeypatch.undo()
    with pytest.raises(EOFError):
        receiver.recv(timeout_s=1)


def test_waiting_takes_no_longer_than_asked(channel: tuple[FragmentReceiver, FragmentSender]) -> None:
    receiver, _ = channel
    began = time.monotonic()
    with pytest.raises(TimeoutError):
        receiver.recv(timeout_s=0.1)
    assert 0.09 < time.monotonic() - began < 2
