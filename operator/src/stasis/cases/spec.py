"""What a folder of cases says: programs, their variants, the world that each wants, what may be refused.

A program is a file `programs/*.py`. Its line `# CASE {json}` holds keys for all its variants and `variants`, a name
with more keys each. It prints `step I CRC` for each step, CRC being the CRC-32 chain over the step numbers, checks its
own state, exits 3 with `CORRUPT why` where that is wrong and 0 after `done`.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from dataclasses import dataclass, field, fields
from pathlib import Path
from typing import Any

from stasis.errors import UsageError

# Keys that steer a runner of plain CRIU: here the product decides.
STEERING = frozenset(
    "dump restore carry hardlinks image_hook after_restore restore_wrap run_wrap no_base nsenter cycles "
    "periodic".split()
)
PROGRAMS, EMPTYDIR, VOLUME = "/case", "/ed", "/pvc"  # where a program finds them
ENVIRONMENT = {
    "HOME": "/tmp",
    "USE_LIBUV": "0",
    "OMP_NUM_THREADS": "1",
    "PYTHONUNBUFFERED": "1",
    "PYTHONDONTWRITEBYTECODE": "1",
}
CHOICES = {"caps": ("default", "none", "all"), "server": ("same", "gone", "blackhole")}
LINE = "# CASE "


@dataclass(frozen=True)
class World:
    """The keys of a variant that describe the world around the program. Sizes as mount(8) takes them, times in s."""

    env: Mapping[str, str] = field(default_factory=dict)
    args: tuple[str, ...] = ()
    uid: int = 0
    caps: str = "default"
    seccomp: bool = False  # a runtime's profile
    hostname2: str | None = None  # of the new container, where it is another one
    ip2: bool = False  # the new container has another address
    server: str = "same"  # what has become of the server outside: same, gone, blackhole (silent)
    gap: float = 1.0  # between suspend and resume
    shm: str = "512m"
    shm2: str | None = None  # of the new container
    pvc_grow: bool = False  # somebody appends to /pvc/data meanwhile
    memlock: int | None = None  # bytes
    cgroup_rw: bool = False
    hugepages: int = 0  # of the machine
    plain_python: bool = False  # needs no package; the interpreter is the same one here
    log: str | None = None  # the steps are in this file (emptydir/NAME, shm/NAME), not on stdout
    at: int = 5  # suspended once so many steps are behind it
    timeout: float = 40.0  # for the steps before the suspend, and for those after the resume


@dataclass(frozen=True)
class Case:
    """One variant of a program. `refusable`: a refusal in time is right, not only a survival."""

    program: Path
    variant: str
    world: World
    refusable: bool = True

    @property
    def name(self) -> str:
        return self.program.stem.removeprefix("k_")

    def __str__(self) -> str:
        return f"{self.name}:{self.variant}"


def read(folder: Path, pattern: str | None = None) -> list[Case]:
    """All cases of a folder, or those whose `name:variant` holds `pattern`. UsageError: not a folder of cases."""
    programs = sorted((folder / "programs").glob("*.py"))
    if not programs:
        raise UsageError(f"{folder} has no programs/*.py", remedy="name a folder of cases")
    expected = expectations(folder)
    cases = []
    for program in programs:
        stem = program.stem
        letters = next((expected[name] for name in (stem, stem.removeprefix("k_")) if name in expected), "AB")
        for variant, keys in _variants(program):
            case = Case(program.absolute(), variant, _world(program, variant, keys), "B" in letters)
            if pattern is None or pattern in str(case):
                cases.append(case)
    if not cases:
        raise UsageError(f"no case of {folder} is named like {pattern!r}")
    return cases


def expectations(folder: Path) -> dict[str, str]:
    """Which ends the README's table allows, by case: A (it survives), B (it is refused in time), AB.

    B counts also where it stands in the column after `expected`, which tells the right behaviour: some programs are to
    be refused in one state only.
    """
    readme = folder / "README.md"
    found: dict[str, str] = {}
    columns: list[str] = []
    for line in readme.read_text(encoding="utf-8").splitlines() if readme.exists() else []:
        cells = [cell.strip() for cell in line.strip().strip("|").split("|")]
        if not line.startswith("|"):
            columns = []
        elif not columns:
            columns = [cell.lower() for cell in cells]
        elif "case" in columns and "expected" in columns and len(cells) == len(columns):
            at = columns.index("expected")
            text = " ".join(cells[at : at + 2])
            letters = "".join(letter for letter in "AB" if re.search(rf"\b{letter}\b", text))
            if letters:
                found[cells[columns.index("case")]] = letters
    return found


def _variants(program: Path) -> list[tuple[str, dict[str, Any]]]:
    text = program.read_text(encoding="utf-8")
    line = next((line for line in text.splitlines() if line.startswith(LINE)), f"{LINE}{{}}")
    try:
        keys = json.loads(line.removeprefix(LINE))
        variants = keys.pop("variants", None) or {"plain": {}}
        return [(name, {**keys, **more}) for name, more in variants.items()]
    except (ValueError, AttributeError, TypeError) as error:
        raise UsageError(f"{program}: the line `{LINE.strip()}` does not hold a JSON object: {error}") from None


def _world(program: Path, variant: str, keys: Mapping[str, Any]) -> World:
    known = {item.name for item in fields(World)}
    values: dict[str, Any] = {}
    for key, value in keys.items():
        if key in STEERING:
            continue
        if key not in known:
            raise UsageError(f"{program.name}:{variant} has the key {key}, which is none of a case's")
        if key in CHOICES and value not in CHOICES[key]:
            raise UsageError(f"{program.name}:{variant}: {key} is {value!r}, not one of {', '.join(CHOICES[key])}")
        values[key] = tuple(map(str, value)) if key == "args" else value
    world = World(**values)
    if world.log is not None and not re.fullmatch(r"(emptydir|shm)/[\w./-]+", world.log):
        raise UsageError(f"{program.name}:{variant}: log is {world.log!r}, not a file in emptydir/ or shm/")
    return world
