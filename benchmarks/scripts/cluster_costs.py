"""Processor time per step in each process of a cluster, for `docs/cluster-costs.md`.

    python -m benchmarks.scripts cluster_costs process ray service --env small --workers 1 2 4 8
    python -m benchmarks.scripts cluster_costs write sample --env images --workers 1 4

- `process`, `ray`: `RolloutWorkers.collect` by workers in processes or by Ray actors; this process receives the batch.
- `service`: `RolloutWorkers.collect` by workers in processes, which write to a replay service in another process. The
  table is filled before the measurement, because writing to new memory pages doubles the cost.
- `write`: processes insert one fragment repeatedly, like workers without environments.
- `sample`: learners in processes sample batches of 256 small steps or 32 image steps, without shared memory, as clients
  on another machine do.

Times are microseconds of processor time per step, which other programs affect less than wall-clock time. `here` is this
process. `workers` are all workers, writers and readers. `engine` is the service, or Ray's processes. Steps per second
are measured in wall-clock time. `cores` is the total processor time per second, and `engine cores` is the engine's
processor time per second.
"""

from __future__ import annotations

import argparse
import multiprocessing
import os
import time
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from benchmarks.bench_cluster import Images, Small

ENVIRONMENTS: dict[str, Any] = {"small": Small, "images": Images}
SHARES = {"small": 500, "images": 50}
"""Steps per fragment: the steps that a worker collects in one call."""
DRAWS = {"small": 256, "images": 32}
CAPACITIES = {"small": 200_000, "images": 4_000}

Work = Callable[[], int]
"""Function that processes some steps and returns their number."""


@dataclass(frozen=True)
class Reading:
    """Measured steps, wall seconds, and processor seconds by process role."""

    steps: int
    seconds: float
    used: Counter[str]

    def row(self, *labels: object) -> str:
        """Format the measurement as a row of a Markdown table."""
        cost = [f"{1e6 * self.used[role] / self.steps:.1f}" for role in ("here", "workers", "engine")]
        cores = [f"{spent / self.seconds:.2f}" for spent in (self.used.total(), self.used["engine"])]
        return "| " + " | ".join(map(str, (*labels, *cost, f"{self.steps / self.seconds:.0f}", *cores))) + " |"


HEADER = """\
| link | env | processes | steps per fragment | here us | workers us | engine us | steps/s | cores | engine cores |
|---|---|---:|---:|---:|---:|---:|---:|---:|---:|"""


# Processor time


def descendants(pid: int) -> Iterator[int]:
    """Yield the process ids of all descendants of a process."""
    for tasks in Path(f"/proc/{pid}/task").glob("*/children"):
        for child in map(int, tasks.read_text().split()):
            yield child
            yield from descendants(child)


def processor_s(pid: int) -> float:
    """Return the processor seconds of all threads of a process, including terminated threads."""
    # Linux encodes the CPU clock of a process in the clock id: complement of the pid, and the scheduler clock (2).
    return time.clock_gettime((~pid << 3) | 2)


def processor_times(engine: int | None) -> dict[tuple[int, str], float]:
    """Return the processor seconds of this process and its descendants, by process id and role."""
    times = {(os.getpid(), "here"): processor_s(os.getpid())}
    for pid in descendants(os.getpid()):
        try:
            line = Path(f"/proc/{pid}/cmdline").read_text()
            role = "engine" if pid == engine or ("ray" in line and not line.startswith("ray::")) else "workers"
            times[pid, role] = processor_s(pid)
        except OSError:  # the process has terminated
            continue
    return times


def measure(work: Work, seconds: float, engine: int | None = None) -> Reading:
    """Repeat `work` for at least `seconds`, and read the processor clocks before and after."""
    work()
    before, start = processor_times(engine), time.perf_counter()
    steps = work()
    while time.perf_counter() - start < seconds:
        steps += work()
    elapsed, after = time.perf_counter() - start, processor_times(engine)
    used: Counter[str] = Counter()
    for key in after.keys() & before.keys():
        used[key[1]] += after[key] - before[key]
    return Reading(steps, elapsed, used)


# The service, its writers and its readers


