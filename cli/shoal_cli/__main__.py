"""`python -m shoal_cli` is `shoal`."""

from shoal_cli import main

main()
