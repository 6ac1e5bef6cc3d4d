"""`samplebatch collect`."""

from __future__ import annotations

import contextlib
import os
import signal
import sys
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from samplebatch.cli.destination import Destination, destination
from samplebatch.cli.display import complain, console, megabytes, number, say, show_columns, show_episodes
from samplebatch.cli.report import check_picture, draw_episodes
from samplebatch.errors import PolicySpecError, WorkerError
from samplebatch.policy.file import is_policy_file, load_policy
from samplebatch.rollout.statistics import RunningStatistics, episode_statistics
from samplebatch.workers.workers import RolloutWorkers

if TYPE_CHECKING:
    from rich.progress import Progress

FAILED, INTERRUPTED = 1, 130
_SHOWN_POLICIES = 3
"""Policies whose returns the line of progress has room for."""


@dataclass(frozen=True)
class Run:
    """The options of `samplebatch collect`."""

    environment: str
    policies: Sequence[str]
    workers: int
    envs_per_worker: int
    steps: int | None
    episodes: int | None
    seed: int | None
    out: Path
    fragment_length: int
    restarts: int
    plot: Path | None
    allow_pickle: bool

    @property
    def total(self) -> int:
        """Steps or episodes, whichever is counted."""
        return self.steps or self.episodes or 0

    @property
    def unit(self) -> str:
        """The unit that is counted."""
        return "steps" if self.steps else "episodes"


def collect(run: Run) -> int:
    """Collect and write, show how it goes, and return the exit status."""
    # A console script has its own folder on the path, not the one it is called from.
    sys.path.insert(0, os.getcwd())
    policies = find_policies(run.policies, allow_pickle=run.allow_pickle)
    if run.plot is not None:
        check_picture(run.plot)
    pool = RolloutWorkers(
        run.environment,
        policies,
        n_step=run.steps,
        n_episode=run.episodes,
        num_workers=run.workers,
        envs_per_worker=run.envs_per_worker,
        fragment_length=run.fragment_length,
        seed=run.seed,
        max_restarts=run.restarts,
    )
    target = destination(run.out)
    running = RunningStatistics()
    failure: WorkerError | None = None
    with _stop_on_interrupt(pool) as was_interrupted, _progress(run.unit) as progress:
        show = _show(progress, run, pool, target, running)
        try:
            with pool:
                for fragment in pool:
                    target.add(fragment)
                    running.add(fragment)
                    show()
        except WorkerError as error:
            failure = error
    if failure is not None:
        complain(str(failure))
    if was_interrupted():
        done = target.env_steps if run.steps else running.episodes
        say(f"Interrupted after {done} of {run.total} {run.unit}.", stderr=True)
    if not target.env_steps:
        complain("nothing was collected, so nothing is written")
        return INTERRUPTED if was_interrupted() else FAILED
    _finish(run, pool, target)
    if was_interrupted():
        return INTERRUPTED
    return FAILED if failure is not None else 0


def _finish(run: Run, pool: RolloutWorkers, target: Destination) -> None:
    """Write the collected steps, and report them."""
    batch, nbytes = target.finish()
    show_columns(batch)
    show_episodes(episode_statistics(batch))
    facts = pool.worker_stats
    for failure in facts.failures:
        say(f"Replaced: {failure}")
    if facts.lost_steps:
        say(f"Lost {facts.lost_steps} environment steps with the fragments of workers that failed")
    say(
        f"Wrote {target.env_steps} environment steps, {target.agent_steps} agent steps "
        f"from {target.fragments} fragments ({megabytes(nbytes)}) to {run.out}"
    )
    if run.plot is not None:
        draw_episodes(batch, run.plot)
        say(f"Drew the episodes' returns and lengths to {run.plot}")


def find_policies(given: Sequence[str], *, allow_pickle: bool = False) -> Any:
    """Find the policies that `--policy` names: one for all, or one for each id.

    Raises
    ------
    PolicySpecError
        If there is no such policy, or some have an id and others not.
    UntrustedPickleError
        If one is pickled, and that is not allowed.

    Examples
    --------
    >>> find_policies(["wolf=random", "sheep=random"], allow_pickle=False)
    {'wolf': 'random', 'sheep': 'random'}
    """
    pairs = [text.rpartition("=") for text in given]
    if len(given) > 1 and not all(equals for _, equals, _ in pairs):
        raise PolicySpecError("several policies must each have the id of who acts by them, as in ID=module:function")
    found = {policy_id: _find_policy(name, allow_pickle=allow_pickle) for policy_id, _, name in pairs}
    return found if pairs[0][1] else found[""]


def _find_policy(name: str, *, allow_pickle: bool = False) -> Any:
    if not is_policy_file(name):
        return name
    load = partial(load_policy, name, allow_pickle=allow_pickle)
    # Loaded here once, so that what is wrong with it is said before any process starts.
    load()
    return load


@contextlib.contextmanager
def _stop_on_interrupt(pool: RolloutWorkers) -> Iterator[Callable[[], bool]]:
    """Let the first Ctrl-C end the collecting, and a second one the program.

    Gives a function that tells whether there was one.
    """
    interrupts: list[int] = []

    def stop(number: int, _: Any) -> None:
        interrupts.append(number)
        pool.request_stop()
        signal.signal(signal.SIGINT, signal.default_int_handler)

    before = signal.signal(signal.SIGINT, stop)
    try:
        yield lambda: bool(interrupts)
    finally:
        signal.signal(signal.SIGINT, before)


def _progress(unit: str) -> Progress:
    from rich.progress import BarColumn, Progress, TextColumn, TimeElapsedColumn

    return Progress(
        BarColumn(bar_width=None),
        TextColumn(f"{{task.completed}}/{{task.total}} {unit}, {{task.fields[details]}}"),
        TimeElapsedColumn(),
        console=console(stderr=True),
        expand=True,
    )


def _show(
    progress: Progress, run: Run, pool: RolloutWorkers, target: Destination, running: RunningStatistics
) -> Callable[[], None]:
    """Start a bar, and return the function that brings it up to date."""
    task = progress.add_task("", total=run.total, details="workers are starting")

    def show() -> None:
        facts = pool.worker_stats
        details = [f"{target.env_steps / (progress.tasks[0].elapsed or 1e-9):.0f} steps/s"]
        details += [f"{running.episodes} episodes"] if run.steps else [f"{target.env_steps} steps"]
        policies = running.statistics().policies
        returns = [(policy, found.mean_return) for policy, found in policies.items() if len(found.lengths)]
        if len(returns) == 1:
            details.append(f"mean return {number(returns[0][1])}")
        elif returns:
            shown = ", ".join(f"{policy} {number(mean)}" for policy, mean in returns[:_SHOWN_POLICIES])
            details.append(f"mean return {shown}{', ...' if len(returns) > _SHOWN_POLICIES else ''}")
        details += [megabytes(facts.nbytes), f"{facts.queue_depth} queued"]
        completed = target.env_steps if run.steps else min(running.episodes, run.total)
        progress.update(task, completed=completed, details=", ".join(details))

    return show
