"""`python -m tamis` is the `tamis` command."""

from tamis.cli import main

main()
