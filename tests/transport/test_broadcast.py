"""Broadcasts: readers get complete publications without blocking, while processes start, end or die."""

from __future__ import annotations

import contextlib
import multiprocessing
import os
import pickle
import signal
import subprocess
import sys
import threading
import time
import warnings
import zlib
from functools import reduce
from multiprocessing.reduction import ForkingPickler
from typing import ClassVar

import broadcast_children
import leaks
import numpy as np
import pytest
from broadcast_children import checked, is_whole
from hypothesis import given, settings
from hypothesis import strategies as st

from samplebatch import Batch, MultiAgentBatch, SampleBatch, broadcast
from samplebatch.errors import (
    CapacityError,
    ChannelClosedError,
    ChannelTimeoutError,
    ColumnMismatchError,
    ColumnTypeError,
    EndOfStreamError,
    FormatError,
    OwnershipError,
    PeerDiedError,
    SampleBatchError,
    SharedMemoryError,
    UntrustedPickleError,
)
from samplebatch.transport import broadcast as broadcast_module
from samplebatch.transport.broadcast import MAX_BLOCKS, Board
from samplebatch.transport.peers import ProcessIdentity
from samplebatch.transport.region import Region, SharedCounters
from tests.batch.every_kind import with_every_kind
from tests.optional import torch

START_METHODS = ["fork", "forkserver", "spawn"]
MIB = 1 << 20


@pytest.fixture(scope="module", autouse=True)
def nothing_left():
    with leaks.nothing_left():
        yield


@pytest.fixture
def ends():
    publisher, subscription = broadcast(4 * MIB)
    with publisher, subscription:
        yield publisher, subscription


@contextlib.contextmanager
def child(context, target, *arguments):
    process = context.Process(target=target, args=arguments)
    with warnings.catch_warnings():
        # Other tests of the session may have started threads, which newer Pythons warn of at a fork.
        warnings.simplefilter("ignore", DeprecationWarning)
        process.start()
    try:
        yield process
    finally:
        process.kill()
        process.join()
        process.close()


FORK = multiprocessing.get_context("fork")


# -- what goes through ------------------------------------------------------------------------------------------------


def test_columns_of_every_kind_are_received_unchanged() -> None:
    publisher, subscription = broadcast(8 * MIB, allow_pickle=True)
    with publisher, subscription:
        sent = with_every_kind(50)
        assert publisher.publish(sent) == 1
        actual = subscription.latest()
        assert actual.version == 1
        assert actual.value == sent
        assert list(actual.value.keys()) == list(sent.keys())


def test_batches_of_every_class_are_received(ends) -> None:
    publisher, subscription = ends
    rows = SampleBatch(obs={"x": np.arange(5.0)}, t=torch.arange(5), words=["a", "b", "c", "d", "e"])
    nested = Batch(obs={"camera": np.zeros((3, 2)), "goal": torch.ones(3, 2)}, info=["x", "y", "z"], gamma=0.9)
    agents = MultiAgentBatch({"walker": rows, "lamp": rows[:2]}, 5)
    for version, sent in enumerate((rows, nested, agents, rows[:0], Batch()), start=1):
        assert publisher.publish(sent) == version
        actual = subscription.latest()
        assert actual.version == version
        assert type(actual.value) is type(sent)
        assert actual.value == sent


