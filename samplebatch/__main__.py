"""Entry point of `python -m samplebatch`, the same program as the command `samplebatch`."""

from samplebatch.cli.application import main

main()
