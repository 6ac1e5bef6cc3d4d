"""Ctrl-C interrupts a client that waits for its service; the client continues, and no row is lost or stored twice."""

from __future__ import annotations

import gc
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from samplebatch import SampleBatch
from samplebatch.service import RateLimiter, ReplayClient, ReplayServer, ReplayTable, RowClient, RowTable
from samplebatch.service.answers import InterruptibleCalls

pytestmark = pytest.mark.skipif(os.name != "posix", reason="needs POSIX signals")

ROOT = Path(__file__).parents[2]
CHILD = """
import signal, sys
import numpy as np
from samplebatch import SampleBatch
from samplebatch.service import ReplayClient

# The process that starts the tests may ignore the signal.
signal.signal(signal.SIGINT, signal.default_int_handler)
with ReplayClient(sys.argv[1], sys.argv[2], prefetch=int(sys.argv[3])) as client:
    {before}
    try:
        print("waits", flush=True)
        {waiting}
    except KeyboardInterrupt:
        print("interrupted", flush=True)
    sys.stdin.readline()
    {after}
"""


@contextmanager
def child_of(
    server: ReplayServer, table: str, waiting: str, after: str, *, before: str = "pass", prefetch: int = 0
) -> Iterator[Any]:
    """Run a client in a process that prints "waits" before it waits, and "interrupted" after an interrupt."""
    script = CHILD.format(before=before, waiting=waiting, after=after)
    process = subprocess.Popen(
        [sys.executable, "-c", script, server.uri, table, str(prefetch)],
        stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, env={**os.environ, "PYTHONPATH": str(ROOT)},
    )  # fmt: skip
    try:
        yield process
    finally:
        process.kill()
        process.communicate()


def interrupt(process: Any, table: Any) -> None:
    """Press Ctrl-C while limits of the table block a request of the process."""
    assert process.stdout.readline() == "waits\n"
    wait_until(lambda: table.info()["held_back"])
    time.sleep(0.3)
    process.send_signal(signal.SIGINT)
    assert process.stdout.readline() == "interrupted\n"


def wait_until(condition: Any, timeout_s: float = 60.0) -> None:
    deadline = time.monotonic() + timeout_s
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.01)


def steps(values: list[int]) -> SampleBatch:
    zeros = [0] * len(values)
    return SampleBatch(obs=values, actions=zeros, rewards=[0.0] * len(values), terminateds=[False] * len(values))


@pytest.mark.parametrize("prefetch", [0, 2])
def test_an_interrupted_sample_is_returned_by_the_next_call(prefetch: int) -> None:
    table = ReplayTable("replay", capacity=100, limiter=RateLimiter(3))
    after = "print(sorted(set(client.sample(4).batch.obs.tolist())))"
    with (
        ReplayServer([table]) as server,
        child_of(server, "replay", "client.sample(4)", after, prefetch=prefetch) as child,
    ):
        interrupt(child, table)
        table.extend(steps([1, 1, 1]))
        assert child.communicate("\n", timeout=60)[0] == "[1]\n"
        assert child.returncode == 0


def test_fragments_of_a_queue_are_received_once_after_interrupts() -> None:
    table = ReplayTable("queue", kind="queue", capacity=100)
    after = "print([int(client.sample(1).batch['obs'][0]) for _ in range(20)])"
    with ReplayServer([table]) as server, child_of(server, "queue", "client.sample(1)", after) as child:
        interrupt(child, table)
        for number in range(20):
            table.extend(SampleBatch(obs=[number]))
        assert child.communicate("\n", timeout=60)[0] == f"{list(range(20))}\n"
        assert child.returncode == 0


def test_a_client_inserts_and_updates_priorities_after_an_interrupted_sample() -> None:
    table = ReplayTable("prio", kind="prioritized", capacity=100, limiter=RateLimiter(3))
    rows = "SampleBatch(obs=[1, 2, 3], actions=[0, 0, 0], rewards=[0.0] * 3, terminateds=[True] * 3)"
    after = f"""client.update_weight([], [])
    client.extend({rows})
    client.flush()
    batch, indices = client.sample(4)
    client.update_weight(indices, np.full(4, 9.0), generation=batch.generation)
    client.flush()
    print(client.info()["size"])
    """
    with ReplayServer([table]) as server, child_of(server, "prio", "client.sample(4)", after) as child:
        interrupt(child, table)
        assert child.communicate("\n", timeout=60)[0] == "3\n"
        assert child.returncode == 0


