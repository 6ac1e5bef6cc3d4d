"""Whatever happens to the processes of environments: it is told, nobody hangs, and none is left behind."""

from __future__ import annotations

import multiprocessing
import os
import signal
import subprocess
import sys
import textwrap
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import gymnasium
import gyms
import numpy as np
import pytest
from gymnasium import wrappers
from gymnasium.error import AlreadyPendingCallError
from gymnasium.vector import AsyncVectorEnv, SyncVectorEnv, VectorWrapper

from samplebatch import AsyncCollector, VectorReplayBuffer
from samplebatch.env import environment_processes
from samplebatch.errors import EnvironmentSpecError, WorkerError

CONTEXT = multiprocessing.get_context("fork")


def stay(obs: Any) -> Any:
    return np.zeros(len(obs), int)


def vector(makers: list[Any], **given: Any) -> Any:
    return AsyncVectorEnv(makers, context="fork", **given)


def is_gone(env: Any) -> bool:
    return not any(process.is_alive() for process in env.processes)


@pytest.fixture
def gate() -> Iterator[Any]:
    shut = CONTEXT.RawValue("b", 0)
    yield shut
    shut.value = 1


def watched(count: int, gate: Any, shut: int, **given: Any) -> Any:
    """Make ladders, one of which waits with every step until the gate is open."""
    steps = CONTEXT.RawArray("i", count)
    return vector(
        [lambda n=n: gyms.Watched(n, 9, steps=steps, gate=gate if n == shut else None) for n in range(count)], **given
    )


# Deaths


def test_a_process_that_is_killed_in_a_step_is_named_and_steps_are_kept(gate: Any) -> None:
    env = watched(3, gate, 1)
    buffer = VectorReplayBuffer(300, 3)
    collector = AsyncCollector(stay, env, buffer)
    collector.collect(n_step=20)
    kept = len(buffer)
    os.kill(env.processes[1].pid, signal.SIGKILL)
    for _ in range(2):
        with pytest.raises(WorkerError, match=r"environment 1 must answer .* its process \d+ was killed by SIGKILL"):
            collector.collect(n_step=1000)
    assert len(buffer) >= kept
    assert not len(buffer.buffers[1])
    collector.close()
    assert is_gone(env)


def test_a_process_that_is_killed_between_calls_is_named() -> None:
    for idle in (False, True):
        env = vector([lambda: gyms.Ladder(0, 9)] * 2)
        collector = AsyncCollector(stay, env)
        collector.collect(n_step=9)
        if idle:
            collector.reset_env()
        os.kill(env.processes[0].pid, signal.SIGKILL)
        env.processes[0].join()
        with pytest.raises(WorkerError, match=r"environment 0 must answer .* was killed by SIGKILL"):
            collector.collect(n_step=100)
        collector.close()
        assert is_gone(env)


def test_a_process_is_missed_even_if_a_child_of_its_own_holds_its_pipe(gate: Any) -> None:
    class Parent(gyms.Watched):
        """A ladder that leaves a process behind."""

        def step(self, action: Any) -> Any:
            child = os.fork()
            if child == 0:
                gate.value = 2
                while gate.value != 1:
                    time.sleep(0.001)
                os._exit(0)
            return super().step(action)

    env = vector([lambda: Parent(0, 9, gate=CONTEXT.RawValue("b", 0))])
    collector = AsyncCollector(stay, env, timeout_s=0.05)
    killer = CONTEXT.Process(target=_kill_once, args=(gate, env.processes[0].pid))
    killer.start()
    with pytest.raises(WorkerError, match=r"environment 0 must answer .* was killed by SIGKILL"):
        collector.collect(n_step=1)
    gate.value = 1
    collector.close()
    assert is_gone(env)
    killer.join()


def _kill_once(gate: Any, pid: int) -> None:
    while gate.value != 2:
        time.sleep(0.001)
    os.kill(pid, signal.SIGKILL)


def test_a_process_that_exits_is_named() -> None:
    class Leaving(gyms.Ladder):
        def step(self, action: Any) -> Any:
            os._exit(7)

    env = vector([lambda: gyms.Ladder(0, 9), lambda: Leaving(1, 9)])
    with (
        AsyncCollector(stay, env) as collector,
        pytest.raises(WorkerError, match=r"environment 1 must .* exited with status 7; make the environments anew"),
    ):
        collector.collect(n_step=100_000)
    assert is_gone(env)


# Environments that raise


def test_an_environment_that_raises_is_named_with_its_reason() -> None:
    env = vector([lambda: gyms.Ladder(0, 9), lambda: gyms.Failing(1, 50)])
    with AsyncCollector(stay, env) as collector:
        for _ in range(2):
            with pytest.raises(
                WorkerError, match=r"environment 1 must .* raised RuntimeError: the rung broke"
            ) as caught:
                collector.collect(n_step=1000)
            assert isinstance(caught.value.__cause__, RuntimeError)
            assert "gyms.py" in caught.value.__notes__[0]
    assert is_gone(env)


