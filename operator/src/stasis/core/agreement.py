"""What the ranks of a gang must agree on before their captures may become a checkpoint."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict
from typing import Any

from stasis.core.connections import Connection, address, aliases_in_use, mend
from stasis.core.gang import Hook, Results, no_hook
from stasis.core.plan import Kind, Spec
from stasis.core.steps import Step


def agreement(spec: Spec) -> Hook:
    """The hook of an operation, from its description alone, so that a new coordinator asks the same."""
    if spec.kind is Kind.RESTORE:
        return no_hook
    return _connections(spec.args_for(Step.PREPARE, spec.ranks[0])["addresses"])


def _connections(addresses: Mapping[str, Sequence[str]]) -> Hook:
    """After the capture the two ends of each of the gang's connections must agree. How to mend them, which lead outside
    the gang, and which addresses are still in use goes with each rank's part of the checkpoint. `addresses`: all by
    which each rank was ever known, its first pod's first. The hook raises CheckpointFailed, naming both ends, where
    they contradict each other."""
    known = {rank: [address(text) for text in texts] for rank, texts in addresses.items()}
    aliases = {alias: first for first, *others in known.values() for alias in others if alias != first}

    def compare(step: Step, results: Results) -> Mapping[int, Mapping[str, Any]]:
        if step is not Step.CAPTURE:
            return {}
        tables = {rank: [Connection.from_dict(c) for c in result["connections"]] for rank, result in results.items()}
        bound = [address(text) for result in results.values() for text in result["bound"]]
        mended = mend(tables, [ip for of in known.values() for ip in of], aliases)
        used = aliases_in_use(tables.values(), bound, aliases)
        still = {
            rank: [str(first), *(str(alias) for alias in dict.fromkeys(others) if alias in used)]
            for rank, (first, *others) in known.items()
        }
        return {
            rank: {
                "addresses": still,
                "fixes": {str(inode): asdict(fix) for inode, fix in mended.fixes[rank].items()},
                "outside": [[str(e.local), e.local_port, str(e.remote), e.remote_port] for e in mended.outside[rank]],
            }
            for rank in tables
        }

    return compare