def _serve(env: str, streams: int, back: Any) -> None:
    from samplebatch.service import ReplayServer, ReplayTable

    table = ReplayTable("replay", capacity=CAPACITIES[env], streams=streams, seed=0)
    rows = fragment(env, 500)
    while len(table) < table.capacity:
        for ring in range(streams):
            table.extend(rows, writer=f"ring {ring}")
    with ReplayServer([table]) as server:
        back.send(server.uri)
        back.poll(None)


@contextmanager
def service(env: str, streams: int) -> Iterator[tuple[str, int]]:
    """Serve a table from another process; yield the address and the process id."""
    local, remote = multiprocessing.get_context("spawn").Pipe()
    process = multiprocessing.get_context("spawn").Process(target=_serve, args=(env, streams, remote), daemon=True)
    process.start()
    try:
        yield local.recv(), process.pid or 0
    finally:
        local.close()
        remote.close()
        process.kill()


def fragment(env: str, rows: int) -> Any:
    """Collect a fragment: `rows` steps of one environment."""
    from samplebatch import Collector

    with Collector("random", ENVIRONMENTS[env](), seed=0) as collector:
        return collector.collect(n_step=rows).batch


def _write(uri: str, env: str, share: int, count: Any) -> None:
    from samplebatch.service import ReplayClient

    rows = fragment(env, share)
    with ReplayClient(uri, "replay") as client:
        while True:
            client.extend(rows)
            count.value = client.written.rows


def _read(uri: str, env: str, share: int, count: Any) -> None:
    from samplebatch.service import ReplayClient

    with ReplayClient(uri, "replay", shared_memory=False, prefetch=2) as client:
        while True:
            client.sample(DRAWS[env])
            count.value += DRAWS[env]


def clients(link: str, env: str, number: int, share: int, seconds: float) -> Reading:
    """Measure processes that write to a service or sample from a service."""
    context = multiprocessing.get_context("spawn")
    counts = [context.Value("q", 0, lock=False) for _ in range(number)]
    with service(env, number) as (uri, engine):
        target = _write if link == "write" else _read
        processes = [context.Process(target=target, args=(uri, env, share, count), daemon=True) for count in counts]
        for process in processes:
            process.start()
        while not all(count.value for count in counts):
            time.sleep(0.1)

        def pause() -> int:
            before = sum(count.value for count in counts)
            time.sleep(seconds)
            return sum(count.value for count in counts) - before

        reading = measure(pause, seconds, engine)
        for process in processes:
            process.kill()
            process.join()
        return reading


# Workers


def workers(link: str, env: str, number: int, share: int, seconds: float) -> Reading:
    """Measure workers that collect for this process, through Ray, or into a service."""
    from samplebatch import RolloutWorkers
    from samplebatch.rollout import RayOptions

    options: dict[str, Any] = {"num_workers": number, "seed": 0}
    if link == "ray":
        options |= {"backend": "ray", "ray_options": RayOptions(num_cpus=0)}

    def collect(buffer: Any, engine: int | None) -> Reading:
        with RolloutWorkers("random", ENVIRONMENTS[env], buffer, **options) as running:
            return measure(lambda: running.collect(n_step=number * share).n_collected_steps, seconds, engine)

    if link != "service":
        return collect(None, None)
    from samplebatch.service import ReplayClient

    with service(env, number) as (uri, engine), ReplayClient(uri, "replay") as client:
        return collect(client, engine)


def main() -> None:
    """Measure the requested links and print one row per measurement."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.scripts cluster_costs", description=__doc__)
    parser.formatter_class = argparse.RawDescriptionHelpFormatter
    parser.add_argument("links", nargs="+", choices=["process", "ray", "service", "write", "sample"])
    parser.add_argument("--env", nargs="+", choices=list(ENVIRONMENTS), default=list(ENVIRONMENTS))
    parser.add_argument("--workers", nargs="+", type=int, default=[1, 2, 4, 8], help="processes; 1, 2, 4, 8 by default")
    parser.add_argument("--share", type=int, help="steps per fragment; by default 500, and 50 for images")
    parser.add_argument("--seconds", type=float, default=3.0, help="minimum duration of each measurement")
    options = parser.parse_args()
    print(HEADER, flush=True)
    for link in options.links:
        run = clients if link in ("write", "sample") else workers
        for env in options.env:
            share = options.share or SHARES[env]
            for number in options.workers:
                print(run(link, env, number, share, options.seconds).row(link, env, number, share), flush=True)
