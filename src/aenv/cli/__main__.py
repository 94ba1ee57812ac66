"""``python -m aenv.cli``: the same command, where no entry point is installed."""

from aenv.cli.main import main

main()
