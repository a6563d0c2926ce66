"""The steps of the gang protocol, by the names that logs, tests and metrics use.

A step is carried out by every rank before any rank starts the next one (a barrier). Every step is idempotent. Steps
for collectives and for the GPU are part of the protocol always; on a CPU job their drivers do nothing.
"""

from enum import StrEnum


class Step(StrEnum):
    # Suspend or checkpoint, in this order.
    PREPARE = "prepare"  # scan, compare, reserve; a refusal means that nothing happened
    QUIESCE = "quiesce"  # collectives drained and torn down, trainers parked
    LOCK_DEVICES = "lock-devices"  # every CUDA process of every rank
    SAVE_DEVICES = "save-devices"  # device memory to host memory
    FREEZE = "freeze"  # the tree's own cgroup
    DRAIN = "drain"  # until nothing of the gang's connections is in flight
    LOCK_NETWORK = "lock-network"  # then drained again: says whether something was in flight
    CAPTURE = "capture"  # the CRIU dump and the files, taken by reference (hold) or copied (drain)
    UNLOCK_NETWORK = "unlock-network"
    THAW = "thaw"
    STORE = "store"  # packs, index, manifest durable as the policy asks: the 'complete' vote
    # After the decision.
    RELEASE = "release"  # kill the frozen tree, let the container go
    CONTINUE = "continue"  # forget the capture; the tree runs
    # Unwinding: UNLOCK_NETWORK, THAW, then these.
    RESTORE_DEVICES = "restore-devices"
    UNLOCK_DEVICES = "unlock-devices"
    REBUILD = "rebuild"  # process groups
    # Restore, in this order, then THAW, RESTORE_DEVICES, UNLOCK_DEVICES, REBUILD.
    PLACE = "place"  # find the placeholder, compare credentials and room; a refusal means that nothing ran
    LAY = "lay"  # files, addresses, network lock
    RESTORE = "restore"  # CRIU, tasks stopped and frozen
    RELEASE_NETWORK = "release-network"  # locks deleted in all ranks; barrier
    POKE_NETWORK = "poke-network"  # unsent data pushed, windows refreshed, connections to others closed
    TEAR_DOWN = "tear-down"  # undo of a restore: kill the tree, remove what was laid
