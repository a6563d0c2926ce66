"""Programs that break checkpointing, run through the product: right, refused in time, or wrong."""

from stasis.cases.command import EXIT_WRONG, run

__all__ = ["EXIT_WRONG", "run"]
