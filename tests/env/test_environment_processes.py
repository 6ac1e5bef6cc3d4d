"""Environment processes that die, hang or raise are named in errors, block no caller, and leave no process behind."""

from __future__ import annotations

import gc
import multiprocessing
import os
import signal
import subprocess
import sys
import textwrap
import time
import warnings
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import Any

import gyms
import numpy as np
import pytest

from samplebatch import AsyncCollector, VectorReplayBuffer
from samplebatch.env import async_vector
from samplebatch.errors import WorkerError
from samplebatch.transport.peers import ProcessIdentity, is_alive

CONTEXT = multiprocessing.get_context("fork")


def stay(obs: Any) -> Any:
    return np.zeros(len(obs), int)


Async = partial(AsyncCollector, start_method="fork")


def processes_of(collector: AsyncCollector) -> list[Any]:
    return collector._environments._processes.processes


def are_gone(collector: AsyncCollector) -> bool:
    return not any(process.is_alive() for process in processes_of(collector))


@pytest.fixture
def gate() -> Iterator[Any]:
    shut = CONTEXT.RawValue("b", 0)
    yield shut
    shut.value = 1


def watched(count: int, gate: Any, shut: int) -> list[Any]:
    """Create ladders, one of which waits in every step until the gate is open."""
    steps = CONTEXT.RawArray("i", count)
    return [partial(gyms.Watched, n, 9, steps=steps, gate=gate if n == shut else None) for n in range(count)]


# Deaths


def test_a_process_killed_in_a_step_is_reported_and_loses_no_steps(gate: Any) -> None:
    env = watched(3, gate, 1)
    buffer = VectorReplayBuffer(300, 3)
    collector = Async(stay, env, buffer)
    collector.collect(n_step=20)
    count = len(buffer)
    pid = processes_of(collector)[1].pid
    os.kill(pid, signal.SIGKILL)
    # On a busy machine the others could make all steps before the process has ended.
    os.waitid(os.P_PID, pid, os.WEXITED | os.WNOWAIT)
    for _ in range(2):
        with pytest.raises(WorkerError, match=r"environment 1 must reply .* its process \d+ was killed by SIGKILL"):
            collector.collect(n_step=1000)
    assert len(buffer) >= count
    assert not len(buffer.buffers[1])
    collector.close()
    assert are_gone(collector)


def test_a_process_killed_between_calls_is_reported() -> None:
    for idle in (False, True):
        env = [lambda: gyms.Ladder(0, 9)] * 2
        collector = Async(stay, env)
        collector.collect(n_step=9)
        if idle:
            collector.reset_env()
        os.kill(processes_of(collector)[0].pid, signal.SIGKILL)
        processes_of(collector)[0].join()
        with pytest.raises(WorkerError, match=r"environment 0 must reply .* was killed by SIGKILL"):
            collector.collect(n_step=100)
        collector.close()
        assert are_gone(collector)


def test_a_dead_process_is_detected_if_its_child_holds_the_pipe(gate: Any) -> None:
    class Parent(gyms.Watched):
        """Ladder that leaves a child process running."""

        def step(self, action: Any) -> Any:
            with warnings.catch_warnings():
                warnings.simplefilter("ignore", DeprecationWarning)
                child = os.fork()
            if child == 0:
                gate.value = 2
                while gate.value != 1:
                    time.sleep(0.001)
                os._exit(0)
            return super().step(action)

    env = [lambda: Parent(0, 9, gate=CONTEXT.RawValue("b", 0))]
    collector = Async(stay, env, timeout_s=0.05)
    killer = CONTEXT.Process(target=_kill_once, args=(gate, processes_of(collector)[0].pid))
    killer.start()
    with pytest.raises(WorkerError, match=r"environment 0 must reply .* was killed by SIGKILL"):
        collector.collect(n_step=1)
    gate.value = 1
    collector.close()
    assert are_gone(collector)
    killer.join()


def _kill_once(gate: Any, pid: int) -> None:
    while gate.value != 2:
        time.sleep(0.001)
    os.kill(pid, signal.SIGKILL)


def test_a_process_that_exits_is_reported() -> None:
    class Leaving(gyms.Ladder):
        def step(self, action: Any) -> Any:
            os._exit(7)

    env = [lambda: gyms.Ladder(0, 9), lambda: Leaving(1, 9)]
    with (
        Async(stay, env) as collector,
        pytest.raises(
            WorkerError, match=r"environment 1 must .* exited with status 7; close the collector and create a new one"
        ),
    ):
        collector.collect(n_step=100_000)
    assert are_gone(collector)


# Environments that raise


def test_a_failed_step_is_reported_and_the_environment_is_reset() -> None:
    with Async(stay, [lambda: gyms.Ladder(0, 9), lambda: gyms.Failing(1, 50)]) as collector:
        with pytest.raises(WorkerError, match=r"environment 1 must .* raised RuntimeError: the rung broke") as caught:
            collector.collect(n_step=1000)
        assert isinstance(caught.value.__cause__, RuntimeError)
        assert "gyms.py" in caught.value.__notes__[0]
        batch = collector.collect(n_episode=3).batch
    assert are_gone(collector)
    # What was done before is kept, and the episode does not go on.
    rows = batch[batch["env_id"] == 1]
    assert rows["t"].tolist() == [*range(9), *range(50)]
    assert (rows["t"] == rows["obs"][:, 2]).all()


