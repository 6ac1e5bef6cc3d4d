"""Entry point of `python -m samplebatch.cli`, which is equivalent to the command `samplebatch`."""

from samplebatch.cli.application import main

main()
