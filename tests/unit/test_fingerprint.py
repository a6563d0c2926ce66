"""What a process would trip over on another machine is refused with both values; the rest is said."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from stasis.core.fingerprint import Fingerprint, compare
from stasis.errors import Corrupt

HERE = Fingerprint(
    architecture="x86_64",
    kernel="6.18.0",
    cpu_vendor="GenuineIntel",
    cpu_model="Xeon 8480",
    cpu_flags=("avx2", "avx512f", "ibrs", "sse2"),
    signal_frame=3632,
    page_size=4096,
    clock_ticks=100,
    criu="4.2.1",
    init="sha256:aa",
    image="sha256:bb",
)


def test_the_same_machine() -> None:
    assert compare(HERE, HERE) == compare(HERE, replace(HERE))
    assert compare(HERE, HERE).refusals == ()
    assert compare(HERE, HERE).warnings == ()


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"architecture": "aarch64"}, ["architecture", "x86_64", "aarch64"]),
        ({"page_size": 65536}, ["page size", "4096", "65536"]),
        ({"clock_ticks": 250}, ["clock tick", "100", "250"]),
        ({"cpu_flags": ("avx2", "ibrs", "sse2"), "cpu_model": "EPYC"}, ["EPYC", "lacks avx512f", "Xeon 8480"]),
        ({"signal_frame": 2000}, ["extended state", "3632", "2000"]),
        ({"criu": "4.1"}, ["CRIU", "4.2.1", "4.1"]),
        ({"init": "sha256:cc"}, ["init", "sha256:aa", "sha256:cc"]),
        ({"image": "sha256:dd"}, ["image", "sha256:bb", "sha256:dd"]),
    ],
)
def test_refused_with_both_values(change: dict[str, Any], words: list[str]) -> None:
    (finding,) = compare(HERE, replace(HERE, **change)).refusals
    for word in words:
        assert word in finding.cause
    assert finding.remedy


@pytest.mark.parametrize(
    "change",
    [
        {"cpu_flags": ("avx2", "avx512f", "sse2", "amx_tile")},  # more instructions, another mitigation
        {"signal_frame": 11000},
        {"criu": "4.10"},
    ],
)
def test_more_is_no_matter(change: dict[str, Any]) -> None:
    comparison = compare(HERE, replace(HERE, **change))
    assert (comparison.refusals, comparison.warnings) == ((), ())


@pytest.mark.parametrize(
    ("change", "word"),
    [
        ({"kernel": "6.20.1"}, "6.20.1"),
        ({"cpu_model": "Xeon 9"}, "Xeon 9"),
        ({"cpu_vendor": "AuthenticAMD"}, "last bits"),
    ],
)
def test_what_may_differ_is_said(change: dict[str, Any], word: str) -> None:
    comparison = compare(HERE, replace(HERE, **change))
    assert comparison.refusals == ()
    assert len(comparison.warnings) == 1
    assert word in comparison.warnings[0]


def test_of_another_architecture_every_flag_counts() -> None:
    arm = replace(HERE, architecture="aarch64", cpu_flags=("asimd", "sve"))
    assert "lacks sve" in compare(arm, replace(arm, cpu_flags=("asimd",))).refusals[0].cause


def test_it_travels_as_json() -> None:
    assert Fingerprint.from_dict(HERE.as_dict()) == HERE


@pytest.mark.parametrize(
    "change", [{"kernel": 7}, {"page_size": "4096"}, {"page_size": True}, {"cpu_flags": "avx"}, {"cpu_flags": [1]}]
)
def test_another_partys_record_is_checked(change: dict[str, Any]) -> None:
    with pytest.raises(Corrupt, match=next(iter(change))):
        Fingerprint.from_dict({**HERE.as_dict(), **change})
    with pytest.raises(Corrupt, match="kernel"):
        Fingerprint.from_dict({name: value for name, value in HERE.as_dict().items() if name != "kernel"})
