"""Tests import what they share, and child processes their functions, by name, so this folder must be on the path."""

import sys
from pathlib import Path

FOLDER = str(Path(__file__).parent)
if FOLDER not in sys.path:
    sys.path.insert(0, FOLDER)
