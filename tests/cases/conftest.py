"""Cases run side by side: all that a session has chosen begin with its first test, each test waits for its own."""

from __future__ import annotations

import os
import subprocess
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path

import pytest

from stasis.cases.command import WORKERS
from stasis.cases.limits import has_resource_capability
from stasis.cases.runner import Result, run_case
from stasis.cases.spec import Case

REPOSITORY = Path(__file__).parents[2]


@pytest.fixture(scope="session")
def shim() -> None:
    """Where root lacks CAP_SYS_RESOURCE, what stands in for it in tests."""
    if not has_resource_capability() and not os.environ.get("STASIS_CRIU_PRELOAD"):
        made = subprocess.run([REPOSITORY / "tools/prlimit_shim.sh"], capture_output=True, text=True, check=True)
        os.environ["STASIS_CRIU_PRELOAD"] = made.stdout.strip()


@pytest.fixture(scope="session")
def result(request: pytest.FixtureRequest, shim: None) -> Iterator[Callable[[Case], Result]]:
    """result(case): what became of it."""
    items = [item for item in request.session.items if isinstance(item, pytest.Function)]
    asking = [
        item for item in items if "result" in item.fixturenames and item.path.is_relative_to(Path(__file__).parent)
    ]
    cases: list[Case] = [item.callspec.params["case"] for item in asking]
    with ThreadPoolExecutor(WORKERS, thread_name_prefix="case") as pool:
        under_way: dict[tuple[Path, str], Future[Result]] = {}
        for number, case in enumerate(cases):
            under_way[case.program, case.variant] = pool.submit(run_case, case, f"test{os.getpid()}-{number}")
        yield lambda case: under_way[case.program, case.variant].result()
        pool.shutdown(cancel_futures=True)
