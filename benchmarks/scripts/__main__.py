"""Command line that runs a measurement script by name."""

from __future__ import annotations

import sys
from importlib import import_module
from pkgutil import iter_modules

from benchmarks import scripts

NAMES = sorted(module.name for module in iter_modules(scripts.__path__) if not module.name.startswith("_"))


def main() -> int:
    """Run the script that the first argument names, with the other arguments; without a name, list all scripts."""
    name = sys.argv[1] if len(sys.argv) > 1 else ""
    if name in NAMES:
        del sys.argv[1]
        return import_module(f"benchmarks.scripts.{name}").main() or 0
    for script in NAMES:
        summary = str(import_module(f"benchmarks.scripts.{script}").__doc__).partition("\n")[0]
        print(f"{script:16} {summary}")
    return 2 if name not in ("", "-h", "--help") else 0


if __name__ == "__main__":
    sys.exit(main())
