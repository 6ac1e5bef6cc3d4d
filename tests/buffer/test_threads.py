"""A learner's thread reads a buffer while another adds to it: no row is torn, and none is of a step that is half there.

All columns of a row follow from one number, so that each row can be checked by itself. SAMPLEBATCH_THREADS_S is for how
many seconds each kind of buffer is run, 0.1 by default.
"""

from __future__ import annotations

import copy
import itertools
import os
import pickle
import sys
import threading
import time
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from samplebatch import (
    Batch,
    CachedReplayBuffer,
    HERReplayBuffer,
    HERVectorReplayBuffer,
    MultiAgentBatch,
    MultiAgentReplayBuffer,
    PrioritizedReplayBuffer,
    PrioritizedVectorReplayBuffer,
    ReplayBuffer,
    SampleBatch,
    VectorReplayBuffer,
)

SECONDS = float(os.environ.get("SAMPLEBATCH_THREADS_S", "0.1"))
EPISODE = 7
"""Steps of an episode; every other one is terminated, the others are truncated."""
ENVIRONMENT = 7_000_000
"""The first number of an environment, times its own."""


# Rows, and how they are checked


def numbers_of(step: int, environments: int) -> np.ndarray:
    return step + ENVIRONMENT * np.arange(environments)


def vectors(n: np.ndarray) -> Any:
    return np.repeat(n[:, None], 64, 1)


def images(n: np.ndarray) -> Any:
    return np.broadcast_to((n % 251).astype(np.uint8)[:, None, None], (len(n), 24, 24)).copy()


def paths(n: np.ndarray) -> Any:
    rows = np.empty(len(n), object)
    rows[:] = [np.full(int(item) % 4 + 1, item) for item in n]
    return rows


def goals(n: np.ndarray) -> Any:
    return {"observation": vectors(n), "achieved_goal": n[:, None], "desired_goal": np.full((len(n), 1), -1)}


def reached(achieved: np.ndarray, desired: np.ndarray) -> np.ndarray:
    return (achieved == desired).all(-1).astype(float)


def rows_of(n: np.ndarray, observe: Callable[[np.ndarray], Any] = vectors) -> Batch:
    ends = n % EPISODE == EPISODE - 1
    terminated = ends & terminates(n)
    info = {"text": np.array([f"step {item}" for item in n], object)}
    return Batch(
        obs=observe(n),
        act=n,
        rew=np.zeros(len(n)) if observe is goals else n.astype(float),
        terminated=terminated,
        truncated=ends & ~terminated,
        obs_next=observe(n + 1),
        info=info,
    )


def terminates(n: np.ndarray) -> np.ndarray:
    return n // EPISODE % 2 == 0


def assert_whole(rows: Any, observe: Callable[[np.ndarray], Any], *, own_last: bool = False, stack: int = 1) -> None:
    """Check that rows of shape (n, ...) are consistent; `own_last` if a terminated step repeats its observation."""
    n = rows.act
    if not len(n):
        return
    expected = rows_of(n, observe)
    for name in ("terminated", "truncated", "done"):
        reference = expected.terminated | expected.truncated if name == "done" else expected[name]
        assert rows[name].tolist() == reference.tolist(), name
    following = np.where(expected.terminated & own_last, n, n + 1)
    obs, obs_next = rows.obs, rows.obs_next
    if stack > 1:
        assert_stacked(obs[..., 0], n, stack)
        obs, obs_next = obs[:, -1], obs_next[:, -1]
    elif observe is not goals:
        assert rows.info.text.tolist() == expected.info.text.tolist()
    if observe is goals:
        assert (obs.observation == n[:, None]).all()
        assert (obs.achieved_goal == n[:, None]).all()
        assert (obs_next.observation == n[:, None] + 1).all()
        assert (rows.rew == reached(obs_next.achieved_goal, obs_next.desired_goal)).all()
    else:
        assert rows.rew.tolist() == n.tolist()
        assert same(obs, expected.obs)
        assert same(obs_next, observe(following))


def same(actual: Any, expected: Any) -> bool:
    if expected.dtype == object:
        return all(np.array_equal(a, b) for a, b in zip(actual, expected, strict=True))
    return bool((actual == expected).all())


