"""Growth of operation times with the number of rows: a table and a chart of nanoseconds per row or per call.

    python -m benchmarks.scripts growth --rows 100000000 --plot growth.svg

Rows contain an observation of four floats, an action, a reward, flags, and the ids of episodes of 200 steps. Times of
operations on all rows are reported per row; times of operations on a step, a sample or an opened folder are reported
per call. Each time is the minimum of several runs. The last column is the exponent of the total time as a power of the
number of rows, estimated from the last two sizes. An exponent of 1 means time proportional to the rows; 0 means time
independent of the rows.
"""

from __future__ import annotations

import argparse
import json
import math
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np

from samplebatch import Aggregator, Batch, Dataset, ReplayBuffer, SampleBatch, concat_samples
from samplebatch.service import ReplayClient, ReplayServer, ReplayTable

EPISODE, SAMPLE, PARTS, TRAIN_ROWS = 200, 256, 16, 4096
PART_ROWS = 10**6
"""Maximum number of rows of a dataset's part, and of an insertion that fills a table of the service."""
BUDGET_S = 1.0
"""Minimum seconds for which each operation is repeated."""
Operation = tuple[str, str, Callable[[], Any] | float]
"""Name of an operation, unit of its reported time ("row" or "call"), and its function or its measured seconds."""


def make_batch(rows: int) -> SampleBatch:
    """Create a batch of episodes of `EPISODE` steps."""
    steps = np.arange(rows)
    obs = np.ones((rows, 4), np.float32)
    return SampleBatch(
        obs=obs,
        actions=steps & 1,
        rewards=np.ones(rows),
        terminateds=steps % EPISODE == EPISODE - 1,
        truncateds=np.zeros(rows, bool),
        eps_id=steps // EPISODE,
        t=steps % EPISODE,
    )


def shortest_time(call: Callable[[], Any]) -> float:
    """Call at least twice and for `BUDGET_S`; return the minimum duration of a call in seconds."""
    shortest, runs, end = math.inf, 0, time.perf_counter() + BUDGET_S
    while runs < 2 or time.perf_counter() < end:
        start = time.perf_counter()
        call()
        shortest, runs = min(shortest, time.perf_counter() - start), runs + 1
    return shortest