@pytest.mark.parametrize("elements", [1, 1_000_000])
@pytest.mark.parametrize("call", ["extend", "flush"])
def test_fragments_of_an_interrupted_client_are_inserted_once(call: str, elements: int) -> None:
    """Writing a large fragment also waits for the service."""
    table = ReplayTable("queue", kind="queue", capacity=2)
    inserts = f"[client.extend(SampleBatch(obs=np.full((1, {elements}), i, np.uint8))) for i in range(%s)]"
    # Five fragments are fewer than a client may have in flight.
    waiting = inserts % 20 if call == "extend" else f"{inserts % 5}; client.flush()"
    after = f"""client.extend(SampleBatch(obs=np.full((1, {elements}), 99, np.uint8)))
    client.flush()
    print(client.written.fragments, client.written.sent)
    """
    numbers = []
    with ReplayServer([table]) as server, child_of(server, "queue", waiting, after) as child:
        interrupt(child, table)
        child.stdin.write("\n")
        child.stdin.flush()
        while child.poll() is None or len(table):
            if len(table):
                numbers.append(int(table.sample(1).batch["obs"][0, 0]))
        fragments, sent = map(int, child.stdout.read().split())
        assert child.returncode == 0
    # A fragment that had not been sent when the call was interrupted is the caller's to send again.
    assert numbers == [*range(sent - 1), 99]
    assert fragments == sent


WRITER = """
import random, signal, sys
from samplebatch import SampleBatch
from samplebatch.service import ReplayClient

class Alarm(Exception):
    pass

def interrupt(signum, frame):
    raise Alarm

signal.signal(signal.SIGALRM, interrupt)
generator = random.Random(int(sys.argv[2]))
returned = []
with ReplayClient(sys.argv[1], "queue", max_unacknowledged=4) as client:
    for number in range(400):
        try:
            signal.setitimer(signal.ITIMER_REAL, generator.uniform(1e-6, 2e-3))
            client.extend(SampleBatch(obs=[number]))
            if number % 3 == 0:
                returned.append(number)
                client.flush()
            else:
                returned.append(number)
        except Alarm:
            pass
        finally:
            signal.setitimer(signal.ITIMER_REAL, 0.0)
    client.flush()
print(*returned)
"""


@pytest.mark.parametrize("seed", range(3))
def test_rows_are_inserted_once_by_a_writer_interrupted_at_random(seed: int) -> None:
    table = ReplayTable("queue", kind="queue", capacity=8)
    numbers: list[int] = []
    with ReplayServer([table]) as server:
        child = subprocess.Popen(
            [sys.executable, "-c", WRITER, server.uri, str(seed)],
            stdout=subprocess.PIPE, text=True, env={**os.environ, "PYTHONPATH": str(ROOT)},
        )  # fmt: skip
        try:
            while child.poll() is None or len(table):
                if len(table):
                    numbers.append(int(table.sample(1).batch["obs"][0]))
            returned = [int(number) for number in child.communicate()[0].split()]
        finally:
            child.kill()
            child.wait()
    assert child.returncode == 0
    assert numbers == sorted(set(numbers))
    assert set(returned) <= set(numbers)


SERVE = """
import time
from samplebatch.service import RateLimiter, ReplayServer, ReplayTable

with ReplayServer([ReplayTable("blocked", capacity=10, limiter=RateLimiter(5)), ReplayTable("replay", capacity=10)]) as server:
    print(server.uri, flush=True)
    time.sleep(600)
"""  # noqa: E501
LOSE = """
import resource, sys, threading, time
import numpy as np
from samplebatch import SampleBatch
from samplebatch.errors import ServiceError
from samplebatch.service import ReplayClient

client = ReplayClient(sys.argv[1], sys.argv[2], reconnect_s=0.5, prefetch=int(sys.argv[3]))
if sys.argv[2] == "replay":
    client.extend(SampleBatch(obs=[1], actions=[0], rewards=[0.0], terminateds=[True]))
    client.sample(1)
    print("waits", flush=True)
    sys.stdin.readline()
    time.sleep(0.5)
else:
    print("waits", flush=True)
try:
    while True:
        client.sample(1)
except ServiceError as error:
    print(error, flush=True)
cpu, resident = time.process_time(), resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
time.sleep(1.0)
cpu, resident = time.process_time() - cpu, resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - resident
client._end()
deadline = time.monotonic() + 20
while any(thread.name == "samplebatch-read" for thread in threading.enumerate()) and time.monotonic() < deadline:
    time.sleep(0.01)
print(cpu, resident, [thread.name for thread in threading.enumerate()])
"""


