"""Found through PYTHONPATH before any other module of this name, which it therefore runs too."""

import os
import sys


def _run_the_next_one(here: str) -> None:
    """The machine's or the user's own sitecustomize, which this file hides."""
    from importlib.machinery import PathFinder
    from importlib.util import module_from_spec

    spec = PathFinder.find_spec("sitecustomize", [path for path in sys.path if os.path.realpath(path or ".") != here])
    if spec and spec.loader:
        module = module_from_spec(spec)
        sys.modules["sitecustomize"] = module
        spec.loader.exec_module(module)


def _main() -> None:
    here = os.path.dirname(os.path.realpath(__file__))
    try:
        if os.environ.get("STASIS_COLLECTIVES"):
            sys.path.append(os.path.dirname(os.path.dirname(here)))
            from stasis_trainer import hook

            hook.install()
    finally:
        _run_the_next_one(here)


_main()
