"""Whether one chain of seccomp filters restricts at least what another does.

Equal programs do. Profiles of another version of a runtime are compared by what they answer: each program is run for
every system call number of every ABI; where its answer depends on the call's arguments, both ways are followed.
"""

from __future__ import annotations

import struct
from collections.abc import Iterator, Sequence
from functools import lru_cache

DISABLED, STRICT, FILTER = 0, 1, 2

_ALLOW = 0x7FFF0000
_KILL_PROCESS = 0x80000000
_ACTIONS = 0xFFFF0000
_NUMBER, _ARCH = 0, 4  # offsets in struct seccomp_data; what follows are instruction pointer and arguments
_ABIS = (0xC000003E, 0x40000003, 0xC00000B7, 0x40000028)  # x86_64, i386, aarch64, arm
_X32 = 0x40000000  # the bit of x32's numbers, also of x86_64
_NUMBERS = range(640)
_LIMIT = 4096  # instructions, as the kernel's BPF_MAXINSNS
_STEPS = 1 << 16  # of one run over all ways; a program beyond is taken for one that allows all

Answer = tuple[int, int]  # the strictest and the most lenient action, by `_rank`


def confines(mode: int, filters: Sequence[bytes], needed: int, profile: Sequence[bytes]) -> bool:
    """A task with `mode` and `filters` may do nothing that `needed` and `profile` forbid.

    Of a profile that answers by arguments it is required that the task's answers by arguments too; the conditions are
    not compared.
    """
    if needed == DISABLED or mode == STRICT:
        return True
    if mode != FILTER or needed == STRICT or not filters:
        return False
    if tuple(filters[: len(profile)]) == tuple(profile):
        return True
    return all(_at_least(mine, theirs) for mine, theirs in zip(_chain(filters), _chain(profile), strict=True))


def _at_least(mine: Answer, theirs: Answer) -> bool:
    return mine[0] <= theirs[0] and mine[1] <= theirs[1]


def _chain(filters: Sequence[bytes]) -> list[Answer]:
    """For each call the strictest answer of all programs, as the kernel takes it."""
    answers = [_answers(program) for program in filters]
    return [(min(one[0] for one in each), min(one[1] for one in each)) for each in zip(*answers, strict=True)]


@lru_cache(maxsize=64)
def _answers(program: bytes) -> tuple[Answer, ...]:
    return tuple(_answer(program, arch, number) for arch, number in _calls())


def _calls() -> Iterator[tuple[int, int]]:
    for arch in _ABIS:
        for number in _NUMBERS:
            yield arch, number
            if arch == _ABIS[0]:
                yield arch, number | _X32


def _rank(action: int) -> int:
    """Smaller is stricter: the kernel compares actions as signed numbers."""
    action &= _ACTIONS
    return action - (1 << 32) if action & _KILL_PROCESS else action


def _answer(program: bytes, arch: int, number: int) -> Answer:
    code = _decoded(program)
    seen: set[tuple[int, int | None, int | None]] = set()
    ranks: list[int] = []
    ways: list[tuple[int, int | None, int | None, tuple[int | None, ...]]] = [(0, 0, 0, (None,) * 16)]
    steps = 0
    while ways:
        at, a, x, memory = ways.pop()
        while True:
            steps += 1
            if at >= len(code) or steps > _STEPS:
                return _rank(_ALLOW), _rank(_ALLOW)
            operation, true, false, k = code[at]
            at += 1
            kind = operation & 7
            if kind == 6:  # RET
                value = k if operation & 0x18 == 0 else a
                ranks.append(_rank(_ALLOW if value is None else value))
                break
            if kind == 5:  # JMP
                if operation & 0xF0 == 0:
                    at += k
                    continue
                taken = _compare(operation & 0xF0, a, x if operation & 8 else k)
                if taken is None:
                    if (at, a, x) in seen:
                        break
                    seen.add((at, a, x))
                    ways.append((at + false, a, x, memory))
                    taken = True
                at += true if taken else false
            elif kind == 0:  # LD
                a = _load(operation, k, arch, number, memory)
            elif kind == 1:  # LDX
                x = _load(operation, k, arch, number, memory)
            elif kind in (2, 3):  # ST, STX
                memory = (*memory[: k & 15], a if kind == 2 else x, *memory[(k & 15) + 1 :])
            elif kind == 4:
                a = _alu(operation & 0xF0, a, x if operation & 8 else k)
            elif operation & 0xF8:  # TXA
                a = x
            else:
                x = a
    return min(ranks), max(ranks)


@lru_cache(maxsize=64)
def _decoded(program: bytes) -> list[tuple[int, int, int, int]]:
    return list(struct.iter_unpack("<HBBI", program[: len(program) & ~7]))[:_LIMIT]


def _load(operation: int, k: int, arch: int, number: int, memory: Sequence[int | None]) -> int | None:
    mode = operation & 0xE0
    if mode == 0x20:  # of the call
        return {_NUMBER: number, _ARCH: arch}.get(k)
    if mode == 0x60:
        return memory[k & 15]
    return k if mode == 0 else 64  # an immediate; the length of struct seccomp_data


def _compare(operation: int, a: int | None, b: int | None) -> bool | None:
    if a is None or b is None:
        return None
    return {0x10: a == b, 0x20: a > b, 0x30: a >= b, 0x40: bool(a & b)}.get(operation)


def _alu(operation: int, a: int | None, b: int | None) -> int | None:
    if a is None or (b is None and operation != 0x80):
        return None
    if operation == 0x80:
        return -a & 0xFFFFFFFF
    assert b is not None
    results = {
        0x00: a + b, 0x10: a - b, 0x20: a * b, 0x40: a | b, 0x50: a & b, 0x60: a << (b & 31), 0x70: a >> (b & 31),
        0xA0: a ^ b,
    }  # fmt: skip
    if operation in (0x30, 0x90):
        return (a // b if operation == 0x30 else a % b) if b else None
    result = results.get(operation)
    return None if result is None else result & 0xFFFFFFFF
