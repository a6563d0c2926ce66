"""Labels by which others' objects, and our installation's, are told."""

KUEUE_QUEUE = "kueue.x-k8s.io/queue-name"
COMPONENT = "app.kubernetes.io/component"
INSTALLED = {"app.kubernetes.io/name": "stasis"}