def test_weights_are_received_unchanged(ends) -> None:
    publisher, subscription = ends
    model = torch.nn.Sequential(torch.nn.Linear(4, 3), torch.nn.BatchNorm1d(3))
    sent = {
        "torch": model.state_dict(),
        "grad": dict(model.named_parameters()),
        "numpy": {"w": np.arange(6.0).reshape(2, 3), "f": np.asfortranarray(np.arange(6.0).reshape(2, 3))},
        "half": torch.ones(3, dtype=torch.bfloat16),
        "strided": torch.arange(10)[::3],
        "scalar": np.float32(3),
        "whole": np.array(7),
        "nothing": np.zeros((0, 4)),
        "number": 0.5,
        "none": {},
    }
    publisher.publish(sent)
    actual = subscription.latest().value
    assert list(actual) == list(sent)
    assert list(actual["torch"]) == list(model.state_dict())
    for name, tensor in model.state_dict().items():
        assert torch.equal(actual["torch"][name], tensor)
        assert actual["torch"][name].dtype == tensor.dtype
    assert not any(tensor.requires_grad for tensor in actual["grad"].values())
    for name in ("w", "f"):
        np.testing.assert_array_equal(actual["numpy"][name], sent["numpy"][name])
    assert torch.equal(actual["half"], sent["half"])
    assert actual["strided"].tolist() == [0, 3, 6, 9]
    assert (actual["scalar"], actual["whole"].shape, actual["whole"][()], actual["number"], actual["none"]) == (
        3,
        (),
        7,
        0.5,
        {},
    )
    assert actual["nothing"].shape == (0, 4)
    model.load_state_dict(actual["torch"])


def test_readers_receive_independent_copies(ends) -> None:
    publisher, subscription = ends
    mine = np.zeros(1000)
    publisher.publish({"a": mine, "t": torch.zeros(3)})
    first = subscription.latest().value
    mine[:] = 5
    for _ in range(4):
        publisher.publish({"a": mine, "t": torch.ones(3)})
    assert not first["a"].any()
    assert first["t"].tolist() == [0, 0, 0]
    first["a"][:] = 1
    first["t"][:] = 2
    second = subscription.latest().value
    assert second["a"][0] == 5
    assert second["t"].tolist() == [1, 1, 1]
    assert second["a"].ctypes.data % 64 == 0


def test_a_larger_publication_has_a_new_description(ends) -> None:
    publisher, subscription = ends
    for rows in (5, 7, 5, 5, 100_000, 1):
        publisher.publish(SampleBatch(a=np.arange(rows), words=np.full(rows, "word" * (rows % 3))))
        actual = subscription.latest().value
        assert len(actual) == rows
        assert actual["words"][-1] == "word" * (rows % 3)


# -- which one --------------------------------------------------------------------------------------------------------


def test_latest_returns_the_newest_publication(ends) -> None:
    publisher, subscription = ends
    assert publisher.version == subscription.version == 0
    for i in range(10):
        assert publisher.publish({"i": np.array(i)}) == i + 1
    assert publisher.version == subscription.version == 10
    for _ in range(2):
        actual = subscription.latest(timeout_s=0)
        assert (actual.version, int(actual.value["i"])) == (10, 9)
    assert subscription.wait_for(3).version == 10


def test_reading_without_a_publication_times_out(ends) -> None:
    publisher, subscription = ends
    for call in (subscription.latest, lambda timeout_s: subscription.wait_for(1, timeout_s)):
        for timeout_s in (0, 0.03):
            started = time.monotonic()
            with pytest.raises(
                ChannelTimeoutError, match="publication 1 must be published to be read, the newest is 0"
            ):
                call(timeout_s=timeout_s)
            assert timeout_s <= time.monotonic() - started < 5
    publisher.publish({})
    with pytest.raises(ChannelTimeoutError, match="publication 2 must be published to be read, the newest is 1"):
        subscription.wait_for(2, 0.01)
    assert subscription.latest().version == 1


def test_a_publication_wakes_waiting_readers(ends) -> None:
    publisher, subscription = ends
    timer = threading.Timer(0.05, publisher.publish, ({"a": np.ones(3)},))
    timer.start()
    assert subscription.latest().value["a"].tolist() == [1, 1, 1]
    timer.join()
    timer = threading.Timer(0.05, lambda: [publisher.publish({}) for _ in range(3)])
    timer.start()
    assert subscription.wait_for(4, timeout_s=30).version == 4
    timer.join()


def test_closed_ends_reject_calls(ends) -> None:
    publisher, subscription = ends
    publisher.publish({"a": np.ones(3)})
    publisher.close()
    publisher.close()
    assert publisher.closed
    assert subscription.latest().version == 1
    with pytest.raises(
        EndOfStreamError, match=r"publication 2 must be published .* newest is 1: the publisher has closed"
    ):
        subscription.wait_for(2)
    subscription.close()
    subscription.close()
    assert subscription.closed
    for use in (
        lambda: publisher.publish({}),
        lambda: publisher.version,
        lambda: publisher.capacity_nbytes,
        subscription.latest,
        lambda: subscription.version,
    ):
        with pytest.raises(ChannelClosedError, match="must be open to be used"):
            use()