@pytest.mark.parametrize("prefetch", [0, 2])
@pytest.mark.parametrize("table", ["blocked", "replay"])
def test_a_killed_service_raises_an_error_in_waiting_clients(table: str, prefetch: int) -> None:
    """The client waits for a sample, or has an idle session, when its service is killed."""
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}
    server = subprocess.Popen([sys.executable, "-c", SERVE], stdout=subprocess.PIPE, text=True, env=environment)
    client = None
    try:
        assert server.stdout is not None
        uri = server.stdout.readline().strip()
        client = subprocess.Popen(
            [sys.executable, "-c", LOSE, uri, table, str(prefetch)],
            stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, env=environment,
        )  # fmt: skip
        assert client.stdout is not None
        assert client.stdout.readline() == "waits\n"
        if table == "blocked":
            with ReplayClient(uri, "blocked") as observer:
                wait_until(lambda: observer.info()["held_back"])
        server.kill()
        message, figures = client.communicate("\n", timeout=60)[0].splitlines()
    finally:
        for process in (server, client):
            if process is not None:
                process.kill()
                process.communicate()
    assert "must be reachable, got no answer for" in message
    cpu_s, resident_kb, threads = figures.split(maxsplit=2)
    # One thread that repeats an error uses an entire second, and memory without end.
    assert float(cpu_s) < 0.5
    assert int(resident_kb) < 50_000
    assert "samplebatch-read" not in threads


def test_threads_of_a_deleted_client_end() -> None:
    table, rows = ReplayTable("replay", capacity=10), RowTable("rows", 10)
    before = set(threading.enumerate())

    def reading() -> list[str]:
        ours = set(threading.enumerate()) - before
        return [thread.name for thread in ours if thread.name in ("samplebatch-read", "samplebatch-call")]

    with ReplayServer([table, rows]) as server:
        client, row_client = ReplayClient(server.uri, "replay", prefetch=2), RowClient(server.uri, "rows")
        client.extend(steps([1, 2]))
        client.sample(2)
        row_client.put([1], {"x": np.zeros((1, 100_000))})
        row_client.take(1)
        assert reading()
        del client, row_client
        gc.collect()
        wait_until(lambda: not reading())


def test_an_interrupted_call_is_not_resumed_by_another_thread() -> None:
    calls, names = InterruptibleCalls(), []
    thread = threading.Thread(target=lambda: calls.call(lambda: names.append(threading.current_thread())))
    thread.start()
    thread.join()
    assert names == [thread]


def test_an_error_of_a_call_is_raised_by_the_caller() -> None:
    calls = InterruptibleCalls()
    for _ in range(2):
        with pytest.raises(ZeroDivisionError):
            calls.call(lambda: 1 // 0)


@pytest.mark.parametrize(
    "waiting",
    [
        "client.info()",
        "client.extend(SampleBatch(obs=[1], actions=[0], rewards=[0.0], terminateds=[True])); client.flush()",
        "client.sample(1)",
        "client.update_weight([0], [1.0])",
    ],
)
def test_a_call_to_a_stopped_service_is_interrupted(waiting: str) -> None:
    """The first call of each kind, which opens a stream. The client continues when the service does."""
    serve = subprocess.Popen(
        [sys.executable, "-c", SERVE], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True,
        env={**os.environ, "PYTHONPATH": str(ROOT)},
    )  # fmt: skip
    try:
        script = CHILD.format(
            before="client.info()", waiting=waiting, after="client.flush(); print(client.info()['inserted'])"
        )
        script = script.replace('print("waits", flush=True)', 'print("waits", flush=True); sys.stdin.readline()')
        arguments = [serve.stdout.readline().strip(), "replay", "0"]
        client = subprocess.Popen(
            [sys.executable, "-c", script, *arguments],
            stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, env={**os.environ, "PYTHONPATH": str(ROOT)},
        )  # fmt: skip
        try:
            assert client.stdout.readline() == "waits\n"
            serve.send_signal(signal.SIGSTOP)
            time.sleep(0.2)
            client.stdin.write("\n")
            client.stdin.flush()
            time.sleep(0.5)
            client.send_signal(signal.SIGINT)
            assert client.stdout.readline() == "interrupted\n"
            serve.send_signal(signal.SIGCONT)
            out, _ = client.communicate("\n", timeout=60)
            assert out == ("1\n" if "extend" in waiting else "0\n")
            assert client.returncode == 0
        finally:
            client.kill()
            client.communicate()
    finally:
        serve.kill()
        serve.communicate()
