"""Tests of files share modules with those of buffers, which are on the path by name."""

import sys
from pathlib import Path

FOLDER = str(Path(__file__).parents[1] / "buffer")
if FOLDER not in sys.path:
    sys.path.insert(0, FOLDER)
