"""Terminal output of the command line: tables, messages, formatted numbers, errors, exit statuses and signals."""

from __future__ import annotations

import signal
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from math import inf, isnan
from types import FrameType
from typing import TYPE_CHECKING, Any, Self

from samplebatch import errors
from samplebatch.names import for_rich, for_terminal

if TYPE_CHECKING:
    from rich.console import Console

    from samplebatch.batch.multi_agent import MultiAgentBatch
    from samplebatch.batch.sample_batch import SampleBatch
    from samplebatch.rollout.statistics import EpisodeStatistics

FAILED, MISUSED, INTERRUPTED = 1, 2, 130
"""Exit statuses: failure, invalid arguments, Ctrl-C (see `Interruption` for SIGTERM)."""

_WRONG_ARGUMENTS = (
    errors.ArgumentError,
    errors.EnvironmentSpecError,
    errors.FormatError,
    errors.MissingExtraError,
    errors.PolicySpecError,
    errors.PriorityError,
)

EPISODE_HEADINGS = ("policy", "episodes", "agent episodes", "mean return", "std", "min", "max", "mean length")
_MAX_LINE = 4000
"""Maximum characters per line of a message."""
_SIGNALS = (signal.SIGINT, signal.SIGTERM)
_LOOK_S = 0.2
"""Interval at which a waiting command checks for signals."""


def console(*, stderr: bool = False) -> Console:
    """Create a console on standard output or standard error."""
    from rich.console import Console

    return Console(stderr=stderr)


def complain(sentence: str) -> None:
    """Print an error as one sentence on standard error."""
    from rich.text import Text

    console(stderr=True).print(Text.assemble(("Error: ", "bold red"), _printable(sentence)), soft_wrap=True)


def say(sentence: str, *, stderr: bool = False) -> None:
    """Print a sentence without line wrapping and without markup."""
    console(stderr=stderr).print(_printable(sentence), highlight=False, markup=False, soft_wrap=True)


def guard(command: Callable[[], int]) -> int:
    """Run a command; convert errors to one sentence and an exit status."""
    try:
        return command()
    except errors.UntrustedPickleError as error:
        # The error's advice names a Python argument.
        reason = str(error).partition("; pass allow_pickle")[0]
        complain(f"{reason}; if you trust who wrote it, add --allow-pickle")
        return FAILED
    except errors.NonFiniteLossError as error:
        complain(str(error).replace("pass allow_nonfinite=True", "add --set allow_nonfinite=true"))
        return FAILED
    except _WRONG_ARGUMENTS as error:
        complain(str(error))
        return MISUSED
    except OSError as error:
        complain(f"{error.strerror}: {error.filename!r}" if error.strerror and error.filename else str(error))
        return MISUSED
    except errors.SampleBatchError as error:
        complain(str(error))
        return FAILED
    except KeyboardInterrupt:
        complain("interrupted")
        return INTERRUPTED
    except SystemExit as error:
        # An environment or a policy may call sys.exit, also with status 0: the command has failed anyway.
        complain(f"the command must finish its work, and sys.exit({error.code!r}) was called in it")
        return error.code if isinstance(error.code, int) and error.code else FAILED


def _printable(sentence: str) -> str:
    return "\n".join(for_terminal(line.replace("\t", "    "), _MAX_LINE) for line in sentence.split("\n"))


def show_table(
    headings: Sequence[str], rows: Iterable[Sequence[object]], title: str = "", *, right: Sequence[str] = ()
) -> None:
    """Print a table with escaped cells; the columns named in `right` are right-aligned."""
    from rich.table import Table

    table = Table(title=for_rich(title, 200) if title else None, title_justify="left", title_style="bold")
    for heading in headings:
        table.add_column(heading, justify="right" if heading in right else "left", overflow="fold")
    for row in rows:
        table.add_row(*map(for_rich, row))
    console().print(table)


def show_columns(batch: SampleBatch | MultiAgentBatch) -> None:
    """Print each policy's columns."""
    from samplebatch.batch.summary import HEADINGS, describe

    for title, steps in titled_steps(batch):
        lines = describe({name: steps.column(name) for name in steps.column_names})
        cells = [[getattr(line, heading) for heading in HEADINGS] for line in lines]
        show_table(HEADINGS, cells, title, right=("min", "max", "mean"))