def test_closing_wakes_waiting_readers(ends) -> None:
    publisher, subscription = ends
    publisher.publish({})
    timer = threading.Timer(0.05, publisher.close)
    timer.start()
    started = time.monotonic()
    with pytest.raises(EndOfStreamError):
        subscription.wait_for(2)
    assert time.monotonic() - started < 20
    timer.join()


def test_a_deleted_publisher_is_closed() -> None:
    publisher, subscription = broadcast(MIB)
    publisher.publish({})
    del publisher
    with pytest.raises(EndOfStreamError):
        subscription.wait_for(2)
    subscription.close()


# -- what is refused --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("value", "error", "message"),
    [
        ({"a": np.zeros(MIB)}, CapacityError, r"must fit in the broadcast's 4194304 bytes, got 83\d+"),
        (7, ColumnTypeError, "must be a batch, or a dict of arrays and tensors, got a int$"),
        (torch.nn.Linear(1, 1), ColumnTypeError, r"and tensors, got a Linear; pass its state_dict\(\)"),
        ([np.zeros(3)], ColumnTypeError, "got a list"),
        ({"a": {1: np.zeros(3)}}, ColumnTypeError, "weights must have strings as names, got a int in a"),
        ({"a": torch.zeros(2, dtype=torch.uint8).view(torch.qint8)}, ColumnTypeError, r"got torch\.qint8"),
        ({"a": torch.zeros(2, dtype=torch.uint8).view(torch.uint4)}, ColumnTypeError, r"got torch\.uint4"),
        (
            reduce(lambda inner, _: {"a": inner}, range(32), {"a": np.zeros(1)}),
            ColumnTypeError,
            "32 dicts deep, got another dict in 'a.a",
        ),
        ({"a": object()}, UntrustedPickleError, "'a'"),
        (SampleBatch(o=np.array([{1}, {2}], object)), UntrustedPickleError, "'o'"),
    ],
)
def test_a_failed_publication_changes_nothing(ends, value, error, message) -> None:
    publisher, subscription = ends
    publisher.publish({"kept": np.ones(2)})
    with pytest.raises(error, match=message):
        publisher.publish(value)
    assert publisher.version == 1
    assert subscription.latest().value["kept"].tolist() == [1, 1]
    assert publisher.publish({"kept": np.zeros(2)}) == 2


def test_objects_are_not_unpickled_without_permission() -> None:
    publisher, trusting = broadcast(MIB, allow_pickle=True)
    wary = ForkingPickler.loads(bytes(ForkingPickler.dumps(trusting)))
    wary._allow_pickle = False
    publisher.publish(SampleBatch(o=np.array([{1}, {2}], object)))
    assert trusting.latest().value["o"][1] == {2}
    with pytest.raises(UntrustedPickleError, match="'o'"):
        wary.latest()
    for end in (publisher, trusting, wary):
        end.close()


@pytest.mark.parametrize(
    "arguments", [{"capacity_nbytes": 0}, {"capacity_nbytes": -1}, {"blocks": 1}, {"blocks": MAX_BLOCKS + 1}]
)
def test_invalid_sizes_are_rejected(arguments) -> None:
    (name,) = arguments
    with pytest.raises(ValueError, match=f"{name} must be"):
        broadcast(**arguments)


def test_more_memory_than_available_is_rejected() -> None:
    with pytest.raises(SharedMemoryError, match="must be free"):
        broadcast(1 << 50)


def test_the_smallest_capacity_and_the_most_blocks_are_accepted() -> None:
    publisher, subscription = broadcast(1, blocks=MAX_BLOCKS)
    with publisher, subscription:
        assert publisher.capacity_nbytes == os.sysconf("SC_PAGESIZE")
        for i in range(2 * MAX_BLOCKS):
            publisher.publish({"i": np.array(i)})
            assert int(subscription.latest().value["i"]) == i


