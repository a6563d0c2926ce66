"""Types of stasis.dev/v1alpha1."""

from stasis.api.v1alpha1.checkpointpolicy import CheckpointPolicy, CheckpointPolicySpec
from stasis.api.v1alpha1.trainjobcheckpoint import TrainJobCheckpoint, TrainJobCheckpointSpec, TrainJobCheckpointStatus

__all__ = [
    "CheckpointPolicy",
    "CheckpointPolicySpec",
    "TrainJobCheckpoint",
    "TrainJobCheckpointSpec",
    "TrainJobCheckpointStatus",
]
