"""One case through the product's own path: container, suspend, a fresh container, resume, verdict."""

from __future__ import annotations

import contextlib
import os
import shutil
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from stasis.agent import provision
from stasis.cases.limits import Place, has_libuv, has_resource_capability, not_shown
from stasis.cases.spec import EMPTYDIR, ENVIRONMENT, PROGRAMS, VOLUME, Case
from stasis.cases.verdict import Evidence, Verdict, judge, steps
from stasis.cases.world import TOKEN_FOLDER, Server, huge_pages, token_folder
from stasis.errors import Refused, ResourceShort, StasisError
from stasis.local.container import ALL_CAPABILITIES, DEFAULT_CAPABILITIES
from stasis.local.gang import GangSpec, LocalGang
from stasis.local.network import Network
from stasis.local.operator import LocalOperator

CAPABILITIES = {"default": tuple(DEFAULT_CAPABILITIES), "none": (), "all": tuple(ALL_CAPABILITIES)}
ATTEMPTS = 4  # a program may be through with its steps before it is frozen
HERE = Place(
    libuv=lambda: has_libuv(provision.rootfs()),
    other_users=lambda: has_resource_capability() or bool(os.environ.get("STASIS_CRIU_PRELOAD")),
)


@dataclass(frozen=True)
class Result:
    """`suspend` and `resume` in seconds, 0 where it did not come to that."""

    case: Case
    verdict: Verdict
    detail: str
    suspend: float = 0.0
    resume: float = 0.0

    def as_dict(self) -> dict[str, Any]:
        return {
            "case": self.case.name,
            "variant": self.case.variant,
            "verdict": str(self.verdict),
            "detail": self.detail,
            "suspend": round(self.suspend, 3),
            "resume": round(self.resume, 3),
        }


def run_case(case: Case, name: str, on_stage: Callable[[str], None] = lambda stage: None) -> Result:
    """Run a case; `name` is one that no other gang on this machine has. Raises only for what is no fault of a case."""
    if reason := not_shown(case, HERE):
        return Result(case, Verdict.NOT_SHOWN, reason)
    for attempt in range(ATTEMPTS):
        folder = Path(tempfile.mkdtemp(prefix=f"stasis-{name}-"))
        try:
            with huge_pages(case.world.hugepages):
                run = _Run(case, name, folder, on_stage)
                evidence = run.through()
        finally:
            shutil.rmtree(folder, ignore_errors=True)
        if not run.ended_early:
            break
        on_stage(f"ended too early, attempt {attempt + 2}")
    verdict, detail = judge(evidence, refusable=case.refusable)
    return Result(case, verdict, detail, run.suspend, run.resume)