def test_plain_pickle_of_ends_is_rejected(ends) -> None:
    for end in ends:
        with pytest.raises(TypeError, match="must be pickled by multiprocessing"):
            pickle.dumps(end)


def test_a_publisher_cannot_be_sent_after_its_first_publication(ends) -> None:
    publisher, _ = ends
    ForkingPickler.loads(bytes(ForkingPickler.dumps(publisher))).close()
    publisher.publish({})
    with pytest.raises(OwnershipError, match="must be sent to another process before its first publication"):
        ForkingPickler.dumps(publisher)


# -- into what is there -----------------------------------------------------------------------------------------------


def test_weights_are_copied_into_a_model(ends) -> None:
    publisher, subscription = ends
    torch.manual_seed(0)
    teacher, pupil = (torch.nn.Sequential(torch.nn.Linear(4, 3), torch.nn.BatchNorm1d(3)) for _ in range(2))
    target = pupil.state_dict()
    publisher.publish(teacher.state_dict())
    actual = subscription.latest(into=target)
    assert actual.value is target
    assert torch.equal(pupil[0].weight, teacher[0].weight)
    with torch.no_grad():
        teacher[0].weight += 1
        teacher[1].num_batches_tracked += 5
    publisher.publish(teacher.state_dict())
    assert subscription.wait_for(2, into=dict(pupil.state_dict())).version == 2
    assert torch.equal(pupil[0].weight, teacher[0].weight)
    assert pupil[1].num_batches_tracked == 5
    assert pupil[0].weight.requires_grad


def test_arrays_of_every_layout_can_be_copied_into(ends) -> None:
    publisher, subscription = ends
    publisher.publish(
        {"a": {"x": np.arange(6.0).reshape(2, 3)}, "t": torch.arange(4), "h": torch.ones(2, dtype=torch.bfloat16)}
    )
    target = {
        "h": torch.zeros(4, dtype=torch.bfloat16)[::2],
        "t": torch.zeros(8, dtype=torch.int64)[::2],
        "a": {"x": np.zeros((3, 2)).T},
    }
    subscription.latest(into=target)
    assert target["a"]["x"].tolist() == [[0, 1, 2], [3, 4, 5]]
    assert target["t"].tolist() == [0, 1, 2, 3]
    assert target["h"].tolist() == [1, 1]


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda weights: weights.pop("t"), "into must have 't', as the published weights have"),
        (
            lambda weights: weights.update(extra=np.zeros(2)),
            "the published weights must have 'extra', as into has; there are 'a', 't', 'n'",
        ),
        (lambda weights: weights["a"].update(y=np.zeros(2)), "weights must have 'a.y'"),
        (
            lambda weights: weights.update(a=np.zeros(3)),
            "'a' must be a dict, as in the published weights, got a ndarray",
        ),
        (
            lambda weights: weights["a"].update(x=np.zeros(4)),
            r"'a.x' must be float64 of shape \(3,\), got float64 of shape \(4,\)",
        ),
        (lambda weights: weights["a"].update(x=np.zeros(3, "f4")), "'a.x' must be float64 of shape .* got float32"),
        (
            lambda weights: weights["a"].update(x=torch.zeros(3)),
            "'a.x' must be an array of float64 of shape .* got Tensor",
        ),
        (lambda weights: weights.update(t=np.zeros(3)), "'t' must be a tensor of float32 of shape .* got ndarray"),
        (lambda weights: weights.update(t=torch.zeros(3).double()), "'t' must be float32 of shape .* got float64"),
        (lambda weights: weights.update(n={"y": 3}), "'n.y' must be published as an array or tensor"),
    ],
)
def test_weights_that_do_not_fit_are_not_written(ends, change, message) -> None:
    publisher, subscription = ends
    publisher.publish({"a": {"x": np.ones(3)}, "t": torch.ones(3), "n": {"y": "why"}})
    ours = {"a": {"x": np.zeros(3)}, "t": torch.zeros(3), "n": {"y": 3}}
    change(ours)
    with pytest.raises(ColumnMismatchError, match=message):
        subscription.latest(into=ours)
    if isinstance(ours["a"], dict):
        assert not ours["a"]["x"].any()