@pytest.mark.parametrize("error", [ConnectionResetError, EOFError, BrokenPipeError])
def test_a_connection_error_inside_an_environment_is_reported(error: type[Exception]) -> None:
    class Remote(gyms.Ladder):
        def step(self, action: Any) -> Any:
            raise error("the simulator is gone")

    with (
        Async(stay, [lambda: Remote(0, 9)]) as collector,
        pytest.raises(WorkerError, match=rf"environment 0 must .* raised {error.__name__}: the simulator is gone"),
    ):
        collector.collect(n_step=1)


def test_a_failed_creation_is_reported_and_ends_all_processes() -> None:
    class Broken(gyms.Ladder):
        def __init__(self) -> None:
            raise OSError("no display")

    with pytest.raises(WorkerError, match=r"environment 1 must .* raised OSError: no display"):
        Async(stay, [lambda: gyms.Ladder(0, 9), Broken])
    assert not [child for child in multiprocessing.active_children() if child.name.startswith("environment-")]


@pytest.mark.parametrize("episode", [0, 1])
def test_a_failed_reset_is_reported(episode: int) -> None:
    class Stubborn(gyms.Ladder):
        def reset(self, *, seed: int | None = None, options: Any = None) -> Any:
            if self._episode + 1 == episode:
                raise ValueError("no more")
            return super().reset(seed=seed, options=options)

    env = [lambda: gyms.Ladder(0, 9), lambda: Stubborn(1, 3)]
    buffer = VectorReplayBuffer(500, 2)
    with (
        Async(stay, env, buffer) as collector,
        pytest.raises(WorkerError, match=r"environment 1 must .* raised ValueError: no more"),
    ):
        collector.collect(n_step=400)
    # The last step of the episode is there.
    assert len(buffer.buffers[1]) == 3 * episode
    assert are_gone(collector)


def test_an_error_that_cannot_be_unpickled_is_reported_as_text() -> None:
    class Odd(Exception):
        """Error that cannot be unpickled."""

        def __init__(self, first: int, two: int) -> None:
            super().__init__("odd")

    class Failing(gyms.Ladder):
        def step(self, action: Any) -> Any:
            raise Odd(1, 2)

    env = [lambda: Failing(0, 9)]
    with (
        Async(stay, env) as collector,
        pytest.raises(WorkerError, match=r"environment 0 must .* raised Odd: odd") as caught,
    ):
        collector.collect(n_step=1)
    assert caught.value.__cause__ is None
    assert are_gone(collector)


def test_an_answer_that_cannot_be_read_is_reported() -> None:
    class Secret:
        def __reduce__(self) -> Any:
            return int, ("secret",)

    class Saying(gyms.Ladder):
        def step(self, action: Any) -> Any:
            return *super().step(action)[:4], {"x": Secret()}

    env = [lambda: Saying(0, 9)]
    with (
        Async(stay, env) as collector,
        pytest.raises(WorkerError, match=r"environment 0 must .* sent a reply that cannot be unpickled"),
    ):
        collector.collect(n_step=1)
    assert are_gone(collector)


# Interrupts


def test_a_collector_can_be_closed_after_an_interrupted_answer() -> None:
    class Torn:
        """Connection that interrupts the receipt of an answer."""

        def __init__(self, pipe: Any) -> None:
            self._pipe = pipe

        def recv_bytes(self) -> Any:
            raise KeyboardInterrupt

        def __getattr__(self, name: str) -> Any:
            return getattr(self._pipe, name)

    collector = Async(stay, [lambda: gyms.Ladder(0, 9)] * 2)
    collector.collect(n_step=4)
    pipes = collector._environments._processes._pipes
    pipes[1] = Torn(pipes[1])  # type: ignore[call-overload]
    with pytest.raises(KeyboardInterrupt):
        collector.collect(n_step=100)
    with pytest.raises(WorkerError, match="environment 1 must be complete, but was interrupted"):
        collector.collect(n_step=1)
    collector.close()
    assert are_gone(collector)


def test_an_interrupt_of_the_process_group_ends_all_processes() -> None:
    """A terminal sends SIGINT to the process group on Ctrl-C."""
    script = textwrap.dedent(
        """
        import multiprocessing

        import numpy as np

        import gyms
        from samplebatch import AsyncCollector

        env = [lambda: gyms.Watched(0, 9, pause_s=0.01)] * 3
        collector = AsyncCollector(lambda obs: np.zeros(len(obs), int), env, start_method="fork")
        try:
            collector.collect(n_step=3)
            print("ready", flush=True)
            collector.collect(n_step=100_000)
        except KeyboardInterrupt:
            collector.close()
            print(len(multiprocessing.active_children()), flush=True)
        """
    )
    with subprocess.Popen(
        [sys.executable, "-c", script],
        cwd=Path(gyms.__file__).parent,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        start_new_session=True,
        env={**os.environ, "PYTHONPATH": str(Path(__file__).parents[2])},
    ) as process:
        assert process.stdout is not None
        assert process.stdout.readline() == "ready\n"
        time.sleep(0.1)
        os.killpg(process.pid, signal.SIGINT)
        output, errors = process.communicate(timeout=30)
    assert output == "0\n", errors
    assert process.returncode == 0


