#!/usr/bin/env bash
# Take the e2e cluster down, whole or half, and the project's own Docker daemon with it. What was built stays cached.
. "$(dirname "$0")/lib.sh"
locked
keep=
[ "${1:-}" = --keep-docker ] && keep=1

# Containers may be left though their daemon was killed: a new one knows them from its folder.
if [ -z "$OWN_DOCKER" ] || [ -d "$RUN" ] || [ -n "$(ls "$DOCKER_ROOT/containers" 2>/dev/null)" ]; then
	programs=$("$HERE/docker.sh" up) || { "$HERE/docker.sh" wipe; programs=$("$HERE/docker.sh" up); }
	PATH=$programs:$PATH
	containers=$(docker ps -aq --no-trunc --filter "label=io.x-k8s.kind.cluster=$CLUSTER"
		docker ps -aq --no-trunc --filter "name=^$CLUSTER-registry\$")
	for container in $containers; do thaw "$container"; done
	[ -z "$containers" ] || docker rm -fv $containers >/dev/null
	if docker network inspect "$CLUSTER" >/dev/null 2>&1; then docker network rm "$CLUSTER" >/dev/null; fi
	if [ -n "$OWN_DOCKER" ] && [ -z "$keep" ]; then
		# Images of old builds; what takes long to make bears the label.
		docker image prune -af --filter until=24h --filter 'label!=stasis.dev/e2e' >/dev/null
		"$HERE/docker.sh" down
	fi
fi
if [ -s "$STATE/inotify" ]; then cat "$STATE/inotify" >/proc/sys/fs/inotify/max_user_instances; fi
unmount_below "$STATE"
rm -rf --one-file-system "$STATE"/{made,inotify} "$STATE/node" "$STATE/base" "$KUBECONFIG"
