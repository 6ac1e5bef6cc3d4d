"""Signal handlers run while a `ReplayClient` waits for its service, and the client continues after an interrupt."""

from __future__ import annotations

import os
import subprocess
import sys

import pytest

from samplebatch import SampleBatch
from samplebatch.service import RateLimiter, ReplayServer, ReplayTable

CHILD = """
import signal, sys
from samplebatch import SampleBatch
from samplebatch.service import ReplayClient

class Alarm(Exception):
    pass

def interrupt(signum, frame):
    raise Alarm

signal.signal(signal.SIGALRM, interrupt)
with ReplayClient(sys.argv[1], sys.argv[2], prefetch=int(sys.argv[3])) as client:
    signal.setitimer(signal.ITIMER_REAL, 1.0)
    try:
        {waiting}
    except Alarm:
        print("interrupted", flush=True)
    sys.stdin.readline()
    {after}
"""


def start(server: ReplayServer, table: str, waiting: str, after: str, prefetch: int = 0) -> subprocess.Popen[str]:
    script = CHILD.format(waiting=waiting, after=after)
    return subprocess.Popen(
        [sys.executable, "-c", script, server.uri, table, str(prefetch)],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
        env=os.environ,
    )


@pytest.mark.parametrize("prefetch", [0, 2])
def test_an_interrupted_sample_is_returned_by_the_next_call(prefetch: int) -> None:
    table = ReplayTable("replay", capacity=100, limiter=RateLimiter(3))
    after = "print(sorted(set(client.sample(4).batch.obs.tolist())))"
    with ReplayServer([table]) as server, start(server, "replay", "client.sample(4)", after, prefetch) as child:
        assert child.stdout is not None
        assert child.stdout.readline() == "interrupted\n"
        steps = [1, 1, 1]
        table.extend(SampleBatch(obs=steps, actions=steps, rewards=[0.0] * 3, terminateds=[False] * 3))
        assert child.communicate("\n", timeout=60)[0] == "[1]\n"
    assert child.returncode == 0


def test_fragments_of_an_interrupted_client_are_inserted_once() -> None:
    table = ReplayTable("queue", kind="queue", capacity=2)
    waiting = "[client.extend(SampleBatch(obs=[i])) for i in range(20)]"
    after = "client.flush(); print(client.written.fragments, client.written.sent)"
    numbers = []
    with ReplayServer([table]) as server, start(server, "queue", waiting, after) as child:
        assert child.stdout is not None
        assert child.stdin is not None
        assert child.stdout.readline() == "interrupted\n"
        child.stdin.write("\n")
        child.stdin.flush()
        while child.poll() is None or len(table):
            if len(table):
                numbers.append(int(table.sample(1).batch["obs"][0]))
        fragments, sent = map(int, child.stdout.read().split())
    assert child.returncode == 0
    # A fragment that had not been sent when the call was interrupted is the caller's to send again.
    assert numbers == list(range(sent))
    assert fragments == sent
