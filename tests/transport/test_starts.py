"""Processes that die while they start: the other end is notified; only a close or a clean exit ends the stream."""

from __future__ import annotations

import contextlib
import multiprocessing
import os
import signal
import sys
from typing import Any

import numpy as np
import pytest

from samplebatch import SampleBatch, channel
from samplebatch.errors import ChannelClosedError, EndOfStreamError, PeerDiedError, WorkerError
from tests.transport import leaks
from tests.transport.start_children import DiesWhenLoaded, look_on, lose, stay, stop

METHODS = ("fork", "forkserver", "spawn")


def outcome_of_recv(consumer: Any) -> type[Exception]:
    try:
        consumer.recv(timeout_s=30)
    except (EndOfStreamError, PeerDiedError, WorkerError) as error:
        return type(error)
    raise AssertionError("a batch came from nowhere")


def outcome_of_send(producer: Any) -> type[Exception]:
    try:
        while True:
            producer.send(SampleBatch(a=np.zeros(1000)), timeout_s=30)
    except (ChannelClosedError, PeerDiedError) as error:
        return type(error)


def run(method: str, target: Any, *arguments: Any, kills: bool = False, keeps: bool = False) -> list[type[Exception]]:
    """Give a process an end of each side, and tell how the others end; where it keeps the copies, it closes none."""
    context = multiprocessing.get_context(method)
    theirs, consumer = channel(1 << 14)
    producer, of_them = channel(1 << 14)
    child = context.Process(target=target, args=(*arguments[:1], theirs, of_them, *arguments[1:]))
    with contextlib.suppress(TypeError):
        child.start()
        if kills:
            os.kill(child.pid, signal.SIGKILL)  # type: ignore[arg-type]
    if not keeps:
        theirs.close()
        of_them.close()
    outcomes = [outcome_of_recv(consumer), outcome_of_send(producer)]
    if child.pid is not None:
        child.join()
    for end in (theirs, consumer, producer, of_them):
        end.close()
    return outcomes


@pytest.mark.parametrize("keeps", [False, True])
@pytest.mark.parametrize("method", METHODS)
def test_a_child_killed_immediately_is_reported_as_dead(method: str, keeps: bool) -> None:
    with leaks.nothing_left():
        assert run(method, stay, kills=True, keeps=keeps) == [PeerDiedError, PeerDiedError]


@pytest.mark.parametrize("keeps", [False, True])
@pytest.mark.parametrize("comes", ["before", "after"])
@pytest.mark.parametrize("how", ["cannot be imported", "is killed", "cannot be pickled"])
@pytest.mark.parametrize("method", ["forkserver", "spawn"])
def test_a_child_that_cannot_load_its_arguments_is_reported_as_dead(
    method: str, how: str, comes: str, keeps: bool, capfd: pytest.CaptureFixture[str]
) -> None:
    bad = DiesWhenLoaded(how)
    arguments = (bad,) if comes == "before" else (None, bad)
    if how == "cannot be pickled" and comes == "before":
        pytest.skip("no end was given to anybody then")
    assert run(method, look_on, *arguments, keeps=keeps) == [PeerDiedError, PeerDiedError]


@pytest.mark.parametrize("method", METHODS)
def test_a_child_that_exits_with_unused_ends_closes_them(method: str) -> None:
    assert run(method, look_on) == [EndOfStreamError, ChannelClosedError]


@pytest.mark.parametrize("method", METHODS)
def test_a_failure_before_the_first_use_of_an_end_is_reported(method: str, capfd: pytest.CaptureFixture[str]) -> None:
    assert run(method, stop) == [WorkerError, ChannelClosedError]


@pytest.mark.parametrize(
    ("how", "outcome"),
    [("raise", WorkerError), ("exit 3", WorkerError), ("exit 0", EndOfStreamError), ("return", EndOfStreamError)],
)
@pytest.mark.parametrize("method", METHODS)
def test_a_failure_is_reported_for_an_end_in_a_local_variable(
    method: str, how: str, outcome: type[Exception], capfd: pytest.CaptureFixture[str]
) -> None:
    context = multiprocessing.get_context(method)
    producer, consumer = channel(1 << 14)
    parent_end, child_end = context.Pipe()
    # The child has not imported the library before it receives the end, unless it is forked.
    child = context.Process(target=lose, args=(child_end, how))
    child.start()
    parent_end.send(producer)
    assert len(consumer.recv(timeout_s=30)) == 1
    assert outcome_of_recv(consumer) is outcome
    child.join()
    for end in (parent_end, child_end, producer, consumer):
        end.close()


def test_an_earlier_error_of_the_parent_is_not_reported_for_a_child(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "last_value", ValueError("an earlier command of the session"), raising=False)
    assert run("fork", look_on) == [EndOfStreamError, ChannelClosedError]


def test_an_end_can_be_sent_again_if_the_first_child_has_died() -> None:
    context = multiprocessing.get_context("spawn")
    theirs, consumer = channel(1 << 14)
    first = context.Process(target=look_on, args=(DiesWhenLoaded("is killed"), theirs))
    first.start()
    first.join()
    second = context.Process(target=look_on, args=(theirs,))
    second.start()
    theirs.close()
    assert outcome_of_recv(consumer) is EndOfStreamError
    second.join()
    consumer.close()


def test_the_creator_may_use_an_end_if_the_process_did_not_start() -> None:
    theirs, consumer = channel(1 << 14)
    child = multiprocessing.get_context("spawn").Process(
        target=look_on, args=(theirs, DiesWhenLoaded("cannot be pickled"))
    )
    with pytest.raises(TypeError):
        child.start()
    theirs.send(SampleBatch(a=[1]))
    theirs.close()
    assert [len(batch) for batch in consumer] == [1]
    consumer.close()


def _keep_unused(consumer_gone: Any, sibling: Any) -> None:
    """Create a channel, never use one end, send the other end to a sibling, and exit."""
    producer, consumer = channel(1 << 14)
    child = multiprocessing.get_context("fork").Process(target=_tell_the_end, args=(consumer, sibling))
    child.start()
    consumer_gone.recv()
    os.kill(os.getpid(), signal.SIGKILL)
    producer.close()


def _tell_the_end(consumer: Any, answers: Any) -> None:
    answers.send(os.getpid())
    answers.send(outcome_of_recv(consumer).__name__)


def test_a_creator_that_dies_with_an_unused_end_is_reported_as_dead() -> None:
    context = multiprocessing.get_context("fork")
    parent_end, child_end = context.Pipe()
    go, wait = context.Pipe()
    child = context.Process(target=_keep_unused, args=(wait, child_end))
    child.start()
    assert parent_end.recv() > 0
    go.send(None)
    assert parent_end.poll(30)
    assert parent_end.recv() == "PeerDiedError"
    child.join()
    for connection in (parent_end, child_end, go, wait):
        connection.close()


def test_unused_ends_close_without_errors() -> None:
    with leaks.nothing_left():
        producer, consumer = channel(1 << 14)
        producer.close()
        assert list(consumer) == []
        consumer.close()
        producer, consumer = channel(1 << 14)
        consumer.close()
        with pytest.raises(ChannelClosedError):
            producer.send(SampleBatch(a=[1]))
        producer.close()
