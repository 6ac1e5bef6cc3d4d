"""Child processes import the functions of these tests by name, so their folder must be on the path."""

import sys
from pathlib import Path

FOLDER = str(Path(__file__).parent)
if FOLDER not in sys.path:
    sys.path.insert(0, FOLDER)
