"""Commands `samplebatch collect`, `samplebatch inspect` and `samplebatch verify`."""

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
from samplebatch.batch.summary import Line, describe
from samplebatch.buffer.multi_agent import MultiAgentReplayBuffer
from samplebatch.buffer.replay import ReplayBuffer
from samplebatch.cli import terminal
from samplebatch.cli.curves import LOG, draw_curves, show_curves
from samplebatch.cli.report import check_picture, draw_episodes, write_html_report
from samplebatch.env.registry import imports_module
from samplebatch.errors import PolicySpecError, WorkerError
from samplebatch.loggers.training_log import is_log
from samplebatch.names import for_terminal
from samplebatch.policy.source import is_policy_file, load_policy
from samplebatch.rollout.aggregator import Aggregator
from samplebatch.rollout.statistics import RunningStatistics, episode_statistics
from samplebatch.storage import saving
from samplebatch.storage.datasets.dataset import Dataset
from samplebatch.storage.files import check_writable, form_to_write
from samplebatch.workers.workers import RolloutWorkers

if TYPE_CHECKING:
    from rich.progress import Progress


AnyBatch = SampleBatch | MultiAgentBatch


class Destination(ABC):
    """Destination of collected fragments; `finish` writes pending fragments and returns all steps.

    - `fragments`: number of added fragments.
    - `env_steps`, `agent_steps`: number of environment steps and of agent steps in these fragments.
    """

    fragments = env_steps = agent_steps = 0

    def add(self, fragment: AnyBatch) -> None:
        """Add a fragment."""
        self.take(fragment)
        self.fragments += 1
        self.env_steps += fragment.env_steps()
        self.agent_steps += fragment.agent_steps()

    @abstractmethod
    def take(self, fragment: AnyBatch) -> None:
        """Store or write a fragment."""

    @abstractmethod
    def finish(self) -> tuple[AnyBatch, int]:
        """Write pending fragments; return all steps, and the number of bytes written."""


class OneFile(Destination):
    """Single Arrow or Parquet file, which is written by `finish` and replaces an existing file."""

    def __init__(self, path: Path) -> None:
        form_to_write(path)
        check_writable(path)
        self._path = path
        self._aggregator = Aggregator()

    def take(self, fragment: AnyBatch) -> None:
        """Store a fragment in memory."""
        self._aggregator.add(fragment)

    def finish(self) -> tuple[AnyBatch, int]:
        """Join and write the fragments."""
        batch = self._aggregator.build_and_reset()
        saving.save(batch, self._path)
        return batch, self._path.stat().st_size


class Folder(Destination):
    """Dataset folder to which every fragment is appended as a Parquet file."""

    def __init__(self, path: Path) -> None:
        self._dataset = Dataset(path)
        self._nbytes = 0

    def take(self, fragment: AnyBatch) -> None:
        """Write a fragment."""
        self._nbytes += self._dataset.extend(fragment).stat().st_size

    def finish(self) -> tuple[AnyBatch, int]:
        """Return all steps in the folder, and the number of bytes that this run has written."""
        batch: Any = self._dataset.read()
        return batch, self._nbytes


def destination(path: Path) -> Destination:
    """Return a `Folder` if the path is an existing folder or has no suffix, otherwise a `OneFile`."""
    return Folder(path) if path.is_dir() or not path.suffix else OneFile(path)


def read_any(path: Path, *, allow_pickle: bool = False) -> AnyBatch:
    """Read a file or folder of any format as a batch; rows of a buffer are in time order.

    Raises the same errors as `load`.
    """
    return _as_rows(saving.load(path, allow_pickle=allow_pickle, verify=True))


def _as_rows(loaded: Any) -> AnyBatch:
    if isinstance(loaded, ReplayBuffer):
        with loaded as buffer:
            loaded = buffer.sample(0).batch if len(buffer) else Batch()
    elif isinstance(loaded, MultiAgentReplayBuffer):
        loaded = loaded.sample(0).batch
    batch: AnyBatch = loaded.as_sample_batch(convention="rllib") if isinstance(loaded, Batch) else loaded
    return batch


_FILES = {".arrow": "Arrow file", ".parquet": "Parquet file", ".hdf5": "HDF5 file", ".h5": "HDF5 file"}
_MAX_NAMED = 5
"""Maximum number of policies that are named in a title."""