def titled_steps(batch: SampleBatch | MultiAgentBatch) -> Iterator[tuple[str, SampleBatch]]:
    """Yield a title and the steps of each policy; in a multi-agent batch, the title contains the policy id."""
    from samplebatch.batch.sample_batch import SampleBatch

    flat = isinstance(batch, SampleBatch)
    for policy, steps in batch.as_multi_agent().policy_batches.items():
        yield f"{len(steps)} steps" if flat else f"policy {for_terminal(policy)}: {len(steps)} agent steps", steps


def show_episodes(statistics: EpisodeStatistics | None) -> None:
    """Print the statistics of episodes; print nothing for None."""
    if statistics is not None:
        show_table(EPISODE_HEADINGS, episode_cells(statistics), episodes_of(statistics), right=EPISODE_HEADINGS[1:])


def episodes_of(statistics: EpisodeStatistics) -> str:
    """Format the number of episodes."""
    return f"{statistics.episodes} episodes ended, {statistics.unfinished} did not"


def episode_cells(statistics: EpisodeStatistics) -> list[list[str]]:
    """Return one table row per policy, with the cells of `EPISODE_HEADINGS`."""
    rows = []
    for policy, policy_statistics in statistics.policies.items():
        returns = policy_statistics.returns
        spread = (returns.std(), returns.min(), returns.max()) if returns.size else (float("nan"),) * 3
        numbers = [
            number(float(value)) for value in (policy_statistics.mean_return, *spread, policy_statistics.mean_length)
        ]
        rows.append([str(policy), str(policy_statistics.episodes), str(len(policy_statistics.lengths)), *numbers])
    return rows


def number(value: float) -> str:
    """Format a number with four significant digits; NaN becomes a dash.

    >>> number(12.3456), number(float("nan"))
    ('12.35', '-')
    """
    return "-" if isnan(value) else f"{value:.4g}"


def megabytes(nbytes: int) -> str:
    """Format a size in megabytes.

    >>> megabytes(1_234_567)
    '1.23 MB'
    """
    return f"{nbytes / 1e6:.2f} MB"


class Interruption:
    """Handler of the signals that end a command early.

    In a `with` block, the first Ctrl-C or SIGTERM requests the command to stop, so that the command can save its work.
    A second Ctrl-C ends the program. Further SIGTERMs are ignored, because `timeout` and some batch systems send
    SIGTERM twice: to a process and to the process's group.

    - `request_stop`: function that the first signal calls at any point of the main thread; it must not acquire a lock.

    Instance attributes:
    - `status`: exit status, which is 128 plus the number of the first signal, or 0 if no signal has arrived.

    >>> with Interruption(lambda: print("stopping")) as interruption:
    ...     signal.raise_signal(signal.SIGTERM)
    stopping
    >>> interruption.status
    143
    """

    def __init__(self, request_stop: Callable[[], Any] | None = None) -> None:
        self.status = 0
        self._request_stop = request_stop
        self._handlers: dict[signal.Signals, Any] = {}

    def __enter__(self) -> Self:
        self._handlers = {number: signal.signal(number, self._handle) for number in _SIGNALS}
        return self

    def __exit__(self, *error: object) -> None:
        for number, handler in self._handlers.items():
            signal.signal(number, handler)

    def wait(self, timeout_s: float | None = None) -> bool:
        """Wait for a signal, and return whether a signal arrived; a timeout of None waits indefinitely.

        A `threading.Event` is unsuitable: the main thread may hold the event's lock when the signal arrives, and a
        signal between the check and the wait would not wake the waiter.
        """
        deadline = inf if timeout_s is None else time.monotonic() + timeout_s
        while not self.status and (left_s := deadline - time.monotonic()) > 0:
            time.sleep(min(_LOOK_S, left_s))
        return bool(self.status)

    def _handle(self, number: int, frame: FrameType | None) -> None:
        if not self.status:
            self.status = 128 + number
            if self._request_stop is not None:
                self._request_stop()
        signal.signal(signal.SIGINT, signal.default_int_handler)
