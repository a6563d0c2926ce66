"""`stasis cases`: all cases of a folder, some side by side, here or in a cluster, as a table or as JSON."""

from __future__ import annotations

import json
import os
import queue
from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor, as_completed
from pathlib import Path
from typing import Literal

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn
from rich.table import Table
from rich.text import Text

from stasis.cases import cluster
from stasis.cases.cluster import ClusterRunner
from stasis.cases.runner import Result, run_case
from stasis.cases.spec import Case, read
from stasis.cases.verdict import Verdict

EXIT_WRONG = 10
WORKERS = 2
Runner = Callable[[Case, str, Callable[[str], None]], Result]  # of one case; told a name of its own, and whom to tell
STYLES = {Verdict.RIGHT: "green", Verdict.REFUSED: "cyan", Verdict.WRONG: "bold red", Verdict.NOT_SHOWN: "yellow"}


def run(
    directory: Path,
    pattern: str | None = None,
    output: Literal["table", "json"] = "table",
    image: str | None = None,
) -> int:
    """Run the cases of a folder and print what became of them. Returns 0, or EXIT_WRONG where one is wrong.

    `pattern`: only cases whose `name:variant` holds it. `image`: in the cluster, as trainers of TrainJobs of this
    image; on this machine where there is none. UsageError: not a folder of cases.
    """
    cases = read(directory, pattern)
    if image is None:
        unsorted = list(run_all(cases, run_case, WORKERS))
    else:
        with ClusterRunner(image, directory / "programs") as run_in_cluster:
            unsorted = list(run_all(cases, run_in_cluster, cluster.WORKERS))
    results = sorted(unsorted, key=lambda result: cases.index(result.case))
    if output == "json":
        counts = Counter(str(result.verdict) for result in results)
        found = {"counts": dict(counts), "cases": [result.as_dict() for result in results]}
        print(json.dumps(found, indent=1))
    else:
        _print(results)
    return EXIT_WRONG if any(result.verdict is Verdict.WRONG for result in results) else 0


def run_all(cases: list[Case], runner: Runner, workers: int) -> Iterator[Result]:
    console = Console(stderr=True)
    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn())
    progress = Progress(*columns, console=console, transient=True, disable=not console.is_terminal)
    slots: queue.SimpleQueue[int] = queue.SimpleQueue()
    with progress, ThreadPoolExecutor(workers, thread_name_prefix="case") as pool:
        overall = progress.add_task("cases", total=len(cases))
        lines = [progress.add_task("", total=None, start=False) for _ in range(workers)]
        for slot in range(workers):
            slots.put(slot)

        def one(case: Case) -> Result:
            slot = slots.get()
            try:
                name = f"case{os.getpid()}-{cases.index(case)}"
                return runner(case, name, lambda stage: progress.update(lines[slot], description=f"{case}: {stage}"))
            finally:
                slots.put(slot)
                progress.advance(overall)

        try:
            for done in as_completed(pool.submit(one, case) for case in cases):
                result = done.result()
                if result.verdict is Verdict.WRONG or not console.is_terminal:
                    why = f": {result.detail}" if result.verdict is Verdict.WRONG else ""
                    console.print(
                        f"{result.case}: {result.verdict}{why}", highlight=False, markup=False, soft_wrap=True
                    )
                yield result
        except BaseException:
            pool.shutdown(cancel_futures=True)
            raise


def _print(results: Iterable[Result]) -> None:
    results = list(results)
    console = Console()
    table = Table(box=None, pad_edge=False, header_style="bold")
    for heading in ("case", "variant", "verdict"):
        table.add_column(heading, no_wrap=True)
    for heading in ("suspend s", "resume s"):
        table.add_column(heading, justify="right", no_wrap=True)
    table.add_column("what was found", overflow="fold")
    for result in results:
        if result.verdict is Verdict.NOT_SHOWN:
            continue
        table.add_row(
            result.case.name,
            result.case.variant,
            Text(str(result.verdict), STYLES[result.verdict]),
            *(f"{seconds:.2f}" if seconds else "-" for seconds in (result.suspend, result.resume)),
            Text(result.detail),
        )
    console.print(table)
    for result in results:
        if result.verdict is Verdict.NOT_SHOWN:
            console.print(f"not shown here: {result.case}: {result.detail}", style="yellow", highlight=False)
    counts = Counter(result.verdict for result in results)
    console.print(", ".join(f"{counts[verdict]} {verdict}" for verdict in Verdict if counts[verdict]), style="bold")