def flat_operations(rows: int) -> Iterator[Operation]:
    """Yield operations on flat batches."""
    batch = make_batch(rows)
    size = max(1, rows // PARTS)
    parts = [batch[start : start + size] for start in range(0, rows, size)]
    order = np.random.default_rng(0).permutation(rows)
    yield "concat of 16 parts", "row", lambda: concat_samples(parts)
    yield "rows in random order", "row", lambda: batch[order]
    yield "timeslices of 200", "row", lambda: batch.timeslices(EPISODE)
    yield "split_by_episode", "row", lambda: batch.split_by_episode()

    def aggregate() -> None:
        aggregator = Aggregator(train_batch_size=TRAIN_ROWS)
        for start in range(0, rows, 1000):
            aggregator.add(batch[start : start + 1000])
            for _ in aggregator.batches():
                pass

    yield "Aggregator, fragments of 1,000", "row", aggregate


def buffer_operations(rows: int) -> Iterator[Operation]:
    """Yield operations on a full replay buffer."""
    batch = make_batch(rows)
    buffer = ReplayBuffer(rows)
    yield "ReplayBuffer.extend", "row", lambda: buffer.extend(batch)
    step = Batch(obs=np.ones(4, np.float32), act=0, rew=1.0, terminated=False, truncated=False)
    yield "ReplayBuffer.add", "call", lambda: buffer.add(step)
    yield "ReplayBuffer.sample of 256", "call", lambda: buffer.sample(SAMPLE)


def dataset_operations(rows: int, folder: Path) -> Iterator[Operation]:
    """Yield operations on a dataset whose parts have at most `PART_ROWS` rows."""
    part = make_batch(min(rows, PART_ROWS))
    dataset = Dataset(folder / "steps")
    start = time.perf_counter()
    for start_row in range(0, rows, PART_ROWS):
        dataset.extend(part[: rows - start_row])
    yield "Dataset.extend", "row", time.perf_counter() - start
    step = make_batch(SAMPLE)
    yield "Dataset, open", "call", lambda: len(Dataset(folder / "steps"))
    yield "Dataset.iter_batches of 4,096", "row", lambda: sum(len(batch) for batch in dataset.iter_batches(TRAIN_ROWS))
    yield "Dataset.extend by 256", "call", lambda: dataset.extend(step)


def service_operations(rows: int) -> Iterator[Operation]:
    """Yield operations on a full table of the replay service."""
    batch = make_batch(SAMPLE)
    with (
        ReplayServer([ReplayTable("replay", capacity=rows, seed=0)]) as server,
        ReplayClient(server.uri, "replay") as client,
    ):
        part = make_batch(min(rows, PART_ROWS))
        for start_row in range(0, rows, PART_ROWS):
            client.extend(part[: rows - start_row])
        client.flush()
        yield "ReplayClient.sample of 256", "call", lambda: client.sample(SAMPLE)

        def insert() -> None:
            client.extend(batch)
            client.flush()

        yield "ReplayClient.extend of 256", "call", insert


def measure(largest: int, report: Callable[[str], None] = print) -> dict[str, dict[str, Any]]:
    """Measure all operations at powers of ten and at the largest size; return units and seconds by operation name."""
    times: dict[str, dict[str, Any]] = {}
    for rows in sorted({*(10**power for power in range(3, 1 + int(math.log10(largest)))), largest}):
        report(f"{rows:,} rows")
        with tempfile.TemporaryDirectory() as folder:
            for operations in (
                flat_operations(rows),
                buffer_operations(rows),
                dataset_operations(rows, Path(folder)),
                service_operations(rows),
            ):
                for name, unit, call in operations:
                    seconds = call if isinstance(call, float) else shortest_time(call)
                    record = times.setdefault(name, {"unit": unit, "seconds": {}})
                    record["seconds"][rows] = seconds / rows if unit == "row" else seconds
    return times


def exponent(record: dict[str, Any]) -> float:
    """Estimate the exponent of the total time as a power of the rows, from the last two sizes."""
    sizes = sorted(record["seconds"])[-2:]
    if len(sizes) < 2:
        return math.nan
    slope = math.log(record["seconds"][sizes[1]] / record["seconds"][sizes[0]]) / math.log(sizes[1] / sizes[0])
    return slope + (record["unit"] == "row")


def draw(times: dict[str, dict[str, Any]], path: Path) -> None:
    """Plot times per row and times per call against the number of rows, on logarithmic axes."""
    from matplotlib import pyplot as plt

    figure, all_axes = plt.subplots(1, 2, figsize=(11, 4.5), layout="constrained")
    for axes, unit in zip(all_axes, ("row", "call"), strict=True):
        for name, record in times.items():
            if record["unit"] == unit:
                sizes = sorted(record["seconds"])
                axes.loglog(sizes, [1e9 * record["seconds"][size] for size in sizes], marker="o", label=name)
        axes.set(xlabel="rows", ylabel=f"ns per {unit}", title=f"time per {unit}")
        axes.grid(alpha=0.3)
        axes.legend(fontsize="small")
    with plt.rc_context({"svg.fonttype": "none"}):
        figure.savefig(path)
    plt.close(figure)


def main(arguments: list[str] | None = None) -> int:
    """Measure all operations and print a table."""
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.scripts growth",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--rows", type=int, default=10**6, help="largest number of rows; 100 million require 23 GB")
    parser.add_argument("--json", type=Path, help="JSON file to write the times to")
    parser.add_argument("--plot", type=Path, help="image file to write the chart to")
    options = parser.parse_args(arguments)
    times = measure(options.rows)
    sizes = sorted({size for record in times.values() for size in record["seconds"]})
    print(f"{'nanoseconds':32}" + "".join(f"{f'{size:,}':>14}" for size in sizes) + f"{'exponent':>10}")
    for name, record in times.items():
        cells = [f"{1e9 * record['seconds'][size]:,.4g}" if size in record["seconds"] else "-" for size in sizes]
        print(f"{name + ', ' + record['unit']:32}" + "".join(f"{c:>14}" for c in cells) + f"{exponent(record):10.2f}")
    if options.json:
        options.json.write_text(json.dumps(times, indent=1))
    if options.plot:
        draw(times, options.plot)
    return 0
