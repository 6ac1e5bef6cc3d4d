"""The `samplebatch` command."""

from samplebatch.cli.application import application as application
from samplebatch.cli.application import main as main
