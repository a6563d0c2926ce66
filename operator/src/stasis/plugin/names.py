"""Annotations by which a user asks for something, beside those of `api.names`."""

from stasis.api.names import GROUP

CHECK = f"{GROUP}/check"  # on a TrainJob: a word of one's own; answered by an Event that carries FINDINGS
FINDINGS = f"{GROUP}/findings"
FROM = f"{GROUP}/from"  # on a suspended TrainJob: NAME[/CURRENT], the checkpoint to resume from in place of CURRENT
SHARE_VOLUMES = f"{GROUP}/share-volumes"  # on a fork, "true": volumes that its live source writes to

KUEUE_QUEUE = "kueue.x-k8s.io/queue-name"
COMPONENT = "app.kubernetes.io/component"
INSTALLED = {"app.kubernetes.io/name": "stasis"}
