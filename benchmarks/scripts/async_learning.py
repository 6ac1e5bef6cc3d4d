"""CPU time and wall time until CartPole is learned, by PPO, IMPALA and APPO, in one process and with workers.

    python -m benchmarks.scripts async_learning --seeds 3 --workers 2

Each run uses `samplebatch.learn` with the defaults of `samplebatch train` and one torch thread per process. The score
is the mean return of the last 20 training episodes. CPU time includes the learner and its workers.
"""

from __future__ import annotations

import argparse
import os
import sys
import time
from contextlib import ExitStack, redirect_stdout
from dataclasses import replace
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import numpy as np

from samplebatch.cli.training import make_trainer, read_training

SCORES = (195.0, 450.0)
LAST = 20
"""Number of training episodes whose returns are averaged."""
_TICKS = os.sysconf("SC_CLK_TCK")


def cpu_seconds(pids: list[int]) -> float:
    """Sum the CPU seconds of this process and of the running processes `pids`."""
    total = time.process_time()
    for pid in pids:
        fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
        total += (int(fields[11]) + int(fields[12])) / _TICKS
    return total


def learn(algorithm: str, workers: int, seed: int, steps: int) -> dict[str, Any]:
    """Train; return environment steps, CPU seconds and wall seconds at each score, and the rates of the run."""
    import torch

    torch.set_num_threads(1)
    torch.manual_seed(seed)
    np.random.seed(seed)
    flags = {"algorithm": algorithm, "source": "CartPole-v1", "steps": steps, "seed": seed, "workers": workers}
    training = read_training(None, flags, [f"num_envs={16 // max(workers, 1)}"])
    returns: list[float] = []
    reached: dict[float, tuple[int, float, float]] = {}
    with TemporaryDirectory() as folder, ExitStack() as stack:
        trainer = make_trainer(training, Path(folder), stack)
        source = trainer.params.training_collector
        trainer.params = replace(
            trainer.params, test_collector=None, save_best_fn=None, logger=None, checkpoint_dir=None, verbose=False,
            show_progress=False, save_checkpoint_fn=None,
        )  # fmt: skip
        collect = trainer._collect
        pids = getattr(source, "pids", [])
        cpu, start = cpu_seconds(pids), time.monotonic()

        def watch() -> Any:
            stats = collect()
            returns.extend(stats.returns.tolist())
            score = float(np.mean(returns[-LAST:])) if returns else 0.0
            for target in SCORES:
                if score >= target and target not in reached:
                    worker_seconds = cpu_seconds(getattr(source, "pids", [])) - cpu
                    reached[target] = trainer.counters.env_step, worker_seconds, time.monotonic() - start
            return stats

        trainer._collect = watch
        trainer.run()
        total = cpu_seconds(getattr(source, "pids", [])) - cpu
        elapsed = time.monotonic() - start
        stale = source.worker_stats.stale_steps if workers else 0
    env_steps = trainer.counters.env_step
    return {"reached": reached, "rate": env_steps / total, "speed": env_steps / elapsed, "stale": stale}


def main() -> None:
    """Run the algorithms alternately, and print table lines per algorithm."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.scripts async_learning")
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--workers", type=int, default=2)
    parser.add_argument("--steps", type=int, default=100_000)
    options = parser.parse_args()
    contestants = [(name, workers) for name in ("ppo", "impala", "appo") for workers in (0, options.workers)]
    runs: dict[tuple[str, int], list[dict[str, Any]]] = {contestant: [] for contestant in contestants}
    for seed in range(options.seeds):
        for contestant in contestants:
            with redirect_stdout(sys.stderr):
                runs[contestant].append(learn(*contestant, seed, options.steps))
    print("| algorithm | workers | return | seeds | env steps | CPU s | s | env steps per CPU s |")
    print("|---|---:|---:|---:|---:|---:|---:|---:|")
    for (name, workers), results in runs.items():
        for target in SCORES:
            points = [run["reached"][target] for run in results if target in run["reached"]]
            figures = ["-"] * 3
            if points:
                steps, cpu, elapsed = np.median(points, 0)
                figures = [f"{steps:.0f}", f"{cpu:.1f}", f"{elapsed:.1f}"]
            rate = f"{np.median([run['rate'] for run in results]):.0f}"
            cells = [name, str(workers), f"{target:.0f}", f"{len(points)}/{len(results)}", *figures, rate]
            print(f"| {' | '.join(cells)} |")


if __name__ == "__main__":
    main()