# The end


LEFT_OPEN = """
import os
import signal
import sys

import numpy as np

import gyms
from samplebatch import AsyncCollector

env = [lambda: gyms.Watched(0, 9, pause_s=0.01)] * 2
collector = AsyncCollector(lambda obs: np.zeros(len(obs), int), env, start_method="{start_method}")
collector.collect(n_step=3)
print(*collector.pids, flush=True)
{then}
"""


KILLED = "os.kill(os.getpid(), signal.SIGKILL)"


@pytest.mark.parametrize(
    ("then", "start_method"),
    [
        ("", "fork"),
        ("", "forkserver"),
        ("del collector", "fork"),
        ("raise SystemExit(0)", "fork"),
        ("os._exit(0)", "fork"),
        (KILLED, "fork"),
        (KILLED, "forkserver"),
    ],
)
def test_processes_of_an_unclosed_collector_end_at_exit(then: str, start_method: str) -> None:
    folder = Path(gyms.__file__).parent
    ran = subprocess.run(
        [sys.executable, "-c", LEFT_OPEN.format(start_method=start_method, then=then)],
        cwd=folder,
        capture_output=True,
        text=True,
        timeout=60,
        env={**os.environ, "PYTHONPATH": str(folder.parents[1])},
    )
    assert ran.returncode == (-signal.SIGKILL if then == KILLED else 0)
    assert "Traceback" not in ran.stderr
    pids = [int(pid) for pid in ran.stdout.split()]
    assert len(pids) == 2
    until = time.monotonic() + 10
    while any(is_alive(ProcessIdentity(pid, 0)) for pid in pids) and time.monotonic() < until:
        time.sleep(0.01)
    assert not any(is_alive(ProcessIdentity(pid, 0)) for pid in pids)


def test_processes_end_when_their_collector_is_deleted() -> None:
    collector = Async(stay, [lambda: gyms.Ladder(0, 9)] * 2)
    collector.collect(n_step=3)
    ours = processes_of(collector)
    del collector
    gc.collect()
    assert not any(process.is_alive() for process in ours)


def test_descriptors_are_closed_with_the_collector() -> None:
    def descriptors() -> int:
        return len(os.listdir("/proc/self/fd"))

    with Async(stay, [lambda: gyms.Ladder(0, 9)] * 2) as collector:
        collector.collect(n_step=3)
    before = descriptors()
    for _ in range(3):
        with Async(stay, [lambda: gyms.Ladder(0, 9)] * 2) as collector:
            collector.collect(n_step=3)
        del collector
    gc.collect()
    assert descriptors() <= before


def test_a_hanging_environment_is_reported_and_other_steps_are_kept(monkeypatch: pytest.MonkeyPatch, gate: Any) -> None:
    monkeypatch.setattr(async_vector, "_LOOK_EVERY_S", 0.05)
    monkeypatch.setattr(async_vector, "_START_WITHIN_S", 0.0)
    collector = Async(stay, watched(2, gate, 1), stall_timeout_s=0.3)
    with pytest.raises(
        WorkerError, match=r"environment 1 must .*, but hangs \(it has not answered for 0\.3 s\); close"
    ):
        collector.collect(n_step=1_000_000)
    with pytest.raises(WorkerError, match=r"environment 1 must .*, but hangs"):
        collector.collect(n_step=1)
    collector.close()
    assert are_gone(collector)


def test_time_between_calls_does_not_count_as_hanging(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(async_vector, "_LOOK_EVERY_S", 0.05)
    with Async(stay, [partial(gyms.Watched, 0, 9, pause_s=0.2)] * 2, stall_timeout_s=1.0) as collector:
        for _ in range(2):
            collector.collect(n_step=1)
            time.sleep(1.2)


def test_closing_kills_a_hanging_environment(monkeypatch: pytest.MonkeyPatch, gate: Any) -> None:
    monkeypatch.setattr(async_vector, "_CLOSE_WITHIN_S", 0.2)
    env = watched(3, gate, 1)
    collector = Async(stay, env)
    collector.collect(n_step=10)
    collector.close()
    assert are_gone(collector)
    assert [process.exitcode for process in processes_of(collector)] == [0, -signal.SIGTERM, 0]


def test_closing_waits_for_a_step_in_progress() -> None:
    closed = CONTEXT.RawArray("i", 2)

    class Closing(gyms.Watched):
        def close(self) -> None:
            closed[self._number] += 1

    env = [lambda n=n: Closing(n, 9, pause_s=0.1 * n) for n in range(2)]
    before = list(closed)
    collector = Async(stay, env)
    collector.collect(n_step=1)
    collector.close()
    assert [now - then for now, then in zip(closed, before, strict=True)] == [1, 1]
    assert [process.exitcode for process in processes_of(collector)] == [0, 0]
