"""Fuzz by hand: ``python -m tests.fuzz [--cases N] [--first CASE] [--seed S] [TARGET ...]``.

One case alone, with all of its error: ``--only CASE TARGET``.
"""

from __future__ import annotations

import argparse
import importlib
import os
import re
import sys
import tempfile
import time
from collections import Counter
from pathlib import Path
from random import Random

from tests.fuzz import driver
from tests.fuzz.targets import TARGETS


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m tests.fuzz")
    parser.add_argument("targets", nargs="*", help="names of formats, or module:attribute; all formats if none")
    parser.add_argument("--cases", type=int, default=driver.CASES, help="cases of each target")
    parser.add_argument("--first", type=int, default=0, metavar="CASE", help="number of the first case")
    parser.add_argument("--seed", type=int, default=driver.SEED)
    parser.add_argument("--only", type=int, metavar="CASE", help="read one case here, and show all of its error")
    options = parser.parse_args()
    targets = [TARGETS.get(name, name) for name in options.targets] or list(TARGETS.values())
    if options.only is not None:
        if os.environ.get("PYTHONHASHSEED") != "0":
            # As the children have it: samples with sets depend on it.
            os.execve(sys.executable, [*sys.orig_argv], {**os.environ, "PYTHONHASHSEED": "0"})
        _show(targets[0], options.seed, options.only)
        return
    for target in targets:
        start = time.monotonic()
        outcomes, faults = driver.fuzz(target, options.cases, options.seed, options.cases, options.first)
        print(f"{target}: {dict(outcomes)} in {time.monotonic() - start:.0f} s", flush=True)
        kinds = Counter(re.sub(r"^.* case \d+: |0x[0-9a-f]+|\d+(?![\d\]]*\]| <)", "", fault) for fault in faults)
        first = {re.sub(r"^.* case \d+: |0x[0-9a-f]+|\d+(?![\d\]]*\]| <)", "", fault): fault for fault in faults[::-1]}
        for kind, count in kinds.most_common(40):
            print(f"  {count} like {first[kind]}", flush=True)


def _show(name: str, seed: int, case: int) -> None:
    module, _, attribute = name.partition(":")
    target = getattr(importlib.import_module(module), attribute)
    folder = Path(tempfile.mkdtemp())
    rng = Random(f"{seed}/{case}")
    mutated = target.mutate(rng.choice(target.samples(folder / "samples")), rng)
    (folder / "case").mkdir()
    print(f"the samples lie in {folder}")
    target.read(mutated, folder / "case")


if __name__ == "__main__":
    main()
