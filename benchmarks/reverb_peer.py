"""Reverb as a contestant of `bench_service`, in a separate interpreter because its TensorFlow requires an older NumPy.

The environment variable `REVERB_PYTHON` is the path of the interpreter, which runs this file as a program. The program
starts a Reverb server, executes a task once per line of standard input, and prints the duration in seconds.
"""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path
from time import perf_counter
from typing import Any

if __name__ == "__main__":
    sys.path.insert(0, str(Path(__file__).parents[1]))

from benchmarks.served import EPISODE, KINDS, SIZES, STEPS, STORED, steps


class ReverbSession:
    """Process of Reverb's interpreter for one task; a call executes the task and returns its duration in seconds."""

    def __init__(self, work: str, kind: str) -> None:
        # Standard error contains only log messages.
        self._process = subprocess.Popen(
            [python(), __file__, work, kind], stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL,
            text=True,
        )  # fmt: skip
        self()

    def __call__(self) -> float:
        stdin, stdout = self._process.stdin, self._process.stdout
        assert stdin is not None
        assert stdout is not None
        stdin.write("go\n")
        stdin.flush()
        return float(stdout.readline())

    def __del__(self) -> None:
        self._process.kill()
        self._process.communicate()


def python() -> str:
    """Return the path of Reverb's interpreter.

    Raises
    ------
    ImportError
        If `REVERB_PYTHON` is not set.
    """
    interpreter = os.environ.get("REVERB_PYTHON")
    if interpreter is None:
        raise ImportError("REVERB_PYTHON must be the path of a Python interpreter that can import reverb")
    return interpreter


def _serve(kind: str) -> None:
    """Serve a Reverb table until standard input is closed."""
    import reverb
    import tensorflow as tf

    length = EPISODE if kind == "sequences" else 1
    signature = {
        name: tf.TensorSpec([length, *values.shape[1:]] if length > 1 else values.shape[1:], values.dtype, name)
        for name, values in steps(kind, 1).items()
    }
    table = reverb.Table(
        kind, reverb.selectors.Uniform(), reverb.selectors.Fifo(), STORED[kind], reverb.rate_limiters.MinSize(1),
        signature=signature,
    )  # fmt: skip
    server = reverb.Server([table], port=None)
    print(server.port, flush=True)
    sys.stdin.read()


def _tasks(kind: str, port: int) -> dict[str, Any]:
    """Connect to a Reverb server, and return the tasks by name."""
    import reverb

    length = EPISODE if kind == "sequences" else 1
    client = reverb.Client(f"localhost:{port}")
    writer = client.trajectory_writer(num_keep_alive_refs=length)

    def insert(rows: Any) -> None:
        count = len(rows["rewards"])
        for number in range(count):
            writer.append({name: values[number] for name, values in rows.items()})
            if length == 1:
                item = {name: column[-1] for name, column in writer.history.items()}
            elif number % EPISODE == EPISODE - 1:
                item = {name: column[-EPISODE:] for name, column in writer.history.items()}
            else:
                continue
            writer.create_item(kind, 1.0, item)
        writer.flush()

    insert(steps(kind, min(STORED[kind], 4 * STEPS[kind])))
    dataset = reverb.TrajectoryDataset.from_table_signature(
        client.server_address, kind, max_in_flight_samples_per_worker=2 * SIZES[kind]
    )
    samples = iter(dataset.batch(SIZES[kind]).as_numpy_iterator())
    rows = steps(kind, STEPS[kind])

    def p99() -> float:
        seconds = []
        for _ in range(100):
            start = perf_counter()
            insert(rows)
            seconds.append(perf_counter() - start)
        return sorted(seconds)[98]

    return {
        "stream": lambda: [next(samples) for _ in range(16)],
        "insert": lambda: [insert(rows) for _ in range(8)],
        "p99": p99,
    }


def main() -> None:
    """Execute the task for each line of standard input."""
    work, kind = sys.argv[1:]
    assert kind in KINDS
    if work == "serve":
        _serve(kind)
        return
    server = subprocess.Popen(
        [sys.executable, __file__, "serve", kind], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    )
    assert server.stdout is not None
    tasks = _tasks(kind, int(server.stdout.readline()))
    for _ in sys.stdin:
        start = perf_counter()
        result = tasks[work]()
        print(result if work == "p99" else perf_counter() - start, flush=True)


if __name__ == "__main__":
    main()
