"""The processes in which damaged bytes are read: lack of memory or time, or a fault, may end them at any moment.

One imports what targets need, and forks another for each target. That takes one case per line on its standard input,
and answers each with one line; see `driver`.
"""

from __future__ import annotations

import importlib
import json
import os
import resource
import shutil
import socket
import sys
import tempfile
import traceback
from contextlib import suppress
from pathlib import Path
from random import Random
from typing import Any

from samplebatch.errors import CapacityError, SampleBatchError

ROOM_NBYTES = 2 << 30
"""Address space that reading may take beyond that of the process itself with its libraries."""


def main() -> None:
    """Fork a process for each requested target, and report how it ended."""
    requests = socket.socket(fileno=os.dup(0))
    while True:
        message, files, _, _ = socket.recv_fds(requests, 1 << 16, 3)
        if not message:
            return
        request = json.loads(message)
        if isinstance(request, int):
            _, status = os.waitpid(request, 0)
            requests.send(json.dumps(os.waitstatus_to_exitcode(status)).encode())
            continue
        target, folder = request
        with suppress(Exception):
            importlib.import_module(target.partition(":")[0])
        pid = os.fork()
        if not pid:
            requests.close()
            for number, file in enumerate(files):
                os.dup2(file, number)
            try:
                read_cases(target, folder)
            except BaseException:
                traceback.print_exc()
                os._exit(1)
            os._exit(0)
        for file in files:
            os.close(file)
        requests.send(json.dumps(pid).encode())


def read_cases(name: str, folder: str) -> None:
    answers = os.fdopen(os.dup(1), "w")
    # What libraries print is not an answer.
    os.dup2(2, 1)
    module, _, attribute = name.partition(":")
    target = getattr(importlib.import_module(module), attribute)
    # An earlier process, that died, may have left its own.
    shutil.rmtree(Path(folder) / "samples", ignore_errors=True)
    samples = target.samples(Path(folder) / "samples")
    for sample in samples:
        target.read(sample, _fresh(folder))
    _limit()
    print("ready", file=answers, flush=True)
    for line in sys.stdin:
        seed, case = json.loads(line)
        rng = Random(f"{seed}/{case}")
        mutated = target.mutate(rng.choice(samples), rng)
        position = _fresh(folder)
        print(json.dumps(_outcome(target, mutated, position)), file=answers, flush=True)
        shutil.rmtree(position)


def _outcome(target: Any, mutated: Any, folder: Path) -> tuple[str, str]:
    try:
        target.read(mutated, folder)
    except SampleBatchError as error:
        if not isinstance(error, CapacityError) and _lacked_memory(error):
            return "memory", _told(error)
        return "refused", f"{type(error).__name__}: {error}"
    except MemoryError as error:
        return "memory", _told(error)
    except Exception as error:
        return "raw", _told(error)
    return "read", ""


def _lacked_memory(error: BaseException | None) -> bool:
    while error is not None:
        if isinstance(error, MemoryError):
            return True
        error = error.__cause__ or error.__context__
    return False


def _told(error: BaseException) -> str:
    frames = traceback.extract_tb(error.__traceback__)
    ours = [frame for frame in frames if "/samplebatch/" in frame.filename] or frames
    where = " < ".join(f"{Path(frame.filename).name}:{frame.lineno}" for frame in ours[:-4:-1])
    return f"{type(error).__name__}: {str(error)[:200]} [{where}]"


def _fresh(folder: str) -> Path:
    return Path(tempfile.mkdtemp(dir=folder))


def _limit() -> None:
    used = int(Path("/proc/self/statm").read_text().split()[0]) * resource.getpagesize()
    resource.setrlimit(resource.RLIMIT_AS, (used + ROOM_NBYTES, used + ROOM_NBYTES))
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))


if __name__ == "__main__":
    main()
