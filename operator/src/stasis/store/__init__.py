"""Checkpoints at rest: chunks, packs, index, manifests, in an OCI layout folder or an OCI registry."""