@pytest.mark.parametrize("mode", ["NextStep", "SameStep", "Disabled"])
@pytest.mark.parametrize("episode", [0, 1])
def test_an_environment_that_raises_when_it_is_reset_is_named(mode: str, episode: int) -> None:
    class Stubborn(gyms.Ladder):
        def reset(self, *, seed: int | None = None, options: Any = None) -> Any:
            if self._episode + 1 == episode:
                raise ValueError("no more")
            return super().reset(seed=seed, options=options)

    env = vector([lambda: gyms.Ladder(0, 9), lambda: Stubborn(1, 3)], autoreset_mode=mode)
    buffer = VectorReplayBuffer(500, 2)
    with (
        AsyncCollector(stay, env, buffer) as collector,
        pytest.raises(WorkerError, match=r"environment 1 must .* raised ValueError: no more"),
    ):
        collector.collect(n_step=400)
    # Where the reset is not of the last step, that step is there.
    assert len(buffer.buffers[1]) == (0 if episode == 0 else 2 if mode == "SameStep" else 3)
    assert is_gone(env)


def test_a_reason_that_cannot_be_told_does_not_keep_anybody_waiting(monkeypatch: pytest.MonkeyPatch) -> None:
    class Odd(Exception):
        """Cannot be unpickled."""

        def __init__(self, one: int, two: int) -> None:
            super().__init__("odd")

    class Failing(gyms.Ladder):
        def step(self, action: Any) -> Any:
            raise Odd(1, 2)

    monkeypatch.setattr(environment_processes, "_REASON_WITHIN_S", 0.2)
    env = vector([lambda: Failing(0, 9)])
    with (
        AsyncCollector(stay, env) as collector,
        pytest.raises(WorkerError, match=r"environment 0 must .* raised what cannot be told"),
    ):
        collector.collect(n_step=1)
    assert is_gone(env)


def test_an_answer_that_cannot_be_read_is_told() -> None:
    class Secret:
        def __reduce__(self) -> Any:
            return int, ("secret",)

    class Saying(gyms.Ladder):
        def step(self, action: Any) -> Any:
            return *super().step(action)[:4], {"x": Secret()}

    env = vector([lambda: Saying(0, 9)])
    with (
        AsyncCollector(stay, env) as collector,
        pytest.raises(WorkerError, match=r"environment 0 must .* gave an answer that cannot be read"),
    ):
        collector.collect(n_step=1)
    assert is_gone(env)


# Interrupts


def test_an_interrupt_in_the_midst_of_an_answer_leaves_a_collector_that_can_be_closed() -> None:
    class Torn:
        """A connection on which an answer is interrupted."""

        def __init__(self, pipe: Any) -> None:
            self._pipe = pipe

        def recv(self) -> Any:
            raise KeyboardInterrupt

        def __getattr__(self, name: str) -> Any:
            return getattr(self._pipe, name)

    env = vector([lambda: gyms.Ladder(0, 9)] * 2)
    collector = AsyncCollector(stay, env)
    collector.collect(n_step=4)
    pipes = collector._environments._processes._pipes
    pipes[1] = Torn(pipes[1])  # type: ignore[call-overload]
    with pytest.raises(KeyboardInterrupt):
        collector.collect(n_step=100)
    with pytest.raises(WorkerError, match="environment 1 must be whole, and was interrupted"):
        collector.collect(n_step=1)
    collector.close()
    assert is_gone(env)


