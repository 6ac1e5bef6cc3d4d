"""RolloutWorkers: processes that step environments and send what they collect."""

from __future__ import annotations

import contextlib
import multiprocessing
import os
import pickle
import signal
import sys
import threading
import time
import traceback
from collections.abc import Iterator
from dataclasses import dataclass, field
from multiprocessing import resource_tracker
from multiprocessing.connection import wait
from multiprocessing.process import BaseProcess
from typing import Any, Self

import numpy as np

from samplebatch.batch.multi_agent import MultiAgentBatch
from samplebatch.batch.multi_agent_builder import PolicyMapping
from samplebatch.errors import EnvironmentSpecError, SampleBatchError, WorkerError
from samplebatch.rollout.channel import FragmentReceiver, FragmentSender, fragment_channel
from samplebatch.rollout.environments import Environment, environment_factory, make_environment
from samplebatch.rollout.multi_agent_collector import MultiAgentCollector

_GRACE_S = 2.0
"""Seconds that workers have to close their environments when they are stopped."""
_LOOK_S = 0.1
"""Seconds after which a request to stop is noticed at the latest."""


@dataclass(frozen=True)
class _Plan:
    """What one worker is to do."""

    index: int
    environment: Environment
    env_steps: int
    fragment_length: int
    policy_mapping: PolicyMapping | None
    seed: np.random.SeedSequence


@dataclass
class _Worker:
    """What the parent knows of one worker."""

    plan: _Plan
    process: BaseProcess
    receiver: FragmentReceiver
    sent: int = 0
    heard_at: float = field(default_factory=time.monotonic)

    def receive(self, timeout_s: float) -> MultiAgentBatch:
        """Receive the next fragment.

        Raises
        ------
        TimeoutError
            If it is not there in time.
        WorkerError
            If the worker failed or is gone before it has sent all its steps.
        """
        try:
            fragment = self.receiver.recv(timeout_s)
        except EOFError:
            self.process.join(_GRACE_S)
            raise self._error(_how_it_ended(self.process.exitcode)) from None
        except WorkerError as error:
            failure = self._error("failed", f": {error}")
            for note in getattr(error, "__notes__", ()):
                failure.add_note(note)
            raise failure from None
        self.sent += fragment.count
        self.heard_at = time.monotonic()
        return fragment

    def check_stall(self, stall_timeout_s: float) -> None:
        """Raise `WorkerError` if the worker has sent nothing for too long."""
        # Whoever takes the fragments may have been busy for longer than that: what matters is what the pipe holds now.
        late = time.monotonic() - self.heard_at > stall_timeout_s
        if late and not wait([self.receiver.fileno()], timeout=0):
            raise self._error(f"hangs (it sent nothing for {stall_timeout_s:g} s)")

    def drain(self, deadline: float) -> Iterator[MultiAgentBatch]:
        """Receive what a worker that is being stopped has still sent; kill it if it has not ended by the deadline."""
        while True:
            try:
                yield self.receive(max(0.0, deadline - time.monotonic()))
            except TimeoutError:
                if not self.process.is_alive():
                    return
                self.process.kill()
                self.process.join()
            except SampleBatchError:
                return

    def _error(self, what: str, why: str = "") -> WorkerError:
        return WorkerError(
            f"worker {self.plan.index} (process {self.process.pid}) {what} "
            f"after sending {self.sent} of {self.plan.env_steps} steps{why}"
        )