def test_copying_a_batch_into_a_model_is_rejected(ends) -> None:
    publisher, subscription = ends
    publisher.publish(SampleBatch(a=[1.0]))
    with pytest.raises(
        ColumnMismatchError, match=r"publication 1 must be a dict .* got a SampleBatch; read it without into"
    ):
        subscription.latest(into={"a": np.zeros(1)})


# -- overtaken --------------------------------------------------------------------------------------------------------


@pytest.fixture
def overtaking(ends, monkeypatch):
    """While a reader copies, publish `overtaking.left` times."""
    publisher, _ = ends
    copy_all = broadcast_module.copy_all

    class Overtaking:
        left: ClassVar[list[int]] = []
        is_publishing = False

    def slow(targets, sources, nbytes) -> None:
        copy_all(targets, sources, nbytes)
        if Overtaking.is_publishing:
            return
        Overtaking.is_publishing = True
        for _ in range(Overtaking.left.pop(0) if Overtaking.left else 0):
            publisher.publish(checked(publisher.version, rows=2000))
        Overtaking.is_publishing = False

    monkeypatch.setattr(broadcast_module, "copy_all", slow)
    publisher.publish(checked(0, rows=1000))
    return Overtaking


def test_a_read_is_valid_until_all_other_blocks_are_overwritten(ends, overtaking) -> None:
    _, subscription = ends
    overtaking.left = [2]
    actual = subscription.latest()
    assert actual.version == 1
    assert is_whole(actual.value)


def test_a_slow_reader_gets_the_newest_publication(ends, overtaking) -> None:
    _, subscription = ends
    overtaking.left = [3, 5, 2]
    actual = subscription.latest()
    assert actual.version == 9
    assert is_whole(actual.value)


def test_a_reader_that_is_always_too_slow_times_out(ends, overtaking) -> None:
    _, subscription = ends
    overtaking.left = [3] * 100
    with pytest.raises(ChannelTimeoutError, match="remain until it is copied, got 3 that were overwritten"):
        subscription.latest(timeout_s=0)


# -- other processes --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("method", START_METHODS)
def test_subscriptions_can_be_sent_to_children(ends, method) -> None:
    publisher, subscription = ends
    context = multiprocessing.get_context(method)
    answers = context.Queue()
    with (
        child(context, broadcast_children.tell_latest, subscription, answers),
        child(context, broadcast_children.tell_latest, subscription, answers),
    ):
        publisher.publish(checked(3))
        actual = [answers.get(timeout=60) for _ in range(2)]
    assert [version for version, _ in actual] == [1, 1]
    assert all(is_whole(value) for _, value in actual)
    answers.close()
    answers.join_thread()


@pytest.mark.parametrize("method", START_METHODS)
def test_the_exit_of_a_child_with_the_publisher_is_detected(method) -> None:
    publisher, subscription = broadcast(MIB)
    context = multiprocessing.get_context(method)
    with child(context, broadcast_children.publish_and_end, publisher, 5) as process:
        publisher.close()
        assert subscription.wait_for(5, timeout_s=60).value["i"].tolist() == [4]
        with pytest.raises(EndOfStreamError, match="the publisher has closed its end"):
            subscription.wait_for(6, timeout_s=60)
        process.join(60)
        assert process.exitcode == 0
    subscription.close()


