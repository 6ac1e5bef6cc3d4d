"""The `samplebatch` command."""

from __future__ import annotations

import contextlib
import os
import signal
import sys
from collections.abc import Callable, Iterator
from math import isnan
from pathlib import Path
from typing import TYPE_CHECKING, Any

from samplebatch import __version__
from samplebatch.errors import (
    EnvironmentSpecError,
    FormatError,
    MissingExtraError,
    SampleBatchError,
    UntrustedPickleError,
    WorkerError,
    require,
)
from samplebatch.rollout.environments import DEFAULT_ENVIRONMENT

if TYPE_CHECKING:
    from rich.console import Console
    from rich.progress import Progress
    from typer import Typer

    from samplebatch.batch.multi_agent import MultiAgentBatch
    from samplebatch.batch.sample_batch import SampleBatch
    from samplebatch.rollout.aggregate import Aggregator
    from samplebatch.rollout.workers import RolloutWorkers

FAILED, MISUSED, INTERRUPTED = 1, 2, 130
"""Exit statuses: the work failed, the arguments were wrong, Ctrl-C."""

_HELP = """Collect reinforcement-learning experience into Arrow files, and look into them.

[bold]Step an environment in four processes, and keep what happened:[/bold]

  samplebatch collect mpe2/simple_spread_v3 --workers 4 --steps 10000 --out spread.arrow

[bold]Look into the file:[/bold]

  samplebatch inspect spread.arrow

[bold]Read it in Python, without copying it:[/bold]

  batch = samplebatch.read_arrow("spread.arrow")
"""

_COLLECT_HELP = """Step a multi-agent environment with random actions in several processes, and write one batch.

ENV is a PettingZoo parallel environment, [bold]package/module[/bold], or any function that makes one,
[bold]module:function[/bold].

[bold]Examples[/bold]

  samplebatch collect

  samplebatch collect mpe2/simple_tag_v3 --workers 4 --steps 20000 --seed 1 --out tag.arrow

  samplebatch collect my_package.arena:make_arena --fragment-length 50

Ctrl-C ends the run early, and writes what has been collected so far.
"""

_INSPECT_HELP = """Print what is in a file: each policy's columns, its episodes and their mean return.

[bold]Example[/bold]

  samplebatch inspect rollout.arrow
"""


def main() -> None:
    """Run the command; this is what the script `samplebatch` calls."""
    try:
        require("rich", "cli")
        require("typer", "cli")
    except MissingExtraError as error:
        print(f"Error: {error}", file=sys.stderr)
        raise SystemExit(FAILED) from None
    application()(prog_name="samplebatch")


def application() -> Typer:
    """Build the command line.

    Raises
    ------
    MissingExtraError
        If Typer is not installed.
    """
    typer = require("typer", "cli")
    app: Typer = typer.Typer(
        name="samplebatch",
        help=_HELP,
        no_args_is_help=True,
        add_completion=False,
        rich_markup_mode="rich",
        pretty_exceptions_enable=False,
        context_settings={"help_option_names": ["-h", "--help"]},
    )

    def show_version(value: bool) -> None:
        if value:
            print(f"samplebatch {__version__}")
            raise typer.Exit

    version_option = typer.Option(
        False, "--version", callback=show_version, is_eager=True, help="Print the version, and exit."
    )
    environment_argument = typer.Argument(DEFAULT_ENVIRONMENT, metavar="ENV", help="Environment to step.")
    workers_option = typer.Option(2, "--workers", "-w", min=1, help="Processes that step an environment each.")
    steps_option = typer.Option(
        1000, "--steps", "-n", min=1, help="Environment steps to collect, in all processes together."
    )
    out_option = typer.Option(
        Path("rollout.arrow"), "--out", "-o", help="Arrow file to write; an older one is replaced."
    )
    seed_option = typer.Option(
        None, "--seed", min=0, help="Seed of environments and actions. [dim]\\[default: a random one][/dim]"
    )
    fragment_option = typer.Option(
        200, "--fragment-length", min=1, help="Environment steps that a worker sends at once."
    )
    file_argument = typer.Argument(..., metavar="FILE", help="Arrow file that samplebatch wrote.")
    pickle_option = typer.Option(
        False,
        "--allow-pickle",
        help="Unpickle objects that Arrow has no type for. Only for files whose writer you trust.",
    )

    @app.callback()
    def samplebatch(version: bool = version_option) -> None:
        pass

    @app.command("collect", help=_COLLECT_HELP)
    def collect_command(
        env: str = environment_argument,
        workers: int = workers_option,
        steps: int = steps_option,
        out: Path = out_option,
        seed: int | None = seed_option,
        fragment_length: int = fragment_option,
    ) -> None:
        raise typer.Exit(
            _guarded(
                lambda: collect(env, workers=workers, steps=steps, out=out, seed=seed, fragment_length=fragment_length)
            )
        )

    @app.command("inspect", help=_INSPECT_HELP)
    def inspect_command(file: Path = file_argument, allow_pickle: bool = pickle_option) -> None:
        raise typer.Exit(_guarded(lambda: inspect(file, allow_pickle=allow_pickle)))

    return app


