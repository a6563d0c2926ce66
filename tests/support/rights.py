"""What the chart's ServiceAccounts do, by the API server's audit log, beside what its roles let them do:
`python -m tests.support.rights AUDIT-LOG...` prints each right with how often it was used."""

from __future__ import annotations

import json
import sys
from collections import Counter
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any, NamedTuple

import yaml

PREFIX = "stasis-"  # of our ServiceAccounts' and roles' names


class Right(NamedTuple):
    account: str
    group: str
    resource: str  # with its subresource
    verb: str


def policy(users: Iterable[str]) -> dict[str, Any]:
    """An audit policy: what these users ask for, without the objects."""
    rules = [{"level": "Metadata", "users": list(users)}, {"level": "None"}]
    return {"apiVersion": "audit.k8s.io/v1", "kind": "Policy", "omitStages": ["RequestReceived"], "rules": rules}


def granted(roles: str) -> set[Right]:
    """By ClusterRoles and Roles, which are named as their ServiceAccounts."""
    return {
        Right(role["metadata"]["name"].removeprefix(PREFIX), group, resource, verb)
        for role in yaml.safe_load_all(roles)
        if role and role["kind"] in ("ClusterRole", "Role")
        for rule in role["rules"]
        for group in rule["apiGroups"]
        for resource in rule["resources"]
        for verb in rule["verbs"]
    }


def used(log: Path) -> Counter[Right]:
    return Counter(right for right, code, _ in _requests(log) if code != 403)


def refused(log: Path) -> set[str]:
    """What was forbidden, in words."""
    return {f"{right.account} may not {right.verb} {where}" for right, code, where in _requests(log) if code == 403}


def _requests(log: Path) -> Iterator[tuple[Right, int, str]]:
    if not log.exists():  # nobody has asked for anything
        return
    with log.open() as lines:
        for event in map(json.loads, lines):
            account = event["user"]["username"].rpartition(":")[2].removeprefix(PREFIX)
            if (about := event.get("objectRef")) is None:  # discovery
                continue
            resource = "/".join(part for part in (about["resource"], about.get("subresource")) if part)
            right = Right(account, about.get("apiGroup", ""), resource, event["verb"])
            where = f"{resource} {about.get('namespace', '')}/{about.get('name', '')}"
            yield right, event.get("responseStatus", {}).get("code", 0), where


def main(logs: list[str]) -> None:
    from tests.support.apiserver import rendered  # which needs our policy

    found = sum((used(Path(log)) for log in logs), Counter[Right]())
    for right in sorted(granted(rendered("rbac")) | set(found)):
        print(f"{found[right] or 'never':>8}  {' '.join(part or 'core' for part in right)}")


if __name__ == "__main__":
    main(sys.argv[1:])
