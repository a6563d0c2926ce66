"""`python -m stasis`."""

from stasis.cli import main

main()