def collect(environment: str, *, workers: int, steps: int, out: Path, seed: int | None, fragment_length: int) -> int:
    """Collect steps and write them, show how it goes, and return the exit status."""
    from samplebatch.rollout.aggregate import Aggregator
    from samplebatch.rollout.workers import RolloutWorkers
    from samplebatch.storage.arrow_file import check_writable, write_arrow

    # A console script has its own folder on the path, not the one it is called from.
    sys.path.insert(0, os.getcwd())
    check_writable(out)
    pool = RolloutWorkers(environment, env_steps=steps, num_workers=workers, fragment_length=fragment_length, seed=seed)
    aggregator = Aggregator()
    failure: WorkerError | None = None
    with _stop_on_interrupt(pool) as was_interrupted, _progress() as progress:
        show = _shown(progress, steps, aggregator)
        try:
            with pool:
                for fragment in pool:
                    aggregator.add(fragment)
                    show()
        except WorkerError as error:
            failure = error
    if failure is not None:
        _complain(str(failure))
    if was_interrupted():
        _console(stderr=True).print(f"Interrupted after {aggregator.env_steps} of {steps} steps.", highlight=False)
    if not aggregator.env_steps:
        _complain("nothing was collected, so nothing is written")
        return INTERRUPTED if was_interrupted() else FAILED
    collected, fragments = aggregator.env_steps, aggregator.fragments
    batch = aggregator.build_and_reset()
    write_arrow(batch, out)
    console = _console()
    _show_batch(console, batch)
    console.print(
        f"Wrote {collected} environment steps, {batch.agent_steps()} agent steps from {fragments} fragments "
        f"({_megabytes(out.stat().st_size)}) to {out}",
        highlight=False,
        soft_wrap=True,
    )
    if was_interrupted():
        return INTERRUPTED
    return FAILED if failure is not None else 0


def inspect(file: Path, *, allow_pickle: bool = False) -> int:
    """Print what is in a file, and return the exit status."""
    from samplebatch.storage.arrow_file import read_arrow

    try:
        batch = read_arrow(file, allow_pickle=allow_pickle)
    except UntrustedPickleError as error:
        _complain(f"{error}; if you trust who wrote {str(file)!r}, add --allow-pickle")
        return FAILED
    _show_batch(_console(), batch)
    return 0


def _guarded(command: Callable[[], int]) -> int:
    """Run a command, and turn what may go wrong into one sentence and an exit status."""
    try:
        return command()
    except (EnvironmentSpecError, FormatError, MissingExtraError) as error:
        _complain(str(error))
        return MISUSED
    except OSError as error:
        _complain(f"{error.strerror}: {error.filename!r}" if error.strerror and error.filename else str(error))
        return MISUSED
    except SampleBatchError as error:
        _complain(str(error))
        return FAILED
    except KeyboardInterrupt:
        _complain("interrupted")
        return INTERRUPTED


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


def _console(*, stderr: bool = False) -> Console:
    from rich.console import Console

    return Console(stderr=stderr)


def _complain(sentence: str) -> None:
    from rich.text import Text

    _console(stderr=True).print(Text.assemble(("Error: ", "bold red"), sentence), soft_wrap=True)


def _progress() -> Progress:
    from rich.progress import BarColumn, Progress, TextColumn, TimeElapsedColumn

    return Progress(
        BarColumn(bar_width=None),
        TextColumn("{task.completed}/{task.total} steps, {task.fields[details]}"),
        TimeElapsedColumn(),
        console=_console(stderr=True),
        expand=True,
    )


def _shown(progress: Progress, steps: int, aggregator: Aggregator) -> Callable[[], None]:
    """Start a bar, and return the function that brings it up to date."""
    task = progress.add_task("", total=steps, details="workers are starting")

    def show() -> None:
        speed = aggregator.env_steps / (progress.tasks[0].elapsed or 1e-9)
        details = f"{speed:.0f} steps/s, {aggregator.episodes} episodes, {aggregator.fragments} fragments"
        progress.update(task, completed=aggregator.env_steps, details=details)

    return show


def _show_batch(console: Console, batch: SampleBatch | MultiAgentBatch) -> None:
    """Print each policy's columns, and the episodes where the batch tells them."""
    from rich.table import Table

    from samplebatch.batch.sample_batch import SampleBatch
    from samplebatch.batch.summary import HEADINGS, describe
    from samplebatch.rollout.statistics import episode_statistics

    flat = isinstance(batch, SampleBatch)
    policies = batch.as_multi_agent().policy_batches
    for policy, steps in policies.items():
        title = f"{len(steps)} steps" if flat else f"policy {policy}: {len(steps)} agent steps"
        table = Table(title=title, title_justify="left", title_style="bold")
        for heading in HEADINGS:
            table.add_column(heading, justify="right" if heading in ("min", "max", "mean") else "left")
        for line in describe({name: steps.column(name) for name in steps.column_names}):
            table.add_row(*line)
        console.print(table)
    statistics = episode_statistics(batch)
    if statistics is None:
        return
    table = Table(
        title=f"{statistics.episodes} episodes ended, {statistics.unfinished} did not",
        title_justify="left",
        title_style="bold",
    )
    table.add_column("policy")
    for heading in ("episodes", "agent episodes", "mean return", "mean length"):
        table.add_column(heading, justify="right")
    for policy, found in statistics.policies.items():
        table.add_row(
            policy, str(found.episodes), str(len(found.lengths)), _number(found.mean_return), _number(found.mean_length)
        )
    console.print(table)


def _number(value: float) -> str:
    return "-" if isnan(value) else f"{value:.4g}"


def _megabytes(nbytes: int) -> str:
    return f"{nbytes / 1e6:.2f} MB"


if __name__ == "__main__":
    main()
