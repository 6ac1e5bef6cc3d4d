"""Child processes of the tests of regions."""

from __future__ import annotations

import os
from typing import Any

from samplebatch.transport.region import Region


def write_pid(region: Region) -> None:
    region.memory[:8] = os.getpid().to_bytes(8, "little")


def write_pid_to_what_arrives(queue: Any, done: Any) -> None:
    region = queue.get(timeout=30)
    write_pid(region)
    done.put(region)
    # Whoever passes a descriptor on must live until it is fetched.
    assert queue.get(timeout=30) == "fetched"


def try_to_write(region: Region, answer: Any) -> None:
    try:
        region.memory[0] = 1
    except TypeError as error:
        answer.send(f"{bytes(region.memory[:2])!r} {error}")
    answer.close()
