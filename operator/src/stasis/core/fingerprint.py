"""What a dumped process knows of the machine under it, and whether another machine can carry it on.

A program looks once at its CPU, page size and the like and relies on it from then on; what it would trip over on the
new machine is refused before anything runs, with both values; what may only change its speed or its last bits is said.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from dataclasses import asdict, dataclass, fields
from typing import Any

from stasis.errors import Corrupt, Finding

# Flags of /proc/cpuinfo (x86) that stand for instructions which a program may have chosen at its start. The others are
# the kernel's own matters, and differ with its version and its mitigations.
_INSTRUCTIONS = re.compile(
    r"^(cx8|cx16|cmov|mmx.*|3dnow.*|fxsr|sse.*|ssse3|pni|pclmulqdq|fma4?|movbe|popcnt|aes|x?save(opt|c|s)?|xgetbv1|avx.*|f16c|rdrand"
    r"|rdseed|lahf_lm|abm|misalignsse|xop|tbm|bmi1|bmi2|erms|fsrm|hle|rtm|adx|clflushopt|clwb|clzero|sha_ni|sha512|sm3|sm4"
    r"|gfni|vaes|vpclmulqdq|amx.*|rdpid|rdtscp|movdir(i|64b)|serialize|fsgsbase|pku|ospke|waitpkg|cldemote|enqcmd|lam"
    r"|user_shstk)$"
)


@dataclass(frozen=True)
class Fingerprint:
    architecture: str  # as `uname -m`
    kernel: str  # release
    cpu_vendor: str
    cpu_model: str
    cpu_flags: tuple[str, ...]
    signal_frame: int  # bytes that the kernel puts on a stack for a signal: grows with the CPU's extended state
    page_size: int  # bytes
    clock_ticks: int  # per second
    criu: str  # version
    init: str  # digest of the binary that the keeper runs
    image: str = ""  # digest of the container's image, or what stands for its root file system

    def as_dict(self) -> dict[str, Any]:
        return {**asdict(self), "cpu_flags": list(self.cpu_flags)}

    @classmethod
    def from_dict(cls, data: Mapping[str, Any]) -> Fingerprint:
        """Raises Corrupt where a field is missing or of another type."""
        values: dict[str, Any] = {}
        for one in fields(cls):
            value = data.get(one.name, "" if one.name == "image" else None)
            if one.name == "cpu_flags":
                good = isinstance(value, list) and all(isinstance(flag, str) for flag in value)
                value = tuple(value) if good else None
            elif not isinstance(value, int if "int" in str(one.type) else str) or isinstance(value, bool):
                value = None
            if value is None:
                raise Corrupt(f"the fingerprint of a checkpoint has no {one.name} that could be one")
            values[one.name] = value
        return cls(**values)


@dataclass(frozen=True)
class Comparison:
    refusals: tuple[Finding, ...]
    warnings: tuple[str, ...]


def compare(saved: Fingerprint, here: Fingerprint) -> Comparison:
    """`saved`: of the dump; `here`: of the machine and the container that it is to be restored into."""
    refusals: list[Finding] = []

    def refuse(what: str, old: object, new: object, remedy: str) -> None:
        refusals.append(Finding(f"the {what} was {old} at the checkpoint and is {new} here", remedy, where=what))

    like = "restore on a machine like the one of the checkpoint (a node selector helps)"
    for name, what in (("architecture", "architecture"), ("page_size", "page size"), ("clock_ticks", "clock tick")):
        if (old := getattr(saved, name)) != (new := getattr(here, name)):
            refuse(what, old, new, like)
    if saved.architecture == here.architecture:
        if lacking := sorted(instructions(saved) - instructions(here)):
            refusals.append(
                Finding(
                    f"the CPU here ({here.cpu_model}) lacks {', '.join(lacking)}, which the one of the checkpoint "
                    f"({saved.cpu_model}) has and the program may use",
                    like,
                    where="CPU",
                )
            )
        if here.signal_frame < saved.signal_frame:
            refuse("CPU's extended state in a signal frame", saved.signal_frame, here.signal_frame, like)
    if _version(here.criu) < _version(saved.criu):
        refuse("version of CRIU", saved.criu, here.criu, "update Stasis on this node")
    if saved.init != here.init:
        refuse(
            "digest of init", saved.init, here.init, "give the container the init that the checkpoint was taken with"
        )
    if saved.image != here.image:
        refuse("image", saved.image or "none", here.image or "none", "resume with the image of the checkpoint")
    return Comparison(tuple(refusals), tuple(_warnings(saved, here)))


def instructions(one: Fingerprint) -> set[str]:
    """The flags that count: on other architectures than x86 all are instructions."""
    if one.architecture in ("x86_64", "i686"):
        return {flag for flag in one.cpu_flags if _INSTRUCTIONS.match(flag)}
    return set(one.cpu_flags)


def _warnings(saved: Fingerprint, here: Fingerprint) -> Iterable[str]:
    if saved.kernel != here.kernel:
        yield f"the kernel was {saved.kernel} at the checkpoint and is {here.kernel} here"
    if saved.cpu_vendor != here.cpu_vendor:
        yield (
            f"the CPU was one of {saved.cpu_vendor} at the checkpoint and is one of {here.cpu_vendor} here: results "
            "may differ in their last bits"
        )
    elif saved.cpu_model != here.cpu_model:
        yield f"the CPU was {saved.cpu_model} at the checkpoint and is {here.cpu_model} here"


def _version(text: str) -> tuple[int, ...]:
    return tuple(int(part) for part in re.findall(r"\d+", text))