def test_a_dead_publisher_is_detected_and_replaced() -> None:
    publisher, subscription = broadcast(MIB)
    parent_end, child_end = FORK.Pipe()
    with child(FORK, broadcast_children.publish_and_stay, publisher, child_end) as process:
        subscription.latest(timeout_s=60)
        with pytest.raises(
            OwnershipError, match=f"must be used by process {process.pid}, which published first, got process"
        ):
            publisher.publish({})
        threading.Timer(0.05, process.kill).start()
        started = time.monotonic()
        with pytest.raises(
            PeerDiedError, match=f"publication 2 must be published .* newest is 1: .* {process.pid} has died"
        ):
            subscription.wait_for(2)
        assert time.monotonic() - started < 20
    assert subscription.latest().value["i"].tolist() == [0]
    assert publisher.publish({"i": np.array([7])}) == 2
    assert subscription.wait_for(2).value["i"].tolist() == [7]
    with pytest.raises(ChannelTimeoutError):
        subscription.wait_for(3, timeout_s=0.01)
    for end in (publisher, subscription, parent_end, child_end):
        end.close()


@pytest.mark.parametrize("method", START_METHODS)
@pytest.mark.parametrize(
    ("how", "error"), [("kill", PeerDiedError), ("close", EndOfStreamError), ("return", EndOfStreamError)]
)
def test_a_publisher_that_ends_before_publishing_is_detected(method, how, error) -> None:
    publisher, subscription = broadcast(MIB)
    with child(multiprocessing.get_context(method), broadcast_children.do_nothing, publisher, how) as process:
        with pytest.raises(error, match="publication 1"):
            subscription.wait_for(1, timeout_s=30)
        process.join(30)
    for end in (publisher, subscription):
        end.close()


@pytest.mark.parametrize("method", START_METHODS)
def test_a_publisher_killed_while_it_starts_is_detected(method) -> None:
    publisher, subscription = broadcast(MIB)
    with child(multiprocessing.get_context(method), broadcast_children.do_nothing, publisher, "return") as process:
        process.kill()
        publisher.close()
        with pytest.raises(PeerDiedError, match="publication 1"):
            subscription.wait_for(1, timeout_s=30)
    subscription.close()


def test_a_creator_killed_before_the_first_publication_is_detected() -> None:
    parent_end, child_end = FORK.Pipe()
    with child(FORK, broadcast_children.make_and_die, child_end):
        assert parent_end.poll(30)
        assert parent_end.recv() == "PeerDiedError"
    parent_end.close()
    child_end.close()


def test_an_unused_publisher_returns_to_its_creator() -> None:
    publisher, subscription = broadcast(MIB)
    with child(FORK, broadcast_children.do_nothing, publisher, "kill") as process:
        process.join(30)
        assert publisher.publish({"i": np.array([1])}) == 1
        assert subscription.wait_for(1).value["i"].tolist() == [1]
    for end in (publisher, subscription):
        end.close()


@pytest.mark.parametrize("timeout_s", [-1, float("nan")])
def test_invalid_timeouts_are_rejected(ends, timeout_s) -> None:
    _, subscription = ends
    for wait in (subscription.latest, lambda timeout_s: subscription.wait_for(1, timeout_s)):
        with pytest.raises(ValueError, match="timeout_s must be None or a number of seconds from 0"):
            wait(timeout_s)


def test_only_one_process_may_publish() -> None:
    publisher, subscription = broadcast(MIB)
    answers = FORK.SimpleQueue()
    publisher.publish({})
    with child(FORK, broadcast_children.try_to_publish, publisher, answers) as process:
        answer = answers.get()
        process.join(60)
    assert answer.startswith(
        f"OwnershipError: a publisher must be used by process {os.getpid()}, which published first, got process"
    )
    assert publisher.publish({}) == 2
    for end in (publisher, subscription, answers):
        end.close()


def counters(count: int) -> tuple[list[Region], list[SharedCounters]]:
    regions = [Region.create(8) for _ in range(count)]
    return regions, [SharedCounters(region.array, 1) for region in regions]


