#!/usr/bin/env bash
# Start the registry in a container on the nodes' network.
. "$(dirname "$0")/lib.sh"
image=$("$HERE/registry-image.sh")
docker run -d --name "$CLUSTER-registry" --network "$CLUSTER" --ip "$REGISTRY_IP" -p "$REGISTRY_PUSH:5000" "$image" >/dev/null
for _ in $(seq 100); do (exec 3<>"/dev/tcp/${REGISTRY%:*}/${REGISTRY#*:}") 2>/dev/null && exit; sleep 0.1; done
docker logs "$CLUSTER-registry" >&2
die "the registry does not answer"
