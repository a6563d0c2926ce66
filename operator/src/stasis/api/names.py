"""Every name by which the parts of Stasis in a cluster find each other's marks. GROUP alone holds the group."""

GROUP = "stasis.dev"
VERSION = "v1alpha1"
API_VERSION = f"{GROUP}/{VERSION}"

# On a TrainJob or its namespace: enables it, by the name of a CheckpointPolicy. Handed on to JobSet, pod templates and
# pods, so that everything selects on it.
POLICY_LABEL = f"{GROUP}/policy"
DEFAULT_POLICY = "default"  # needs no object

# On a TrainJobCheckpoint.
TRAINJOB_LABEL = f"{GROUP}/trainjob"
TRAINJOB_UID_LABEL = f"{GROUP}/trainjob-uid"

# On a TrainJob, by the user.
DISCARD = f"{GROUP}/discard"  # "true": suspend at once without saving
CHECK = f"{GROUP}/check"  # ten hex digits of one's own: could it be checkpointed? Answered by an Event with FINDINGS
FROM = f"{GROUP}/from"  # on a suspended one: NAME[/CURRENT], the checkpoint to resume from in place of CURRENT
SHARE_VOLUMES = f"{GROUP}/share-volumes"  # on a fork, "true": with a source that runs and writes to them

# On an Event that answers CHECK: JSON, the findings of each rank.
FINDINGS = f"{GROUP}/findings"

# On a JobSet: see core/gate.py.
GATE = f"{GROUP}/gate"

# On the pod templates of a JobSet and so on pods, by the admission that lets a resume pass. Empty is as good as absent:
# JobSet merges annotations into its Jobs, so that one which is removed from it would stay there.
CHECKPOINT = f"{GROUP}/checkpoint"  # name of the TrainJobCheckpoint
CHECKPOINT_UID = f"{GROUP}/checkpoint-uid"
RESTORE = f"{GROUP}/restore"  # generation of the restore, decimal
ADDRESSES = f"{GROUP}/addresses"  # JSON: rank (as text) -> address that the CNI is asked for
INITS = f"{GROUP}/inits"  # JSON: list of the init builds that the restore needs

# On pod templates, by the admission of the JobSet.
RANKS = f"{GROUP}/ranks"  # rank of the job's first pod / pods of one replica; see `stasis.kube.ranks`

# On pods, by the admission of the pod. CONTAINER also on pod templates.
ID = f"{GROUP}/id"  # random: names the pod towards its preStop
PREPARED = f"{GROUP}/prepared"  # build of init
UNPREPARED = f"{GROUP}/unprepared"  # why not
POD_IP = f"{GROUP}/pod-ip"  # addresses wanted, by comma; empty: any, to be held; read by the IPAM step
CONTAINER = f"{GROUP}/container"  # name of the container that is checkpointed

PATCH_MANAGER = f"{GROUP}/webhook"  # of the runtimePatch on a TrainJob

# By others.
JOBSET_NAME_LABEL = "jobset.sigs.k8s.io/jobset-name"
REPLICATED_JOB_LABEL = "jobset.sigs.k8s.io/replicatedjob-name"
CALICO_ADDRESSES = "cni.projectcalico.org/ipAddrs"  # annotation of a pod: JSON list
COMPLETION_INDEX = "batch.kubernetes.io/job-completion-index"  # annotation and label of a pod

# In a prepared pod.
VOLUME = "stasis"
MOUNT_PATH = "/stasis"
INIT_CONTAINER = "stasis-init"
PRESTOP_PORT = 9480  # of the agent, on the node's 127.0.0.1