class _Run:
    def __init__(self, case: Case, name: str, folder: Path, on_stage: Callable[[str], None]) -> None:
        self.case = case
        self.world = case.world
        self.folder = folder
        self.suspend = self.resume = 0.0
        self.ended_early = False
        self._on_stage = on_stage
        self._server: Server | None = None
        self._containers = 0
        (folder / "pvc").mkdir()
        (folder / "pvc").chmod(0o777)
        self.gang = LocalGang(name, self._spec(), folder / "gang", before_ranks=self._open_server)

    def _spec(self) -> GangSpec:
        world = self.world
        env = {**ENVIRONMENT, "OUTSIDE": Network.GATEWAY, **world.env}
        options = {
            "hostname": "trainer-0",
            "uid": world.uid,
            "capabilities": CAPABILITIES[world.caps],
            "seccomp": world.seccomp,
            "shm_size": world.shm,
            "memlock": world.memlock,
            "cgroup_writable": world.cgroup_rw,
            "emptydirs": (EMPTYDIR,),
            "volumes": {VOLUME: self.folder / "pvc"},
            "readonly": self._readonly(),
        }
        command = ("python3", f"{PROGRAMS}/{self.case.program.name}", *world.args)
        return GangSpec(command, 1, provision.rootfs(), provision.init(), env, options)

    def _readonly(self) -> dict[str, Path]:
        """What each container has anew."""
        self._containers += 1
        token = token_folder(self.folder / f"token-{self._containers}", f"token-{self._containers}")
        return {PROGRAMS: self.case.program.parent, TOKEN_FOLDER: token}

    def _open_server(self, netns: Path) -> None:
        self._server = Server(netns)

    def through(self) -> Evidence:
        self._on_stage("start")
        with contextlib.closing(self), self.gang, self._operator() as operator:
            world, gang = self.world, self.gang
            gang.wait_for(lambda: len(steps(self.lines())) > world.at or self._ended(), world.timeout)
            if len(steps(self.lines())) <= world.at or self._ended():
                return Evidence(failed=f"it did not come to its step {world.at}: {' | '.join(self.lines()[-3:])}")
            self._on_stage("suspend")
            started = time.monotonic()
            try:
                operator.suspend()
            except (Refused, ResourceShort) as refusal:
                self._on_stage("refused; it goes on")
                return self._end(refused=str(refusal))
            except StasisError as error:
                seen = len(steps(self.lines()))
                evidence = self._end(failed=f"suspend: {error}")
                self.ended_early = evidence.status == 0 and len(steps(evidence.lines)) <= seen + 1
                return evidence
            self.suspend = time.monotonic() - started
            last = steps(self.lines())[-1][0]
            self._on_stage("suspended")
            self._change_world()
            time.sleep(world.gap)
            refused = ""
            try:
                started = time.monotonic()
                try:
                    self._resume(operator, {"shm_size": world.shm2} if world.shm2 else {})
                except (Refused, ResourceShort) as refusal:
                    refused = f"at resume: {refusal}"
                    self._resume(operator, {})  # into a world like the old one it must still come back
                self.resume = time.monotonic() - started
            except StasisError as error:
                return Evidence(self.lines(), failed=f"resume: {error}")
            self._on_stage("resumed")
            evidence = self._end(refused=refused, suspended=last)
            self.ended_early = evidence.status == 0 and steps(evidence.lines)[-1][0] == last
            return evidence

    def _resume(self, operator: LocalOperator, options: Mapping[str, object]) -> None:
        self._on_stage("resume")
        hostname = self.world.hostname2 or "trainer-0"
        fresh = {"hostname": hostname, "readonly": self._readonly(), **options}
        operator.resume(new_addresses=self.world.ip2, options=fresh)

    def _change_world(self) -> None:
        """What happens while the program is suspended."""
        assert self._server is not None
        if self.world.server == "gone":
            self._server.close()
        elif self.world.server == "blackhole":
            self._server.fall_silent()
        if self.world.pvc_grow:
            with open(self.folder / "pvc" / "data", "ab") as data:
                data.write(b"grown by another rank\n")

    def _end(self, *, refused: str = "", failed: str = "", suspended: int | None = None) -> Evidence:
        self.gang.wait(self.world.timeout)
        return Evidence(self.lines(), self.gang.statuses()[0], suspended, refused, failed)

    def _ended(self) -> bool:
        return self.gang.statuses()[0] is not None

    def lines(self) -> list[str]:
        """What the program has said, over all its containers."""
        lines = list(self.gang.lines[0])
        if self.world.log is not None:
            area, _, name = self.world.log.partition("/")
            container = self.gang.places[0].container
            base = container.emptydir(EMPTYDIR) if area == "emptydir" else container.folder / "shm"
            with contextlib.suppress(FileNotFoundError):
                lines += (base / name).read_text(errors="replace").splitlines()
        return lines

    @contextlib.contextmanager
    def _operator(self) -> Iterator[LocalOperator]:
        with contextlib.closing(LocalOperator(self.gang, f"oci:{self.folder}/store:case")) as operator:
            yield operator

    def close(self) -> None:
        if self._server is not None:
            self._server.close()
