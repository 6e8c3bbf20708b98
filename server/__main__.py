"""`python -m longtake.server`: the command line."""

from longtake.server.cli import main

main()
