"""More rights than the container may have are refused, and no added right ever turns a refusal into a permission."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from stasis.core.credentials import Credentials, exceeding, names

SETGID, SETUID, NET_RAW, SYS_ADMIN = 1 << 6, 1 << 7, 1 << 13, 1 << 21
DEFAULT = 0xA80425FB  # containerd's default set
ROOT = Credentials(0, "stasis-init", (0,) * 4, (0,) * 4, (0,), permitted=DEFAULT, effective=DEFAULT, bounding=DEFAULT)
USER = Credentials(0, "stasis-init", (1000,) * 4, (1000,) * 4, (1000, 2000), bounding=DEFAULT)
RESTRICTED = replace(USER, bounding=0, no_new_privs=True)
ALLOW, DENY = b"\x06\0\0\0\0\0\xff\x7f", b"\x06\0\0\0\x01\0\x05\0"
PROFILED = replace(ROOT, seccomp=2, filters=(DENY,))


def task(of: Credentials, **changes: Any) -> Credentials:
    return replace(of, thread=7, comm="python", **changes)


@pytest.mark.parametrize("placeholder", [ROOT, USER, RESTRICTED, PROFILED])
def test_a_task_like_init_is_allowed(placeholder: Credentials) -> None:
    assert exceeding([task(placeholder)], placeholder) == []


@pytest.mark.parametrize(
    ("one", "placeholder"),
    [
        (task(ROOT, uids=(1000,) * 4, gids=(5,) * 4, groups=(6, 7), permitted=0, effective=0), ROOT),
        (task(USER, no_new_privs=True, seccomp=2, filters=(ALLOW,)), USER),  # init's own denial of io_uring
        (task(USER, groups=()), USER),
        (task(RESTRICTED, seccomp=1), RESTRICTED),
        (task(PROFILED, filters=(DENY, ALLOW)), PROFILED),
        (task(USER, label="cri-containerd.apparmor.d"), replace(USER, label="cri-containerd.apparmor.d (enforce)")),
        (task(USER, label="system_u:system_r:container_t:s0:c1,c2"),
         replace(USER, label="system_u:system_r:container_t:s0:c3,c4")),
        (task(USER, label="some-profile"), replace(USER, label="unconfined")),
    ],
)  # fmt: skip
def test_what_a_job_may_do_with_itself_is_allowed(one: Credentials, placeholder: Credentials) -> None:
    assert exceeding([one], placeholder) == []


@pytest.mark.parametrize(
    ("one", "placeholder", "where"),
    [
        (task(USER, uids=(1000, 0, 1000, 1000)), USER, "user 0"),
        (task(RESTRICTED, uids=(0,) * 4), RESTRICTED, "user 0"),
        (task(USER, gids=(0,) * 4), USER, "group 0"),
        (task(USER, groups=(1000, 27)), USER, "group 27"),
        (task(ROOT, permitted=DEFAULT | SYS_ADMIN), ROOT, "permitted capabilities"),
        (task(ROOT, effective=SYS_ADMIN), ROOT, "effective capabilities"),
        (task(ROOT, inheritable=SYS_ADMIN), ROOT, "inheritable capabilities"),
        (task(ROOT, ambient=SYS_ADMIN), ROOT, "ambient capabilities"),
        (task(ROOT, bounding=DEFAULT | 1 << 40), ROOT, "bounding capabilities"),
        (task(RESTRICTED, permitted=NET_RAW), replace(RESTRICTED, bounding=DEFAULT), "permitted capabilities"),
        (task(RESTRICTED, no_new_privs=False), RESTRICTED, "no_new_privs"),
        (task(PROFILED, seccomp=0, filters=()), PROFILED, "seccomp mode 0"),
        (task(PROFILED, filters=(ALLOW,)), PROFILED, "seccomp mode 2"),
        (task(PROFILED, filters=()), PROFILED, "seccomp mode 2"),
        (task(USER), replace(USER, label="cri-containerd.apparmor.d (enforce)"), "label none"),
        (task(USER, label="u:r:spc_t:s0"), replace(USER, label="u:r:container_t:s0"), "label u:r:spc_t:s0"),
    ],
)
def test_more_is_refused_by_name(one: Credentials, placeholder: Credentials, where: str) -> None:
    (finding,) = exceeding([one], placeholder)
    assert (finding.pid, finding.comm, finding.where) == (7, "python", where)
    assert finding.cause
    assert finding.remedy


def test_every_task_is_looked_at() -> None:
    bad = task(USER, uids=(0,) * 4)
    assert [
        finding.pid for finding in exceeding([task(USER), replace(bad, thread=8), replace(bad, thread=9)], USER)
    ] == [
        8,
        9,
    ]


def test_capabilities_are_named() -> None:
    assert names(1 << 0 | SYS_ADMIN | 1 << 40) == ["CAP_CHOWN", "CAP_SYS_ADMIN", "CAP_CHECKPOINT_RESTORE"]
    assert names(1 << 63) == ["capability 63"]


ids = st.sampled_from([0, 5, 1000, 2000, 65534])
masks = st.integers(0, (1 << 41) - 1)
credentials = st.builds(
    Credentials,
    thread=st.just(7),
    comm=st.just("python"),
    uids=st.tuples(ids, ids, ids, ids),
    gids=st.tuples(ids, ids, ids, ids),
    groups=st.lists(ids, max_size=3).map(tuple),
    inheritable=masks,
    permitted=masks,
    effective=masks,
    bounding=masks,
    ambient=masks,
    no_new_privs=st.booleans(),
    seccomp=st.sampled_from([0, 2]),
    filters=st.lists(st.sampled_from([ALLOW, DENY]), max_size=2).map(tuple),
    label=st.sampled_from(["", "unconfined", "p1", "p2"]),
)


@given(credentials, credentials, masks, st.sampled_from(["groups", "nnp", "seccomp", "filter", "capabilities"]))
@settings(max_examples=150, deadline=None)
def test_adding_a_right_never_turns_refused_into_allowed(
    one: Credentials, placeholder: Credentials, more: int, kind: str
) -> None:
    richer = {
        "groups": replace(one, groups=(*one.groups, 27)),
        "nnp": replace(one, no_new_privs=False),
        "seccomp": replace(one, seccomp=0, filters=()),
        "filter": replace(one, filters=one.filters[:-1]),
        "capabilities": replace(
            one,
            permitted=one.permitted | more,
            effective=one.effective | more,
            ambient=one.ambient | more,
            inheritable=one.inheritable | more,
            bounding=one.bounding | more,
        ),
    }[kind]
    if exceeding([one], placeholder):
        assert exceeding([richer], placeholder)


@given(credentials, credentials, masks)
@settings(max_examples=100, deadline=None)
def test_a_container_with_more_rights_allows_no_less(one: Credentials, placeholder: Credentials, more: int) -> None:
    richer = replace(
        placeholder, permitted=placeholder.permitted | more, bounding=placeholder.bounding | more, no_new_privs=False
    )
    before = {
        finding.where
        for finding in exceeding([one], replace(placeholder, bounding=placeholder.bounding | placeholder.permitted))
    }
    assert {
        finding.where for finding in exceeding([one], replace(richer, bounding=richer.bounding | richer.permitted))
    } <= before