def test_stopped_or_killed_readers_do_not_block_the_publisher(ends) -> None:
    publisher, subscription = ends
    random = np.random.default_rng(3)
    regions, counts = counters(3)

    def publish_until(enough) -> None:
        deadline = time.monotonic() + 30
        while not enough() and time.monotonic() < deadline:
            publisher.publish(checked(publisher.version, rows=20_000))
        assert enough()

    with contextlib.ExitStack() as stack:
        readers = [
            stack.enter_context(child(FORK, broadcast_children.read_for_ever, subscription, region))
            for region in regions
        ]
        publish_until(lambda: all(count[0] for count in counts))
        os.kill(readers[0].pid, signal.SIGSTOP)
        for turn in range(8):
            before = publisher.version
            killed = stack.enter_context(child(FORK, broadcast_children.read_for_ever, subscription, regions[2]))
            observed = counts[1][0]
            publish_until(lambda received=observed: counts[1][0] > received + 3)
            if turn:
                time.sleep(random.uniform(0, 0.002))
            killed.kill()
            killed.join()
            publish_until(lambda before=before: publisher.version > before + 20)
        os.kill(readers[0].pid, signal.SIGCONT)
        seen_first = counts[0][0]
        publish_until(lambda: counts[0][0] > seen_first)
        publisher.close()
        for reader in readers:
            reader.join(60)
            assert reader.exitcode == 0
    for region in regions:
        region.close()


def test_a_killed_publisher_leaves_a_complete_publication() -> None:
    publisher, subscription = broadcast(MIB)
    random = np.random.default_rng(4)
    for _ in range(25):
        with child(FORK, broadcast_children.publish_for_ever, publisher) as process:
            version = subscription.version
            while subscription.version < version + 2:
                time.sleep(0.001)
            time.sleep(random.uniform(0, 0.01))
            process.kill()
            with pytest.raises(PeerDiedError):
                subscription.wait_for(1 << 50, timeout_s=60)
            last = subscription.latest(timeout_s=60)
            assert last.version > version
            assert is_whole(last.value)
    for end in (publisher, subscription):
        end.close()


AT_EXIT = """
import numpy as np
from samplebatch import broadcast
publisher, subscription = broadcast(1 << 20)
publisher.publish({"a": np.ones(3)})
kept = subscription.latest()
print("end")
"""


def test_a_program_with_open_ends_exits_without_output() -> None:
    command = [sys.executable, "-W", "error", "-c", AT_EXIT]
    done = subprocess.run(command, capture_output=True, text=True, check=True)
    assert (done.stdout, done.stderr) == ("end\n", "")


# -- damage -----------------------------------------------------------------------------------------------------------


def test_memory_without_a_broadcast_is_rejected() -> None:
    for nbytes in (1, 4096, 4097, 3 * 4096):
        with (
            Region.create(nbytes) as region,
            pytest.raises(FormatError, match=f"must have its layout, got {nbytes} bytes"),
        ):
            Board(region)


def test_a_process_that_reuses_the_publisher_pid_is_distinguished() -> None:
    publisher, subscription = broadcast(MIB)
    publisher.publish({})
    words = SharedCounters(publisher._board.region.array, 8)
    assert publisher._board.writer == ProcessIdentity.own()
    words[4] += 1
    with pytest.raises(PeerDiedError):
        subscription.wait_for(2)
    for end in (publisher, subscription):
        end.close()


@settings(max_examples=60)
@given(data=st.data())
def test_damaged_memory_raises_an_error_and_does_not_crash(data) -> None:
    publisher, subscription = broadcast(4096)
    with publisher, subscription:
        publisher.publish({"a": np.arange(50), "o": {"t": torch.ones(3)}, "s": "why"})
        memory = publisher._board.region.array
        words = publisher._board._words
        block = publisher._board._block(1)
        at = publisher._board._word(1)
        nbytes, head_nbytes = words[at + 1], words[at + 2]
        if data.draw(st.booleans(), "words"):
            words[at + data.draw(st.integers(1, 3))] = data.draw(st.integers(0, 2**64 - 1) | st.integers(0, 5000))
        else:
            head = block[nbytes : nbytes + head_nbytes]
            for _ in range(data.draw(st.integers(1, 5))):
                head[data.draw(st.integers(0, head_nbytes - 1))] = data.draw(st.integers(0, 255))
            if data.draw(st.booleans(), "with its checksum"):
                words[at + 3] = zlib.crc32(head)
        assert len(memory) == 4096 * 4
        with contextlib.suppress(SampleBatchError):
            actual = subscription.latest(timeout_s=0)
            assert actual.version == 1