class RolloutWorkers:
    """Processes that step an environment each, with random actions, and send fragments of what they collect.

    Use it as a context manager, which starts and stops the processes, and iterate over it for the fragments, in the
    order in which they arrive. The fragments of all workers together have exactly `env_steps` environment steps.

    A worker that raises, dies or hangs ends the run: the iterator first yields every whole fragment that has been
    sent, then raises `WorkerError`. Workers ignore Ctrl-C, which is the parent's to handle, and end by themselves
    when their parent is gone.

    Parameters
    ----------
    environment
        The environment's name, or a function that makes it (see `environment_factory`). It goes to other processes by
        pickle, so a function must be importable.
    env_steps
        Environment steps to collect, shared out evenly.
    num_workers
        Processes. There are never more than steps.
    fragment_length
        Environment steps in a fragment; a worker's last one may have fewer.
    policy_mapping
        The policy that acts for an agent, by agent id; a function must be importable. By default one policy for each
        kind of agent.
    seed
        Seed of the run. The same seed and number of workers give the same steps from every worker, `eps_id` aside; in
        which order the workers' fragments arrive is not determined.
    start_method
        How processes start: `"spawn"`, `"forkserver"` or `"fork"`.
    stall_timeout_s
        Seconds without a fragment after which a worker is taken to hang.

    Raises
    ------
    EnvironmentSpecError
        If there is no such environment, or it cannot be sent to another process.
    ValueError
        If a number is not positive.

    Examples
    --------
    >>> with RolloutWorkers("mpe2/simple_spread_v3", env_steps=100, num_workers=1, fragment_length=40) as workers:
    ...     [fragment.count for fragment in workers]
    [40, 40, 20]
    """

    def __init__(
        self,
        environment: Environment,
        *,
        env_steps: int,
        num_workers: int = 2,
        fragment_length: int = 200,
        policy_mapping: PolicyMapping | None = None,
        seed: int | None = None,
        start_method: str = "spawn",
        stall_timeout_s: float = 300.0,
    ) -> None:
        for name, value in (
            ("env_steps", env_steps),
            ("num_workers", num_workers),
            ("fragment_length", fragment_length),
            ("stall_timeout_s", stall_timeout_s),
        ):
            if value <= 0:
                raise ValueError(f"{name} must be positive, got {value}")
        environment_factory(environment)
        self._context = multiprocessing.get_context(start_method)
        self._stall_timeout_s = stall_timeout_s
        num_workers = min(num_workers, env_steps)
        seeds = np.random.SeedSequence(seed).spawn(num_workers)
        shares = [env_steps // num_workers + (i < env_steps % num_workers) for i in range(num_workers)]
        self._plans = [
            _Plan(i, environment, shares[i], fragment_length, policy_mapping, seeds[i]) for i in range(num_workers)
        ]
        self._workers: list[_Worker] = []
        self._entered = False
        self._stop_requested = False

    @property
    def pids(self) -> list[int]:
        """Process ids of the workers, in their order; empty unless they have been started."""
        return [worker.process.pid or 0 for worker in self._workers]

    def __enter__(self) -> Self:
        self._entered = True
        try:
            self._start()
        except BaseException:
            self.stop()
            raise
        return self

    def __exit__(self, *_: object) -> None:
        self.stop()

    def __iter__(self) -> Iterator[MultiAgentBatch]:
        if not self._entered:
            raise WorkerError("workers must be started before they can send anything; use them in a with statement")
        failure: WorkerError | None = None
        running = self._running()
        while running and failure is None and not self._stop_requested:
            ready = wait([worker.receiver.fileno() for worker in running], timeout=_LOOK_S)
            for worker in running:
                try:
                    if worker.receiver.fileno() in ready:
                        yield worker.receive(_LOOK_S)
                    else:
                        worker.check_stall(self._stall_timeout_s)
                except TimeoutError:
                    continue
                except WorkerError as error:
                    failure = error
                    break
            running = self._running()
        if running:
            yield from self.stop()
        if failure is not None:
            raise failure

    def _running(self) -> list[_Worker]:
        return [worker for worker in self._workers if worker.sent < worker.plan.env_steps]

    def request_stop(self) -> None:
        """Let the iterator end soon, after the whole fragments that have been sent; signal handlers may call this."""
        self._stop_requested = True

    def stop(self) -> list[MultiAgentBatch]:
        """End all workers, and return the whole fragments that they had sent and nobody has received.

        Workers have two seconds to close their environments; after that they are killed.
        """
        workers, self._workers = self._workers, []
        fragments: list[MultiAgentBatch] = []
        try:
            for worker in workers:
                worker.process.terminate()
            deadline = time.monotonic() + _GRACE_S
            for worker in workers:
                fragments += worker.drain(deadline)
        finally:
            for worker in workers:
                worker.process.kill()
                worker.process.join()
                worker.process.close()
                worker.receiver.close()
        return fragments

    def _start(self) -> None:
        # The tracker unblocks SIGINT when it starts, so it must run before that is blocked.
        resource_tracker.ensure_running()
        with _blocked_interrupts():
            for plan in self._plans:
                receiver, sender = fragment_channel(self._context)
                process = self._context.Process(  # type: ignore[attr-defined]
                    target=_work, args=(sender, plan), name=f"rollout-worker-{plan.index}"
                )
                try:
                    process.start()
                except (pickle.PicklingError, AttributeError, TypeError) as error:
                    receiver.close()
                    raise EnvironmentSpecError(
                        "environment and policy_mapping go to other processes, and must be names or importable "
                        f"functions: {error}"
                    ) from error
                finally:
                    sender.close()
                self._workers.append(_Worker(plan, process, receiver))


def _how_it_ended(status: int | None) -> str:
    if status is None:
        return "closed its stream"
    return f"was killed by {_signal_name(-status)}" if status < 0 else f"exited with status {status}"


def _signal_name(number: int) -> str:
    try:
        return signal.Signals(number).name
    except ValueError:
        return f"signal {number}"


@contextlib.contextmanager
def _blocked_interrupts() -> Iterator[None]:
    """Hold Ctrl-C back while processes start: they inherit that, and are deaf to it before they can ask to be."""
    before = signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT})
    try:
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)


def _work(sender: FragmentSender, plan: _Plan) -> None:
    """Run in a worker's process: collect, and send."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    signal.signal(signal.SIGTERM, _quit)
    signal.pthread_sigmask(signal.SIG_UNBLOCK, {signal.SIGINT})
    threading.Thread(target=_die_with_parent, daemon=True).start()
    environment = None
    try:
        environment = make_environment(plan.environment)
        collector = MultiAgentCollector(
            environment, policy_mapping=plan.policy_mapping, seed=plan.seed, first_unroll_id=plan.index << 32
        )
        left = plan.env_steps
        while left:
            fragment = collector.collect(min(left, plan.fragment_length))
            left -= fragment.count
            if not _deliver(sender, fragment):
                return
    except Exception as error:
        reason = str(error) if isinstance(error, SampleBatchError) else f"{type(error).__name__}: {error}"
        with contextlib.suppress(BrokenPipeError):
            sender.fail(reason, traceback.format_exc())
    finally:
        sender.close()
        if environment is not None:
            with contextlib.suppress(Exception):
                environment.close()


def _deliver(sender: FragmentSender, fragment: MultiAgentBatch) -> bool:
    """Send a fragment, and tell whether there was somebody to take it."""
    try:
        sender.send(fragment)
    except BrokenPipeError:
        return False
    return True


def _quit(*_: Any) -> None:
    sys.exit(0)


def _die_with_parent() -> None:
    parent = multiprocessing.parent_process()
    if parent is not None:
        parent.join()
        os._exit(1)
