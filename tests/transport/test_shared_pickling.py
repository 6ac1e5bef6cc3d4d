"""Batches in queues, pipes and pools of `multiprocessing` through shared memory."""

from __future__ import annotations

import contextlib
import multiprocessing
import os
import pickle
import signal
import subprocess
import sys
import time
import warnings
from concurrent.futures import ProcessPoolExecutor
from multiprocessing.reduction import ForkingPickler

import leaks
import numpy as np
import pickling_children
import pytest
from pickling_children import checked, is_whole

from samplebatch import Batch, MultiAgentBatch, SampleBatch, disable_shared_pickling, enable_shared_pickling
from samplebatch.errors import PeerDiedError
from samplebatch.transport import shared_pickling
from samplebatch.transport.region import Region, SharedCounters
from samplebatch.transport.shared_queue import MAX_PARCELS
from tests.batch.every_kind import with_every_kind
from tests.optional import torch

pytestmark = pytest.mark.filterwarnings("ignore:This process .* is multi-threaded:DeprecationWarning")
"""Newer Pythons warn of threads at a fork, and other tests of the session may have started some."""

START_METHODS = ["fork", "forkserver", "spawn"]


@pytest.fixture(scope="module", autouse=True)
def nothing_left():
    with leaks.nothing_left():
        yield


@pytest.fixture(autouse=True)
def enabled():
    enable_shared_pickling()
    yield
    disable_shared_pickling()
    shared_pickling._queue_memory.close()


@contextlib.contextmanager
def child(context, target, *arguments):
    process = context.Process(target=target, args=arguments)
    with warnings.catch_warnings():
        # Other tests of the session may have started threads, which newer Pythons warn of at a fork.
        warnings.simplefilter("ignore", DeprecationWarning)
        process.start()
    try:
        yield process
        process.join(60)
        assert process.exitcode is not None
    finally:
        process.kill()
        process.join()
        process.close()


@contextlib.contextmanager
def queues_of(context, count: int):
    result = [context.Queue() for _ in range(count)]
    yield result
    for item in result:
        item.close()
        item.join_thread()


def rows(n: int) -> SampleBatch:
    return SampleBatch(obs=np.arange(n * 20.0).reshape(n, 20), t=torch.arange(n), words=np.full(n, "word"))


def nested(n: int) -> Batch:
    return Batch(obs={"camera": np.arange(n * 100.0).reshape(n, 100), "goal": torch.ones(n, 2)}, info=[{"n": n}] * n)


def of_agents(n: int) -> MultiAgentBatch:
    return MultiAgentBatch({"walker": rows(n), "lamp": rows(2 * n)}, n)


def mapped() -> int:
    """Count the memory-mapped regions."""
    with open("/proc/self/maps") as lines:
        return sum("memfd:samplebatch" in line for line in lines)


def through_pickle(value):
    return ForkingPickler.loads(bytes(ForkingPickler.dumps(value)))


@pytest.mark.parametrize("method", START_METHODS)
def test_batches_of_every_class_round_trip_through_a_child(method) -> None:
    context = multiprocessing.get_context(method)
    with queues_of(context, 2) as (inbox, outbox), child(context, pickling_children.echo, inbox, outbox):
        for sent in (rows(2000), nested(2000), of_agents(2000)):
            inbox.put({"inside": [sent, 7]})
            back = outbox.get(timeout=60)["inside"][0]
            assert type(back) is type(sent)
            assert pickle.dumps(back) == pickle.dumps(sent)
            assert mapped() > 0
            del back
        inbox.put(None)


def test_columns_of_every_kind_are_received_unchanged() -> None:
    sent = with_every_kind(3000)
    back = through_pickle(sent)
    assert shared_pickling._queue_memory.nbytes > 300_000
    assert back == sent
    assert list(back.keys()) == list(sent.keys())


def test_received_arrays_are_writable_and_in_shared_memory() -> None:
    back = through_pickle(rows(2000))
    parcel = shared_pickling._queue_memory._sent[0].region.array
    assert not (parcel == 77).all()
    back["obs"][:] = 77.0
    back["t"][:] = 5
    assert (parcel[64 : 64 + 16_000].view(np.float64) == 77.0).all()


