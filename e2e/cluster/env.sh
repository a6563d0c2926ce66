#!/usr/bin/env bash
# What a shell or a test needs to use the cluster: eval "$(e2e/cluster/env.sh)" has kubectl, helm, kind and docker.
. "$(dirname "$0")/lib.sh"
pieces=$("$HERE/program.sh" kubernetes helm kind)
path=$(printf '%s/bin:' $pieces)
if [ -n "$OWN_DOCKER" ]; then
	path=$DOCKER_PIECE/usr/bin:$path
	echo "export DOCKER_HOST=$DOCKER_HOST"
fi
echo "export KUBECONFIG=$KUBECONFIG STASIS_E2E_REGISTRY=$REGISTRY STASIS_E2E_REGISTRY_PUSH=$REGISTRY_PUSH"
echo "export PATH=$path\$PATH"
