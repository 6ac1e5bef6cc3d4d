"""`samplebatch collect`."""

from __future__ import annotations

import os
import sys
from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from samplebatch.batch.multi_agent import MultiAgentBatch
from samplebatch.batch.nested.batch import Batch
from samplebatch.batch.sample_batch import SampleBatch
from samplebatch.buffer.multi_agent import MultiAgentReplayBuffer
from samplebatch.buffer.replay import ReplayBuffer
from samplebatch.cli.report import check_picture, draw_episodes
from samplebatch.cli.terminal import (
    FAILED,
    Interruption,
    complain,
    console,
    megabytes,
    number,
    say,
    show_columns,
    show_episodes,
)
from samplebatch.env.registry import imports_module
from samplebatch.errors import PolicySpecError, WorkerError
from samplebatch.policy.source import is_policy_file, load_policy
from samplebatch.rollout.aggregator import Aggregator
from samplebatch.rollout.statistics import RunningStatistics, episode_statistics
from samplebatch.storage.datasets.dataset import Dataset
from samplebatch.storage.files import check_writable, form_to_write
from samplebatch.storage.saving import load, save
from samplebatch.workers.workers import RolloutWorkers

if TYPE_CHECKING:
    from rich.progress import Progress


AnyBatch = SampleBatch | MultiAgentBatch


class Destination(ABC):
    """Takes fragments in; `finish` returns them as one batch, written.

    Attributes
    ----------
    fragments
        Fragments taken in.
    env_steps, agent_steps
        Environment steps in them, and steps of all agents.
    """

    fragments = env_steps = agent_steps = 0

    def add(self, fragment: AnyBatch) -> None:
        """Take a fragment in."""
        self.take(fragment)
        self.fragments += 1
        self.env_steps += fragment.env_steps()
        self.agent_steps += fragment.agent_steps()

    @abstractmethod
    def take(self, fragment: AnyBatch) -> None:
        """Keep or write a fragment."""

    @abstractmethod
    def finish(self) -> tuple[AnyBatch, int]:
        """Write the rest, and return all steps and the bytes that they take on the disk."""


class OneFile(Destination):
    """A single Arrow or Parquet file, written at the end; an older one is replaced."""

    def __init__(self, path: Path) -> None:
        form_to_write(path)
        check_writable(path)
        self._path = path
        self._aggregator = Aggregator()

    def take(self, fragment: AnyBatch) -> None:
        """Keep a fragment."""
        self._aggregator.add(fragment)

    def finish(self) -> tuple[AnyBatch, int]:
        """Join the fragments, and write them."""
        batch = self._aggregator.build_and_reset()
        save(batch, self._path)
        return batch, self._path.stat().st_size


class Folder(Destination):
    """A folder that gets a Parquet file for every fragment; those that are there stay."""

    def __init__(self, path: Path) -> None:
        self._dataset = Dataset(path)
        self._nbytes = 0

    def take(self, fragment: AnyBatch) -> None:
        """Write a fragment."""
        self._nbytes += self._dataset.extend(fragment).stat().st_size

    def finish(self) -> tuple[AnyBatch, int]:
        """Read the folder; the bytes are those of this run."""
        batch: Any = self._dataset.read()
        return batch, self._nbytes


def destination(path: Path) -> Destination:
    """Tell the kind of a path: a folder is one that is there, or has a name without an ending."""
    return Folder(path) if path.is_dir() or not path.suffix else OneFile(path)


def read_any(path: Path, *, allow_pickle: bool = False) -> AnyBatch:
    """Read a file or folder of any format as a batch, a buffer's rows in time order; raises as `load` does."""
    found: Any = load(path, allow_pickle=allow_pickle, verify=True)
    if isinstance(found, ReplayBuffer):
        with found as buffer:
            found = buffer.sample(0).batch if len(buffer) else Batch()
    elif isinstance(found, MultiAgentReplayBuffer):
        found = found.sample(0).batch
    batch: AnyBatch = found.as_sample_batch(convention="rllib") if isinstance(found, Batch) else found
    return batch


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
    if run.allow_pickle or imports_module(run.environment) or any(":" in policy for policy in run.policies):
        # A console script has its own folder on the path, not the one it is called from.
        sys.path.insert(0, os.getcwd())
    policies = find_policies(run.policies, allow_pickle=run.allow_pickle)
    if run.plot is not None:
        check_picture(run.plot)
    pool = RolloutWorkers(
        policies,
        run.environment,
        num_workers=run.workers,
        envs_per_worker=run.envs_per_worker,
        seed=run.seed,
        max_restarts=run.restarts,
    )
    target = destination(run.out)
    running = RunningStatistics()
    failure: WorkerError | None = None
    with Interruption(pool.request_stop) as interruption, _progress(run.unit) as progress:
        show = _show(progress, run, pool, target, running)
        try:
            with pool:
                for fragment in pool.fragments(
                    n_step=run.steps, n_episode=run.episodes, fragment_length=run.fragment_length
                ):
                    target.add(fragment)
                    running.add(fragment)
                    show()
        except WorkerError as error:
            failure = error
    done = target.env_steps if run.steps else running.episodes
    status = FAILED if failure is not None or done < run.total else 0
    if failure is not None:
        complain(str(failure))
    if interruption.status:
        status = interruption.status
        say(f"Interrupted after {done} of {run.total} {run.unit}.", stderr=True)
    if not target.env_steps:
        complain("nothing was collected, so nothing is written")
        return status
    _finish(run, pool, target)
    return status


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