def test_the_receiver_retains_memory_until_its_last_array() -> None:
    back = through_pickle(rows(2000))
    piece, tensor = back["obs"][5:7, :1], back["t"][3:]
    del back
    shared_pickling._queue_memory.keep(1 << 30)
    assert not shared_pickling._queue_memory._retained
    assert piece.tolist() == [[100.0], [120.0]]
    del piece
    assert tensor[0] == 3
    shared_pickling._queue_memory.keep(1 << 30)
    assert not shared_pickling._queue_memory._retained
    del tensor
    shared_pickling._queue_memory.keep(1 << 30)
    assert len(shared_pickling._queue_memory._retained) == 1


@pytest.mark.parametrize("size", [0, 1, shared_pickling.WORTHWHILE // 8 - 1])
def test_small_batches_are_stored_in_the_pickle(size) -> None:
    sent = SampleBatch(a=np.arange(float(size)))
    back = through_pickle(sent)
    assert back == sent
    assert shared_pickling._queue_memory.nbytes == 0
    back["a"][:] = 1.0
    through_pickle(SampleBatch(a=np.zeros(shared_pickling.WORTHWHILE // 8)))
    assert shared_pickling._queue_memory.nbytes > 0


def test_batches_beyond_the_in_flight_limit_are_stored_in_the_pickle() -> None:
    sent = [bytes(ForkingPickler.dumps(checked(i))) for i in range(MAX_PARCELS + 2)]
    assert [len(data) > 200_000 for data in sent] == [False] * MAX_PARCELS + [True] * 2
    assert all(is_whole(ForkingPickler.loads(data)) for data in sent)


def test_plain_pickle_and_disabled_pickling_are_unchanged() -> None:
    sent = rows(2000)
    plain = len(pickle.dumps(sent))
    assert plain > 300_000
    assert len(ForkingPickler.dumps(sent)) < 2000
    on_its_way = bytes(ForkingPickler.dumps(sent))
    for _ in range(2):
        disable_shared_pickling()
        assert len(ForkingPickler.dumps(sent)) == plain
    assert ForkingPickler.loads(on_its_way) == sent


TORCH_LAST = """
from multiprocessing.reduction import ForkingPickler
from samplebatch import Batch, disable_shared_pickling, enable_shared_pickling
enable_shared_pickling()
import torch.multiprocessing
batch = Batch(goal=torch.ones(50_000))
def pickled(): return bytes(ForkingPickler.dumps(batch))
print(len(pickled()) < 1000, b"rebuild_storage" in pickled())
disable_shared_pickling()
print(b"rebuild_storage" in pickled())
enable_shared_pickling()
print(b"rebuild_storage" in pickled())
"""


def test_torch_reducers_apply_to_nested_batches_when_disabled() -> None:
    pytest.importorskip("torch")
    done = subprocess.run([sys.executable, "-c", TORCH_LAST], capture_output=True, text=True, check=True)
    assert done.stdout.split() == ["True", "False", "True", "False"]


def test_disabling_frees_memory_and_keeps_other_reducers(monkeypatch) -> None:
    through_pickle(rows(2000))
    assert shared_pickling._queue_memory.nbytes > 0
    ForkingPickler.register(Batch, repr)
    disable_shared_pickling()
    assert shared_pickling._queue_memory.nbytes == 0
    assert ForkingPickler._extra_reducers.pop(Batch) is repr


@pytest.mark.parametrize("name", ["keep_nbytes", "linger_s"])
def test_negative_settings_are_rejected(name) -> None:
    with pytest.raises(ValueError, match=f"{name} must not be negative, got -1"):
        enable_shared_pickling(**{name: -1})


def test_memory_beyond_what_may_be_retained_is_freed_by_the_receiver() -> None:
    enable_shared_pickling(keep_nbytes=0)
    back = through_pickle(rows(2000))
    region = shared_pickling._queue_memory._sent[0].region
    assert os.stat(region.fileno()).st_blocks * 512 > 300_000
    del back
    assert os.stat(region.fileno()).st_blocks * 512 == 4096


@pytest.mark.parametrize("method", START_METHODS)
def test_a_child_that_ends_waits_until_its_batches_are_received(method) -> None:
    context = multiprocessing.get_context(method)
    with queues_of(context, 1) as (queue,), child(context, pickling_children.put_and_end, queue, 3, 60.0) as process:
        time.sleep(0.5 if method == "fork" else 1.5)
        assert [is_whole(queue.get(timeout=60)) for _ in range(3)] == [True] * 3
        process.join(60)
        assert process.exitcode == 0


def test_batches_of_a_child_that_does_not_wait_are_lost() -> None:
    context = multiprocessing.get_context("fork")
    with queues_of(context, 1) as (queue,), child(context, pickling_children.put_and_end, queue, 2, 0.0) as process:
        process.join(60)
        for _ in range(2):
            with pytest.raises(
                PeerDiedError,
                match=rf"while its sender runs, got one whose /proc/{process.pid}/fd/\d+ no longer exists",
            ):
                queue.get(timeout=60)


def test_pools_return_batches() -> None:
    context = multiprocessing.get_context("forkserver")
    with context.Pool(2) as pool:
        batches = pool.map(pickling_children.made, range(6))
        assert all(map(is_whole, batches))
        assert mapped() == 6
        assert os.getpid() not in {batch["pid"][0] for batch in batches}
        del batches
        pool.close()
        pool.join()


def test_executors_return_batches() -> None:
    with ProcessPoolExecutor(2, mp_context=multiprocessing.get_context("spawn")) as executor:
        batches = list(executor.map(pickling_children.made, range(6)))
        assert all(map(is_whole, batches))
        assert mapped() == 6


def test_a_received_batch_is_sent_on() -> None:
    once = through_pickle(checked(1))
    again = through_pickle(once)
    once["values"][:] = 0
    assert is_whole(again)


def test_a_received_batch_remains_valid_after_its_sender_ends() -> None:
    context = multiprocessing.get_context("fork")
    with queues_of(context, 1) as (queue,):
        with child(context, pickling_children.send_for_ever, queue) as process:
            received = [queue.get(timeout=60) for _ in range(3)]
            process.kill()
        assert all(map(is_whole, received))


def test_a_kill_at_any_time_leaves_batches_complete() -> None:
    context = multiprocessing.get_context("fork")
    random = np.random.default_rng(5)
    for turn in range(12):
        queue = context.SimpleQueue()
        counter = Region.create(8)
        received = SharedCounters(counter.array, 1)
        with (
            child(context, pickling_children.send_for_ever, queue) as sender,
            child(context, pickling_children.receive_for_ever, queue, counter) as receiver,
        ):
            while not received[0]:
                time.sleep(0.001)
            time.sleep(random.uniform(0, 0.05))
            first, second = (sender, receiver) if turn % 2 else (receiver, sender)
            first.kill()
            first.join()
            time.sleep(0.02)
            # The other waits in a queue that nobody is at the other end of, or for the lost batch's sender.
            if second.exitcode is not None:
                assert second is receiver
                assert second.exitcode == 1
            second.kill()
        queue.close()
        counter.close()


def test_batches_are_sent_through_a_pipe() -> None:
    context = multiprocessing.get_context("spawn")
    parent_end, child_end = context.Pipe()
    completed = context.Event()
    with child(context, pickling_children.receive_later, child_end, completed) as process:
        parent_end.send(checked(4))
        completed.set()
        process.join(60)
        assert process.exitcode == 0
    parent_end.close()
    child_end.close()


def test_a_forked_child_has_its_own_memory() -> None:
    bytes(ForkingPickler.dumps(checked(1)))
    assert shared_pickling._queue_memory.unreceived == 1
    pid = os.fork()
    if not pid:
        signal.alarm(30)
        ours = shared_pickling._queue_memory
        os._exit(7 if ours.nbytes == 0 and ours.keep_nbytes == shared_pickling.KEEP_NBYTES else 1)
    assert os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == 7
    assert shared_pickling._queue_memory.unreceived == 1


AT_EXIT = """
import multiprocessing, sys, time
sys.path.insert(0, sys.argv[1])
import pickling_children
from samplebatch import enable_shared_pickling
if __name__ == "__main__":
    enable_shared_pickling()
    queue = multiprocessing.get_context("fork").SimpleQueue()
    queue.put(pickling_children.checked(1))
    print("end")
"""


def test_the_main_process_does_not_wait_at_its_end() -> None:
    started = time.monotonic()
    command = [sys.executable, "-W", "error", "-c", AT_EXIT, os.path.dirname(__file__)]
    done = subprocess.run(command, capture_output=True, text=True, check=True)
    assert (done.stdout, done.stderr) == ("end\n", "")
    assert time.monotonic() - started < shared_pickling.LINGER_S - 2