def assert_stacked(frames: np.ndarray, n: np.ndarray, stack: int) -> None:
    assert (frames[:, -1] == n).all()
    gaps = np.diff(frames, axis=1)
    assert ((gaps == 0) | (gaps == 1)).all()
    assert (frames[:, 0] >= n - np.minimum(stack - 1, n % EPISODE)).all()


def assert_n_steps(rows: Any, n_step: int, *, own_last: bool) -> None:
    n = rows.act
    last = rows.obs_next[:, 0] - 1 + (own_last & (rows.discount == 0))
    ended = n // EPISODE * EPISODE + EPISODE - 1
    steps = last - n + 1
    assert ((steps >= 1) & (steps <= n_step) & (last <= ended)).all()
    expected = [sum(0.5**k * (first + k) for k in range(count)) for first, count in zip(n, steps, strict=True)]
    assert rows.returns.tolist() == expected
    terminal = (last == ended) & terminates(n)
    assert rows.discount.tolist() == np.where(terminal, 0.0, 0.5**steps).tolist()


def assert_sequences(rows: Any, observe: Callable[[np.ndarray], Any], *, own_last: bool) -> None:
    n, mask = rows.act, rows.mask
    assert (np.diff(n, axis=1) == 1)[mask[:, 1:]].all()
    fields = {name: rows[name][mask] for name in ("obs", "act", "rew", "terminated", "truncated", "done", "obs_next")}
    assert_whole(Batch(fields, info=Batch(text=rows.info.text[mask])), observe, own_last=own_last)


def assert_in_order(n: np.ndarray) -> None:
    """Check that the rows of each ring are consecutive steps."""
    assert set(np.diff(n).tolist()) <= {1} or all(gap == 1 or gap > 1_000_000 for gap in np.diff(n).tolist())


# Two threads


@contextmanager
def running(work: Callable[[int], object], begin: int = 100) -> Iterator[None]:
    """Run the first steps of a task, and the following steps in a thread that is interrupted often.

    Errors of the thread are raised at the end of the context.
    """
    stopped, raised = threading.Event(), list[BaseException]()

    def run() -> None:
        try:
            for step in itertools.takewhile(lambda _: not stopped.is_set(), itertools.count(begin)):
                work(step)
        except BaseException as error:  # carried over to the test
            raised.append(error)

    for step in range(begin):
        work(step)
    before = sys.getswitchinterval()
    sys.setswitchinterval(1e-6)
    thread = threading.Thread(target=run)
    thread.start()
    try:
        yield
    finally:
        stopped.set()
        thread.join()
        sys.setswitchinterval(before)
    if raised:
        raise raised[0]


def rounds() -> Iterator[int]:
    end, count = time.monotonic() + SECONDS, 0
    while count < 3 or time.monotonic() < end:
        yield count
        count += 1


KINDS: dict[str, tuple[Callable[[], Any], Callable[[np.ndarray], Any]]] = {
    "plain": (lambda: ReplayBuffer(40), vectors),
    "without next observations": (lambda: ReplayBuffer(40, ignore_obs_next=True), vectors),
    "frames": (lambda: ReplayBuffer(40, stack_num=3), vectors),
    "whole frames": (lambda: ReplayBuffer(40, stack_num=3, ignore_obs_next=True, sample_avail=True), vectors),
    "compressed": (lambda: ReplayBuffer(300, compress=True), images),
    "ragged": (lambda: ReplayBuffer(40, ragged=("obs", "obs_next")), paths),
    "prioritized": (lambda: PrioritizedReplayBuffer(40, alpha=1.0, beta=0.5), vectors),
    "hindsight": (lambda: HERReplayBuffer(40, reached, horizon=EPISODE), goals),
    "vector": (lambda: VectorReplayBuffer(80, 2), vectors),
    "vector without next observations": (lambda: VectorReplayBuffer(80, 2, ignore_obs_next=True), vectors),
    "prioritized vector": (lambda: PrioritizedVectorReplayBuffer(80, 2, alpha=1.0, beta=0.5), vectors),
    "hindsight vector": (lambda: HERVectorReplayBuffer(80, 2, reached, horizon=EPISODE), goals),
    "cached": (lambda: CachedReplayBuffer(ReplayBuffer(70), 2, 20), vectors),
}


