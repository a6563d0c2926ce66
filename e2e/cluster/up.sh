#!/usr/bin/env bash
# Bring the e2e cluster up and print the path of its kubeconfig. A cluster that is up already, made by these very
# files, is left as it is; anything else, half a cluster included, is taken down first.
. "$(dirname "$0")/lib.sh"
locked
PATH=$("$HERE/docker.sh" up):$PATH
SECONDS=0
step() { say "$* ($SECONDS s)"; }

image=    # kind's own
stock || image=$("$HERE/node-image.sh")
pieces=$("$HERE/program.sh" kind kubernetes cni jobset trainer helm)
read -r kind kubernetes cni jobset trainer helm <<<"$(echo $pieces)"
ipam=$("$HERE/ipam.sh")
layout=$("$HERE/trainer-image.sh")
oras=$("$REPO/tools/oras.sh")
PATH=$kind/bin:$kubernetes/bin:$PATH
made=$(cat "$HERE"/{up,join-network,pod-network,registry,registry-image,volumes}.sh "$HERE"/*.yaml <(echo "$image" "$pieces" "$ipam" "$layout") | key -)
if [ "$(cat "$STATE/made" 2>/dev/null)" = "$made" ] && kubectl get --raw /readyz >/dev/null 2>&1; then
	# kube-proxy 1.36 flushes its maps an hour after its start, or at its next one, and adds only what has changed since.
	for node in $(kind get nodes --name "$CLUSTER"); do
		docker exec "$node" sh -c 'nft delete table ip kube-proxy; nft delete table ip6 kube-proxy' 2>/dev/null || true
	done
	kubectl -n kube-system rollout restart daemonset/kube-proxy >/dev/null
	kubectl -n kube-system rollout status daemonset/kube-proxy --timeout=300s >/dev/null
	echo "$KUBECONFIG"
	exit
fi
"$HERE/down.sh" --keep-docker

# All programs are built: their sources and objects are needed no more.
(flock -xn 7 && rm -rf "$CACHE/go") 7>"$CACHE/go.lock" || true

step "the registry"
[ -z "$(ip route show "$NETWORK")" ] || die "$NETWORK is another network's here: set STASIS_E2E_OCTET, of 172.30.OCTET.0/24"
docker network create --subnet "$NETWORK" -o com.docker.network.bridge.name="$CLUSTER" "$CLUSTER" >/dev/null
"$HERE/registry.sh"
"$oras" cp --no-tty --from-oci-layout "$layout:e2e" --to-plain-http "$REGISTRY_PUSH/stasis-trainer:e2e" >"$STATE/push.log" 2>&1 &
push=$!

step "the nodes"
# A cluster takes some 60 of root's inotify instances, of which a kernel gives 128.
instances=/proc/sys/fs/inotify/max_user_instances
if [ "$(<$instances)" -lt 512 ]; then
	cat $instances >"$STATE/inotify"
	echo 512 >$instances
fi
sed "s|@HERE@|$HERE|" "$HERE/kind.yaml" |
	kind create cluster --name "$CLUSTER" ${image:+--image "$image"} --config - 2>"$STATE/kind.log" 8>&- ||
	{ cat "$STATE/kind.log" >&2; die "kind does not make the cluster"; }

step "the network"
kubectl get nodes -o jsonpath='{range .items[*]}{.metadata.name} {.spec.podCIDR}{"\n"}{end}' |
	while read -r node cidr; do
		docker cp -q "$HERE/pod-network.sh" "$node:/usr/local/bin/pod-network"
		for plugin in "$cni/bin/bridge" "$cni/bin/host-local" "$cni/bin/loopback" "$ipam/stasis-ipam"; do
			docker cp -q "$plugin" "$node:/opt/cni/bin/"
		done
		docker exec -i "$node" sh -s "$cidr" "$REGISTRY" <"$HERE/join-network.sh"
	done
kubectl wait --for=condition=Ready node --all --timeout=300s >/dev/null
wait "$push" || { cat "$STATE/push.log" >&2; die "the training image cannot be pushed"; }

step "JobSet, Trainer and the training image"
workers=$(kubectl get nodes -l '!node-role.kubernetes.io/control-plane' -o name | cut -d/ -f2)
for node in $workers; do    # pulls the image before a test waits for it
	kubectl run "pull-$node" --image "$REGISTRY/stasis-trainer:e2e" --restart=Never --overrides "{\"spec\":{\"nodeName\":\"$node\"}}" -- true
done >/dev/null
[ -z "$image" ] || "$HERE/volumes.sh" $workers
render jobset "$jobset" | kubectl apply --server-side -f - >/dev/null
render trainer "$trainer" | kubectl apply --server-side -f - >/dev/null
for name in kube-system/coredns jobset-system/jobset-controller-manager kubeflow-system/kubeflow-trainer-controller-manager; do
	kubectl -n "${name%/*}" rollout status "deployment/${name#*/}" --timeout=300s >/dev/null
done
sed "s|@REGISTRY@|$REGISTRY|" "$HERE/runtime.yaml" >"$STATE/runtime.yaml"
# Trainer's webhook serves a moment after its pod is ready.
for _ in $(seq 60); do kubectl apply -f "$STATE/runtime.yaml" >/dev/null 2>"$STATE/runtime.log" && break; sleep 1; done
kubectl get clustertrainingruntime torch-e2e >/dev/null || { cat "$STATE/runtime.log" >&2; die "the training runtime is refused"; }
for node in $workers; do
	kubectl wait --for=jsonpath='{.status.phase}'=Succeeded "pod/pull-$node" --timeout=180s >/dev/null
	kubectl delete pod "pull-$node" --wait=false >/dev/null
done
step "the cluster is up"
echo "$made" >"$STATE/made"
echo "$KUBECONFIG"
