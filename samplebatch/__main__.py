"""Entry point of `python -m samplebatch`, which runs the same program as the command `samplebatch`."""

from samplebatch.cli.application import main

main()