def environments_of(buf: Any) -> int:
    return getattr(buf, "cached_buffer_num", getattr(buf, "buffer_num", 0))


def adding(buf: Any, observe: Callable[[np.ndarray], Any], start: int = 0) -> Callable[[int], object]:
    environments = environments_of(buf)

    def add(step: int) -> None:
        rows = rows_of(numbers_of(start + step, environments or 1), observe)
        buf.add(rows if environments else rows[0])

    return add


def read(buf: Any, observe: Callable[[np.ndarray], Any], count: int) -> None:
    """Read and check rows with one of several methods."""
    stack, own_last = buf.stack_num, bool(buf.options["ignore_obs_next"])
    rows, indices = buf.sample(64)
    assert_whole(rows, observe, own_last=own_last, stack=stack)
    if "weight" in rows:
        buf.update_weight(indices, rows.act % 5 + 0.5, generation=rows.generation)
        assert (rows.weight > 0).all()
        assert (rows.generation >= 0).all()
    way = count % 6
    if way == 0:
        every = buf[:]
        assert_whole(every, observe, own_last=own_last, stack=stack)
        if not isinstance(buf, CachedReplayBuffer):
            assert_in_order(every.act)
    elif way == 1 and observe is vectors and stack == 1:
        assert_n_steps(buf.sample(64, n_step=3, gamma=0.5)[0], 3, own_last=own_last)
    elif way == 2 and observe is not paths and stack == 1:
        assert_sequences(buf.sample_sequences(16, 4, burn_in=1)[0], observe, own_last=own_last)
    elif way == 3 and observe is vectors:
        frames = buf.get(indices, "obs", stack_num=4)[..., 0]
        assert_stacked(frames, frames[:, -1], 4)
        for episode in buf.sample_episodes(4, unfinished=True)[0]:
            assert_whole(episode, observe, own_last=own_last, stack=stack)
            assert (np.diff(episode.act) == 1).all()
    elif way == 4:
        for part in (rows for rows, _ in buf.minibatches(32)):
            assert_whole(part, observe, own_last=own_last, stack=stack)
        assert_whole(buf.latest(9), observe, own_last=own_last, stack=stack)
    else:
        again = pickle.loads(pickle.dumps(buf)) if count % 2 else copy.deepcopy(buf)
        assert_whole(again[:], observe, own_last=own_last, stack=stack)


@pytest.mark.parametrize("kind", sorted(KINDS))
def test_rows_are_consistent_while_another_thread_adds(kind: str) -> None:
    make, observe = KINDS[kind]
    buf = make()
    with running(adding(buf, observe)):
        for count in rounds():
            read(buf, observe, count)


def test_priorities_belong_to_their_rows_with_two_threads() -> None:
    buf = PrioritizedReplayBuffer(40, alpha=1.0, beta=0.5)
    with running(adding(buf, vectors)):
        for _ in rounds():
            rows, indices = buf.sample(64)
            buf.update_weight(indices, rows.act % 5 + 0.5, generation=rows.generation)
    weights = buf.weight[:]
    priorities = buf[:].act % 5 + 0.5
    entered = 4.5  # the largest priority that is given
    actual = weights[buf.sample_indices(0)].round(5)
    assert ((actual == priorities) | (actual == entered)).all()
    assert buf.weight.reduce() == pytest.approx(weights.sum())


def test_rows_in_a_folder_are_consistent(tmp_path: Path) -> None:
    with ReplayBuffer(40, ignore_obs_next=True, storage=tmp_path / "buffer") as buf:

        def add(step: int) -> None:
            row = rows_of(numbers_of(step, 1))[0]
            row.pop("info")
            buf.add(row)

        def assert_in_folder(rows: Any) -> None:
            rows.info = rows_of(rows.act).info
            assert_whole(rows, vectors, own_last=True)

        with running(add):
            for _ in rounds():
                assert_in_folder(buf.sample(64)[0])
                buf.flush()
    with ReplayBuffer.open(tmp_path / "buffer") as again:
        assert_in_folder(again[:])
        assert_in_order(again[:].act)


