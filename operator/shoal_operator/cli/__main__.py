"""`python -m shoal_operator.cli` is `shoal`."""

from shoal_operator.cli import main

main()