def title_of(path: Path, loaded: Any, batch: AnyBatch) -> str:
    """Describe the type of a file or folder, for the title of an HTML page.

    >>> steps = SampleBatch(rewards=[1.0, 2.0])
    >>> title_of(Path("cart.parquet"), steps, steps)
    'cart.parquet: Parquet file, 2 steps of one policy'
    """
    name = path.name or path.resolve().name
    if is_log(batch):
        return f"{name}: training log, {len(set(batch['name'].tolist()))} metrics"
    if isinstance(loaded, ReplayBuffer | MultiAgentReplayBuffer):
        kind = "replay buffer"
    else:
        kind = "dataset" if path.is_dir() else _FILES.get(path.suffix.lower(), "file")
    content = f"{batch.env_steps()} steps of one policy"
    if isinstance(batch, MultiAgentBatch):
        policies = [str(policy) for policy in batch.policy_batches]
        listed = ", ".join(policies[:_MAX_NAMED]) + (", ..." if len(policies) > _MAX_NAMED else "")
        noun = "policy" if len(policies) == 1 else "policies"
        content = f"{batch.env_steps()} steps of the {noun} {listed}"
    return f"{name}: {kind}, {content}"


_SHOWN_POLICIES = 3
"""Maximum number of policies whose returns are in the progress line."""


@dataclass(frozen=True)
class Run:
    """Options of `samplebatch collect`."""

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
        """Requested number of steps or episodes."""
        return self.steps or self.episodes or 0

    @property
    def unit(self) -> str:
        """Unit of `total`: steps or episodes."""
        return "steps" if self.steps else "episodes"


def collect(run: Run) -> int:
    """Collect and write steps with a progress bar, and return the exit status."""
    if run.allow_pickle or imports_module(run.environment) or any(":" in policy for policy in run.policies):
        # A console script has its own folder on sys.path, not the current directory.
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
    with terminal.Interruption(pool.request_stop) as interruption, _progress(run.unit) as progress:
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
    status = terminal.FAILED if failure is not None or done < run.total else 0
    if failure is not None:
        terminal.complain(str(failure))
    if interruption.status:
        status = interruption.status
        terminal.say(f"Interrupted after {done} of {run.total} {run.unit}.", stderr=True)
    if not target.env_steps:
        terminal.complain("nothing was collected, so nothing is written")
        return status
    _finish(run, pool, target)
    return status


def _finish(run: Run, pool: RolloutWorkers, target: Destination) -> None:
    batch, nbytes = target.finish()
    terminal.show_columns(batch)
    terminal.show_episodes(episode_statistics(batch))
    facts = pool.worker_stats
    for failure in facts.failures:
        terminal.say(f"Replaced: {failure}")
    if facts.lost_steps:
        terminal.say(f"Lost {facts.lost_steps} environment steps with the fragments of workers that failed")
    terminal.say(
        f"Wrote {target.env_steps} environment steps, {target.agent_steps} agent steps "
        f"from {target.fragments} fragments ({terminal.megabytes(nbytes)}) to {run.out}"
    )
    if run.plot is not None:
        draw_episodes(batch, run.plot)
        terminal.say(f"Drew the episodes' returns and lengths to {run.plot}")


def find_policies(texts: Sequence[str], *, allow_pickle: bool = False) -> Any:
    """Return the policies that `--policy` specifies: one for all agents, or one per policy id.

    >>> find_policies(["wolf=random", "sheep=random"], allow_pickle=False)
    {'wolf': 'random', 'sheep': 'random'}
    """
    pairs = [text.rpartition("=") for text in texts]
    for _, equals, name in pairs if len(texts) > 1 else ():
        if not equals:
            raise PolicySpecError(f"each of several policies must have an id, as in ID=module:function, got {name!r}")
    policies = {policy_id: _find_policy(name, allow_pickle=allow_pickle) for policy_id, _, name in pairs}
    return policies if pairs[0][1] else policies[""]


def _find_policy(name: str, *, allow_pickle: bool = False) -> Any:
    if not is_policy_file(name):
        return name
    load = partial(load_policy, name, allow_pickle=allow_pickle)
    # Load the policy once here, so that errors are reported before any process starts.
    load()
    return load


def _progress(unit: str) -> Progress:
    from rich.progress import BarColumn, Progress, TextColumn, TimeElapsedColumn

    return Progress(
        BarColumn(bar_width=None),
        TextColumn(f"{{task.completed}}/{{task.total}} {unit}, {{task.fields[details]}}"),
        TimeElapsedColumn(),
        console=terminal.console(stderr=True),
        expand=True,
    )


