"""`python tests/package_metadata.py dist/*.whl` checks what a wheel states about itself."""

from __future__ import annotations

import re
import sys
import zipfile
from email import message_from_bytes
from pathlib import Path


def check(wheel: Path) -> str:
    """Return a summary of a wheel's metadata; raise AssertionError for a link that works in the repository only."""
    with zipfile.ZipFile(wheel) as archive:
        (name,) = [name for name in archive.namelist() if name.endswith(".dist-info/METADATA")]
        metadata = message_from_bytes(archive.read(name))
        outside = [name for name in archive.namelist() if not name.startswith("samplebatch")]
    assert not outside, f"the wheel must contain the package alone, got {outside[:3]}"
    description = metadata.get_payload()
    assert isinstance(description, str)
    assert description.startswith("# samplebatch")
    relative = re.findall(r"\]\((?!https?:|#)[^)]*\)", description)
    assert not relative, f"links of the description must be absolute, got {relative[:3]}"
    required = [line for line in metadata.get_all("Requires-Dist", []) if "extra ==" not in line]
    assert not [line for line in required if line.startswith("torch")], "torch must be an extra"
    pythons = [line.rpartition(" ")[2] for line in metadata.get_all("Classifier", []) if "Python :: 3." in line]
    assert pythons == ["3.11", "3.12", "3.13"]
    return f"{wheel.name}: requires {', '.join(required)}; {len(metadata.get_all('Project-URL', []))} addresses"


if __name__ == "__main__":
    print(check(Path(sys.argv[1])))