def test_an_interrupt_of_the_whole_group_of_processes_leaves_none_behind() -> None:
    """What a terminal does on Ctrl-C."""
    script = textwrap.dedent(
        """
        import sys

        import numpy as np
        from gymnasium.vector import AsyncVectorEnv

        import gyms
        from samplebatch import AsyncCollector

        env = AsyncVectorEnv([lambda: gyms.Watched(0, 9, pause_s=0.01)] * 3, context="fork")
        collector = AsyncCollector(lambda obs: np.zeros(len(obs), int), env)
        try:
            collector.collect(n_step=3)
            print("ready", flush=True)
            collector.collect(n_step=100_000)
        except KeyboardInterrupt:
            collector.close()
            print(sum(process.is_alive() for process in env.processes), flush=True)
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
        said, errors = process.communicate(timeout=30)
    assert said == "0\n", errors
    assert process.returncode == 0


# The end


def test_a_collector_that_nobody_closes_leaves_nothing_behind() -> None:
    script = textwrap.dedent(
        """
        import numpy as np
        from gymnasium.vector import AsyncVectorEnv

        import gyms
        from samplebatch import AsyncCollector

        env = AsyncVectorEnv([lambda: gyms.Watched(0, 9, pause_s=0.01)] * 2, context="fork")
        AsyncCollector(lambda obs: np.zeros(len(obs), int), env).collect(n_step=3)
        print(*[process.pid for process in env.processes])
        """
    )
    folder = Path(gyms.__file__).parent
    ran = subprocess.run(
        [sys.executable, "-c", script],
        cwd=folder,
        capture_output=True,
        text=True,
        timeout=60,
        env={**os.environ, "PYTHONPATH": str(folder.parents[1])},
    )
    assert ran.returncode == 0
    assert "Traceback" not in ran.stderr
    assert not any(Path(f"/proc/{pid}").exists() for pid in ran.stdout.split())


def test_an_environment_that_hangs_is_ended(monkeypatch: pytest.MonkeyPatch, gate: Any) -> None:
    monkeypatch.setattr(environment_processes, "_CLOSE_WITHIN_S", 0.2)
    env = watched(3, gate, 1)
    collector = AsyncCollector(stay, env)
    collector.collect(n_step=10)
    collector.close()
    assert is_gone(env)
    assert [process.exitcode for process in env.processes] == [0, -signal.SIGTERM, 0]


def test_a_step_that_is_under_way_may_end_before_the_environment_is_closed() -> None:
    closed = CONTEXT.RawArray("i", 2)

    class Closing(gyms.Watched):
        def close(self) -> None:
            closed[self._number] += 1

    env = vector([lambda n=n: Closing(n, 9, pause_s=0.1 * n) for n in range(2)])
    before = list(closed)
    collector = AsyncCollector(stay, env)
    collector.collect(n_step=1)
    collector.close()
    assert [now - then for now, then in zip(closed, before, strict=True)] == [1, 1]
    assert [process.exitcode for process in env.processes] == [0, 0]


# Gymnasium's own methods meanwhile


def test_environments_that_are_under_way_cannot_be_asked_by_others(gate: Any) -> None:
    env = watched(2, gate, 1)
    collector = AsyncCollector(stay, env)
    collector.collect(n_step=4)
    with pytest.raises(AlreadyPendingCallError, match="pending call to `collect`"):
        env.reset()
    with pytest.raises(AlreadyPendingCallError, match="pending call to `collect`"):
        env.get_attr("spec")
    gate.value = 1
    collector.reset_env()
    assert env.get_attr("_number") == (0, 1)
    assert collector.collect(n_step=4).n_collected_steps >= 4
    collector.close()


def test_closing_the_environment_itself_waits_for_what_is_under_way(gate: Any) -> None:
    for opens in (True, False):
        gate.value = 0
        env = watched(2, gate, 1)
        collector = AsyncCollector(stay, env)
        collector.collect(n_step=4)
        gate.value = opens
        with pytest.warns(UserWarning, match="pending call to `collect`"):
            env.close(timeout=None if opens else 0.05)
        assert is_gone(env)
        with pytest.raises(EnvironmentSpecError, match="must be open, and has been closed"):
            collector.collect(n_step=100)
        collector.close()


# What is refused


class Counting(VectorWrapper):
    """A wrapper that would miss steps."""


class Own(AsyncVectorEnv):
    """An AsyncVectorEnv that steps in its own way."""

    def step_wait(self, timeout: Any = None) -> Any:
        return super().step_wait(timeout)


def test_what_cannot_be_stepped_in_part_is_refused() -> None:
    makers = [lambda: gyms.Ladder(0, 9)] * 2
    for env, words in (
        (SyncVectorEnv(makers), "got a SyncVectorEnv; use Collector, which steps environments together"),
        (gyms.Ladder(0, 9), "got a Ladder; use Collector"),
        ("CartPole-v1", "got a str; use Collector"),
        (Counting(vector(makers)), "got a Counting around one; wrap the single environments instead"),
        (wrappers.vector.RecordEpisodeStatistics(vector(makers)), "got a RecordEpisodeStatistics around one; wrap"),
        (Own(makers, context="fork"), "got a Own with a step_wait of its own, which would not be called"),
    ):
        with pytest.raises(EnvironmentSpecError, match=words):
            AsyncCollector(stay, env)
        if not isinstance(env, str):
            env.close()


def test_environments_that_are_closed_or_waited_for_are_refused() -> None:
    env = vector([lambda: gyms.Ladder(0, 9)])
    env.reset_async()
    with pytest.raises(EnvironmentSpecError, match="has a call of 'reset' pending"):
        AsyncCollector(stay, env)
    env.reset_wait()
    env.close()
    with pytest.raises(EnvironmentSpecError, match="must be open, and has been closed"):
        AsyncCollector(stay, env)


def test_a_gymnasium_that_is_made_otherwise_is_told_of(monkeypatch: pytest.MonkeyPatch) -> None:
    env = vector([lambda: gyms.Ladder(0, 9)])
    queue = env.error_queue
    del env.error_queue
    with pytest.raises(EnvironmentSpecError, match=rf"gymnasium {gymnasium.__version__} has no 'error_queue'"):
        AsyncCollector(stay, env)
    env.error_queue = queue
    env.close()
