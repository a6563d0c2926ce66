# Shared by the scripts of the e2e cluster: names, addresses, and which Docker daemon to use.
. "$(dirname "${BASH_SOURCE[0]}")/../../tools/lib.sh"
HERE=$REPO/e2e/cluster
CLUSTER=${STASIS_E2E_CLUSTER:-stasis-e2e}    # kind's cluster, its Docker network and that network's bridge on the host
OCTET=${STASIS_E2E_OCTET:-57}                # two clusters on one machine differ in name and octet
NETWORK=172.30.$OCTET.0/24                   # nodes and registry
REGISTRY_IP=172.30.$OCTET.2
REGISTRY=$REGISTRY_IP:5000                   # as nodes, pods and the host see it
REGISTRY_PUSH=127.0.0.1:$((5000 + OCTET))    # the same, for Docker, which speaks plain HTTP only to the loopback
STATE=$CACHE/cluster${STASIS_E2E_CLUSTER:+-$CLUSTER}      # kubeconfig; logs
DOCKER_ROOT=$CACHE/docker${STASIS_E2E_CLUSTER:+-$CLUSTER} # images and layers of the project's own daemon
RUN=/run/$CLUSTER                            # what ends with the machine: sockets, PIDs (the paths must be short)
export KUBECONFIG=$STATE/kubeconfig KIND_EXPERIMENTAL_DOCKER_NETWORK=$CLUSTER
mkdir -p "$STATE"

# locked: only one script at a time changes the cluster; a script called by one that holds the lock passes.
locked() {
	[ -n "${STASIS_E2E_LOCKED:-}" ] && return 0
	exec 8>"$STATE/lock"; flock 8
	export STASIS_E2E_LOCKED=1
}

# thaw PART: thaw each cgroup whose path contains PART. A test may leave frozen processes, which no signal ends.
thaw() {
	local file
	find /sys/fs/cgroup -path "*$1*" \( -name freezer.state -o -name cgroup.freeze \) 2>/dev/null | while read -r file; do
		case $file in
		*/freezer.state) echo THAWED >"$file" ;;
		*) echo 0 >"$file" ;;
		esac
	done 2>/dev/null || true
}

# unmount_below DIR...: what a killed build or daemon left mounted.
unmount_below() {
	local dir mount
	for dir; do
		awk -v dir="$dir/" 'index($2, dir) == 1 {print $2}' /proc/self/mounts | sort -r |
			while read -r mount; do umount -l "$mount" || true; done
	done
}

# The programs of Docker that the project brings where there is no daemon.
fetch_docker() { trixie "$1" docker.io docker-cli containerd; }
DOCKER_PIECE=$CACHE/docker-trixie-$(declare -f fetch_docker trixie | key -)

# stock: whether kind's and Debian's own images are to be had. STASIS_E2E_STOCK=yes|no decides, else a quick try. The
# project's own daemon lays no way out of its networks, so that its nodes could pull nothing.
stock() {
	case ${STASIS_E2E_STOCK:-} in
	yes) return 0 ;;
	no) return 1 ;;
	esac
	[ -z "$OWN_DOCKER" ] && timeout 5 docker manifest inspect debian:trixie-slim >/dev/null 2>&1
}

# bin NAME: the folder of the programs that go/NAME pins.
bin() { echo "$("$HERE/program.sh" "$1")/bin"; }

# The daemon that runs already, if there is one; else the project's own, which docker.sh starts.
if [ -S "$RUN/docker.sock" ] || ! docker info >/dev/null 2>&1; then
	OWN_DOCKER=1
	export DOCKER_HOST=unix://$RUN/docker.sock
else
	OWN_DOCKER=
fi

# render NAME DIR: the manifests of JobSet or Trainer as their makers ship them (DIR: the built piece).
render() {
	case $1 in
	jobset) "$kubernetes/bin/kubectl" kustomize "$2/files/default" 2>/dev/null ;;
	trainer)
		# Its overlay fetches JobSet from the network, which is installed here by itself.
		local copy; copy=$(mktemp -d)
		cp -r "$2/files/." "$copy"
		sed -i '/third-party\/jobset/d' "$copy/overlays/manager/kustomization.yaml"
		"$kubernetes/bin/kubectl" kustomize "$copy/overlays/manager"
		rm -rf "$copy"
		;;
	esac
}