def _show(
    progress: Progress, run: Run, pool: RolloutWorkers, target: Destination, running: RunningStatistics
) -> Callable[[], None]:
    task = progress.add_task("", total=run.total, details="workers are starting")

    def show() -> None:
        facts = pool.worker_stats
        details = [f"{target.env_steps / (progress.tasks[0].elapsed or 1e-9):.0f} steps/s"]
        details += [f"{running.episodes} episodes"] if run.steps else [f"{target.env_steps} steps"]
        policies = running.statistics().policies
        returns = [
            (policy, statistics.mean_return) for policy, statistics in policies.items() if len(statistics.lengths)
        ]
        if len(returns) == 1:
            details.append(f"mean return {terminal.number(returns[0][1])}")
        elif returns:
            listed = ", ".join(f"{policy} {terminal.number(mean)}" for policy, mean in returns[:_SHOWN_POLICIES])
            details.append(f"mean return {listed}{', ...' if len(returns) > _SHOWN_POLICIES else ''}")
        details += [terminal.megabytes(facts.nbytes), f"{facts.queue_depth} queued"]
        completed = target.env_steps if run.steps else min(running.episodes, run.total)
        progress.update(task, completed=completed, details=", ".join(details))

    return show


def inspect(file: Path, *, plot: Path | None = None, html: Path | None = None, allow_pickle: bool = False) -> int:
    """Print the columns and episodes of a file, and optionally write a plot and an HTML page; return the exit status.

    For a training log or the folder of a training run, print and plot the learning curves.
    """
    if plot is not None:
        check_picture(plot)
    loaded: Any = saving.load(file / LOG if (file / LOG).is_dir() else file, allow_pickle=allow_pickle, verify=True)
    batch = _as_rows(loaded)
    if is_log(batch):
        show_curves(batch)
    else:
        terminal.show_columns(batch)
        terminal.show_episodes(episode_statistics(batch))
    if plot is not None:
        if is_log(batch):
            draw_curves(batch, plot)
        else:
            draw_episodes(batch, plot)
        terminal.say(f"Drew {plot}")
    if html is not None:
        write_html_report(batch, html, title=title_of(file, loaded, batch))
        terminal.say(f"Wrote {html}")
    return 0


def compare(first: Path, second: Path, *, allow_pickle: bool = False) -> int:
    """Print a comparison of the columns of two files, with one table per policy; return the exit status."""
    sides = [read_any(path, allow_pickle=allow_pickle) for path in (first, second)]
    policies = [side.as_multi_agent().policy_batches for side in sides]
    for path, side in zip((first, second), sides, strict=True):
        terminal.say(f"{path}: {side.env_steps()} environment steps, {side.agent_steps()} agent steps")
    are_equal = True
    for policy in dict.fromkeys([*policies[0], *policies[1]]):
        left, right = (batches.get(policy, SampleBatch()) for batches in policies)
        are_equal &= _show_differences(policy, left, right, flat=all(isinstance(side, SampleBatch) for side in sides))
    terminal.say("The files are equal." if are_equal else "The files differ.")
    return 0


def _show_differences(policy: Any, left: SampleBatch, right: SampleBatch, *, flat: bool) -> bool:
    verdicts = {name: _verdict(name, left, right) for name in [*left.column_names, *right.column_names]}
    terminal.show_table(
        ("column", "first", "range", "mean", "second", "range", "mean", ""),
        [(name, *_cells(name, left), *_cells(name, right), verdict) for name, verdict in verdicts.items()],
        f"{'' if flat else f'policy {for_terminal(policy)}: '}{len(left)} and {len(right)} steps",
    )
    return set(verdicts.values()) <= {"same"} and len(left) == len(right)


def _verdict(name: str, left: SampleBatch, right: SampleBatch) -> str:
    if name not in left.column_names or name not in right.column_names:
        return "only in the first" if name in left.column_names else "only in the second"
    mine, theirs = left.column(name), right.column(name)
    if (str(mine.dtype), mine.row_shape) != (str(theirs.dtype), theirs.row_shape):
        return "another type"
    return "same" if mine.equals(theirs) else "other values"


def _cells(name: str, batch: SampleBatch) -> tuple[str, str, str]:
    line = Line("", "", "")
    if name in batch.column_names:
        (line,) = describe({name: batch.column(name)})
    return f"{line.dtype} {line.shape}".strip(), f"{line.min} to {line.max}" if line.min else "", line.mean


def verify(path: Path) -> int:
    """Print whether each file is intact; return the exit status, which is 1 if a file is damaged."""
    reports = saving.verify(path)
    rows = []
    for report in reports:
        name = report.path.relative_to(path) if report.path != path else path.name
        intact = "intact" if report.has_checksums else "readable; it has no checksums"
        rows.append((name, report.format, terminal.megabytes(report.nbytes), "damaged" if report.fault else intact))
    terminal.show_table(("file", "format", "size", "found"), rows, right=("size",))
    faults = [report.fault for report in reports if report.fault]
    if faults:
        terminal.complain(faults[0] + (f"; {len(faults) - 1} more files are damaged" if faults[1:] else ""))
    return terminal.FAILED if faults else 0
