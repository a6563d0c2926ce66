"""What the tasks of a checkpoint may be, compared with what the container may have that they are restored into (rule:
more is refused, before any process runs). CRIU restores with the agent's privileges, so nothing else would stop a
forged checkpoint.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass

from stasis.core import seccomp
from stasis.errors import Finding

_SETGID, _SETUID = 1 << 6, 1 << 7
_CAPABILITIES = (
    "chown dac_override dac_read_search fowner fsetid kill setgid setuid setpcap linux_immutable net_bind_service "
    "net_broadcast net_admin net_raw ipc_lock ipc_owner sys_module sys_rawio sys_chroot sys_ptrace sys_pacct sys_admin "
    "sys_boot sys_nice sys_resource sys_time sys_tty_config mknod lease audit_write audit_control setfcap mac_override "
    "mac_admin syslog wake_alarm block_suspend audit_read perfmon bpf checkpoint_restore"
).split()


@dataclass(frozen=True)
class Credentials:
    """Of one thread. Capability sets are bit masks; `filters` are seccomp programs, the one installed first first."""

    thread: int  # its id inside the container; 0 for the placeholder's init
    comm: str
    uids: tuple[int, ...]  # real, effective, saved, file system
    gids: tuple[int, ...]
    groups: tuple[int, ...] = ()
    inheritable: int = 0
    permitted: int = 0
    effective: int = 0
    bounding: int = 0
    ambient: int = 0
    no_new_privs: bool = False
    seccomp: int = seccomp.DISABLED
    filters: tuple[bytes, ...] = ()
    label: str = ""  # of the Linux security module: AppArmor's profile, SELinux's context


def exceeding(tasks: Iterable[Credentials], placeholder: Credentials) -> list[Finding]:
    """Everything by which a task is or may do more than the placeholder; empty: the restore is allowed.

    `placeholder`: the credentials of the new container's init. It may take any id only where it holds CAP_SETUID
    (CAP_SETGID); it may come to hold any capability of its bounding set, but with no_new_privs only those that it has.
    """
    return [
        Finding(cause, remedy, task.thread, task.comm, where)
        for task in tasks
        for where, cause, remedy in _excess(task, placeholder)
    ]


def _excess(task: Credentials, placeholder: Credentials) -> Iterator[tuple[str, str, str]]:
    yield from _ids("user", task.uids, placeholder.uids, placeholder.permitted & _SETUID, "runAsUser")
    groups = (*placeholder.gids, *placeholder.groups)
    holder = placeholder.permitted & _SETGID
    yield from _ids("group", (*task.gids, *task.groups), groups, holder, "runAsGroup, fsGroup and supplementalGroups")
    yield from _capabilities(task, placeholder)
    if placeholder.no_new_privs and not task.no_new_privs:
        yield (
            "no_new_privs",
            "it may gain privileges by setuid programs, the new container may not",
            "give the new container allowPrivilegeEscalation as the old one had it",
        )
    if not seccomp.confines(task.seccomp, task.filters, placeholder.seccomp, placeholder.filters):
        yield (
            f"seccomp mode {task.seccomp}",
            "its system calls are less restricted than the new container's seccomp profile demands",
            "give the new container the seccomp profile that the old one had",
        )
    if _domain(task.label) != _domain(placeholder.label) and placeholder.label not in ("", "unconfined"):
        yield (
            f"label {task.label or 'none'}",
            f"it is not confined as the new container is ({placeholder.label})",
            "give the new container the AppArmor profile or SELinux type that the old one had",
        )


def _ids(
    kind: str, wanted: Sequence[int], own: Sequence[int], may_change: int, field: str
) -> Iterator[tuple[str, str, str]]:
    if may_change:
        return
    for number in sorted(set(wanted) - set(own)):
        yield (
            f"{kind} {number}",
            f"the new container may not be this {kind}: its own are {sorted(set(own))}",
            f"give the new container the {field} that the old one had",
        )


def _capabilities(task: Credentials, placeholder: Credentials) -> Iterator[tuple[str, str, str]]:
    reachable = placeholder.permitted if placeholder.no_new_privs else placeholder.bounding
    sets = {
        "permitted": (task.permitted, reachable),
        "effective": (task.effective, reachable),
        "ambient": (task.ambient, reachable),
        "inheritable": (task.inheritable, reachable | placeholder.inheritable),
        "bounding": (task.bounding, placeholder.bounding),
    }
    for name, (wanted, allowed) in sets.items():
        if more := wanted & ~allowed:
            yield (
                f"{name} capabilities",
                f"the new container may not have {', '.join(names(more))}",
                "give the new container the capabilities that the old one had",
            )


def names(mask: int) -> list[str]:
    """Capability names of a bit mask, as `capabilities(7)` has them."""
    bits = [bit for bit in range(mask.bit_length()) if mask >> bit & 1]
    return [f"CAP_{_CAPABILITIES[bit].upper()}" if bit < len(_CAPABILITIES) else f"capability {bit}" for bit in bits]


def _domain(label: str) -> str:
    """What of a label is policy: AppArmor's mode is not part of the profile's name, and SELinux gives every container
    categories of its own."""
    label = label.removesuffix(" (enforce)").removesuffix(" (complain)").strip()
    parts = label.split(":")
    return ":".join(parts[:3]) if len(parts) >= 3 and "/" not in label else label