@pytest.mark.parametrize("kind", ["plain", "without next observations", "compressed", "vector", "cached"])
def test_saving_while_another_thread_adds_is_a_consistent_snapshot(kind: str, tmp_path: Path) -> None:
    make, observe = KINDS[kind]
    buf = make()
    own_last = bool(buf.options["ignore_obs_next"])
    with running(adding(buf, observe)):
        for _ in rounds():
            again = make()
            again.load_state_dict(buf.state_dict())
            assert_whole(again[:], observe, own_last=own_last)
            buf.save(tmp_path / "buffer.arrow")
            loaded = type(buf).load(tmp_path / "buffer.arrow", allow_pickle=True)
            assert_whole(loaded[:], observe, own_last=own_last)


def test_two_threads_may_add_concurrently() -> None:
    buf = VectorReplayBuffer(80, 2)
    starts = 0, ENVIRONMENT

    def added(ring: int) -> Callable[[int], object]:
        return lambda step: buf.add(rows_of(numbers_of(starts[ring] + step, 1)), buffer_ids=[ring])

    with running(added(0)), running(added(1)):
        for _ in rounds():
            assert_whole(buf.sample(64)[0], vectors)
            for part in buf.buffers:
                assert_whole(part.sample(16)[0], vectors)
                assert_in_order(part[:].act)


def test_two_buffers_may_be_moved_into_each_other() -> None:
    a, b = ReplayBuffer(40), ReplayBuffer(40)
    adding(a, vectors)(0)
    with running(lambda _: b.update(a)):
        for _ in rounds():
            a.update(b)
    assert_whole(a[:], vectors)


@pytest.mark.parametrize("lockstep", [False, True])
@pytest.mark.parametrize("kind", [ReplayBuffer, PrioritizedReplayBuffer])
def test_rows_of_several_agents_are_consistent(kind: type[ReplayBuffer], lockstep: bool) -> None:
    options = {"alpha": 1.0, "beta": 0.5} if kind is PrioritizedReplayBuffer else {}
    buf = MultiAgentReplayBuffer(40, kind=kind, lockstep=lockstep, **options)

    def part(n: np.ndarray) -> SampleBatch:
        rows = rows_of(n)
        return SampleBatch(
            obs=rows.obs, actions=n, rewards=rows.rew, terminateds=rows.terminated, truncateds=rows.truncated,
            new_obs=rows.obs_next, eps_id=n // EPISODE, t=n % EPISODE,
        )  # fmt: skip

    def add(step: int) -> None:
        n = 5 * step + np.arange(5)
        buf.add(MultiAgentBatch({"walker": part(n), "guard": part(n)}, env_steps=5))

    with running(add):
        for count in rounds():
            batch = buf.sample(32).batch
            for _, rows in batch.items():
                n = rows["actions"]
                assert all((rows[name] == part(n)[name]).all() for name in part(n).column_names)
            if lockstep:
                assert (batch["walker"]["actions"] == batch["guard"]["actions"]).all()
            if kind is PrioritizedReplayBuffer:
                buf.update_priorities(batch, {policy: np.ones(len(rows)) for policy, rows in batch.items()})
            if count % 4 == 0:
                again = pickle.loads(pickle.dumps(buf))
                assert len(again.buffers["walker"]) == 40
                assert again.sample(4).batch.env_steps() == 4


@pytest.mark.skipif(not hasattr(os, "fork"), reason="processes are forked")
def test_a_forked_process_can_read_a_buffer_that_a_thread_writes_to() -> None:
    buf = ReplayBuffer(40)

    def child() -> int:
        for _ in range(20):
            assert_whole(buf.sample(64)[0], vectors)
        adding(buf, vectors)(0)
        return 0

    with running(adding(buf, vectors)), warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)
        for _ in range(5):
            pid = os.fork()
            if not pid:
                code = 1
                try:
                    code = child()
                finally:
                    os._exit(code)
            assert exit_code_of(pid, 20.0) == 0


def exit_code_of(pid: int, timeout_s: float) -> int:
    end = time.monotonic() + timeout_s
    while time.monotonic() < end:
        actual, status = os.waitpid(pid, os.WNOHANG)
        if actual:
            return os.waitstatus_to_exitcode(status)
        time.sleep(0.005)
    os.kill(pid, 9)
    os.waitpid(pid, 0)
    raise AssertionError("the forked process waits for ever")
