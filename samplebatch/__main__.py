"""`python -m samplebatch`, which is the command `samplebatch`."""

from samplebatch.cli.application import main

main()
