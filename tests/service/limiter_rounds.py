"""Random settings of tables, under writers and readers that never stop: whether both sides keep going.

By hand, for as many settings as one likes: ``python -m tests.service.limiter_rounds 2000 SEED``.
"""

from __future__ import annotations

import sys
import threading
import time
from collections import Counter
from random import Random
from typing import Any

from samplebatch.errors import ArgumentError, TableClosedError
from samplebatch.service import RateLimiter, ReplayTable
from tests.service.table_rows import episode, fragment

STALL_S = 10.0
"""Seconds without an insert and without a sample after which a table stands still."""

Settings = dict[str, Any]


def draw_settings(rng: Random) -> Settings:
    """Draw the arguments of a table and its limiter; most are valid."""
    unit = rng.choice(["steps", "fragments", "fragments"])
    kinds = ["uniform", "prioritized"] if unit == "steps" else ["uniform", "prioritized", "fifo", "lifo", "key"]
    capacity = rng.randrange(1, 13)
    ratio = rng.choice([None, 0.25, 0.5, 1.0, 1.0, 2.0, 3.0, 4.0])
    removers = ["none", "none", "fifo", "lifo", "uniform", "lowest_priority", "most_sampled"]
    return {
        "kind": rng.choice(kinds),
        "items": unit,
        "capacity": capacity,
        "remover": None if unit == "steps" or rng.random() < 0.2 else rng.choice(removers),
        "max_times_sampled": rng.choice([0, 1, 1, 2, 3, 4]),
        "min_size": rng.randrange(1, capacity + 1),
        "samples_per_insert": ratio,
        "error_buffer": None if ratio is None or rng.random() < 0.5 else max(1.0, ratio) + rng.choice([0.0, 0.5, 2, 9]),
        "seed": rng.randrange(1 << 20),
        # Not of the table: how clients use it.
        "writers": rng.randrange(1, 3),
        "readers": rng.randrange(1, 3),
        "batch_size": rng.randrange(1, 2 * capacity + 1),
        "rows": rng.randrange(1, capacity + 1),
    }


def settings_of(rounds: int, seed: int) -> list[Settings]:
    """List the settings of some rounds."""
    return [draw_settings(Random(f"{seed}/{number}")) for number in range(rounds)]


def make_table(settings: Settings) -> ReplayTable:
    """Create a table from settings.

    Raises
    ------
    ArgumentError
        If the settings are invalid.
    """
    limits = {name: settings[name] for name in ("min_size", "samples_per_insert", "error_buffer")}
    arguments = {name: settings[name] for name in ("kind", "items", "capacity", "remover", "max_times_sampled", "seed")}
    return ReplayTable("t", limiter=RateLimiter(**limits), **arguments)


def run(settings: Settings, quota: int = 60) -> str:
    """Run writers and readers until both have completed their quota.

    Returns
    -------
    Outcome: `"refused"`, `"done"`, or a name of the blocked side.
    """
    try:
        table = make_table(settings)
        table._request(settings["batch_size"], None, None, {"key": "0"} if table.kind == "key" else {})
    except ArgumentError:
        return "refused"
    done = Counter[str]()
    rng = Random(settings["seed"])

    def write(writer: int) -> None:
        for number in range(10**9):
            if table.unit == "steps":
                table.extend(episode(number, range(settings["rows"])), writer=str(writer))
            else:
                by_priority = "lowest_priority" in (table.remover,) or table.kind == "prioritized"
                table.extend(
                    fragment(number),
                    writer=str(writer),
                    keys=str(number % table.capacity) if table.kind == "key" else None,
                    priorities=rng.choice([0.5, 1.0, 7.0]) if by_priority else None,
                )
            done["inserts"] += 1

    def read() -> None:
        for number in range(10**9):
            stored = getattr(table._items, "_by_key", ())
            keys = [key for key in map(str, range(table.capacity)) if key in stored] or ["0"]
            options = {"key": keys[number % len(keys)]} if table.kind == "key" else {}
            table.sample(settings["batch_size"], **options)
            done["samples"] += 1

    def guarded(call: Any, *arguments: Any) -> None:
        try:
            call(*arguments)
        except TableClosedError:
            pass
        except Exception as error:
            done[repr(error)] += 1

    threads = [threading.Thread(target=guarded, args=(write, i), daemon=True) for i in range(settings["writers"])]
    threads += [threading.Thread(target=guarded, args=(read,), daemon=True) for _ in range(settings["readers"])]
    for thread in threads:
        thread.start()
    # A table that is filled once, and never freed, is read for ever.
    sides = ["samples"] if table.remover == "none" and not settings["max_times_sampled"] else ["inserts", "samples"]
    last, since = dict(done), time.monotonic()
    while (behind := [side for side in sides if done[side] < quota]) and time.monotonic() < since + STALL_S:
        if set(done) - {"inserts", "samples"}:
            break
        time.sleep(0.002)
        if any(done[side] != last.get(side, 0) for side in behind):
            last, since = dict(done), time.monotonic()
    contained = [item["why"] for item in table.info()["held_back"]]
    table.close()
    for thread in threads:
        thread.join(30)
    errors = set(done) - {"inserts", "samples"}
    return f"failed: {errors}" if errors else f"{' and '.join(behind)} stand still: {contained}" if behind else "done"


def main(rounds: int, seed: int) -> int:
    """Run rounds, print the settings that deadlock, and return their number."""
    outcomes, stalled = Counter[str](), 0
    for number, settings in enumerate(settings_of(rounds, seed)):
        outcome = run(settings)
        outcomes[outcome.partition(":")[0]] += 1
        if outcome not in ("refused", "done"):
            stalled += 1
            print(number, outcome, settings, flush=True)
    print(dict(outcomes))
    return stalled


if __name__ == "__main__":
    sys.exit(main(int(sys.argv[1]), int(sys.argv[2]) if len(sys.argv) > 2 else 0) > 0)
