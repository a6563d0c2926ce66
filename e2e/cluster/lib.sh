# Shared by the scripts of the e2e cluster: names, addresses, and which Docker daemon to use.
. "$(dirname "${BASH_SOURCE[0]}")/../../tools/lib.sh"
HERE=$REPO/e2e/cluster
CLUSTER=stasis-e2e                      # kind's cluster, its Docker network and that network's bridge on the host
NETWORK=172.30.57.0/24                  # nodes and registry
REGISTRY_IP=172.30.57.2
REGISTRY=$REGISTRY_IP:5000              # as nodes, pods and the host see it
REGISTRY_PUSH=127.0.0.1:5057            # the same, for Docker, which speaks plain HTTP only to the loopback
STATE=$CACHE/cluster                    # kubeconfig; logs
RUN=/run/$CLUSTER                       # what ends with the machine: sockets, PIDs (the paths must be short)
DOCKER_ROOT=$CACHE/docker               # images and layers of the project's own daemon
export KUBECONFIG=$STATE/kubeconfig KIND_EXPERIMENTAL_DOCKER_NETWORK=$CLUSTER
mkdir -p "$STATE"

# locked: only one script at a time changes the cluster; a script called by one that holds the lock passes.
locked() {
	[ -n "${STASIS_E2E_LOCKED:-}" ] && return 0
	exec 8>"$STATE/lock"; flock 8
	export STASIS_E2E_LOCKED=1
}

# trixie DIR PACKAGE...: unpack packages of Debian trixie, whatever the machine runs, and install none.
trixie() {
	local out=$1 tmp apt; shift
	tmp=$(mktemp -d)
	mkdir -p "$tmp/state/lists/partial" "$tmp/cache/archives/partial"
	echo "deb [signed-by=/usr/share/keyrings/debian-archive-keyring.gpg] $(debian_mirror) trixie main" >"$tmp/sources.list"
	# Lists of its own: the machine's suites stay as they are.
	apt=(apt-get -qq -o Dir::Etc::SourceList="$tmp/sources.list" -o Dir::Etc::SourceParts=/dev/null
		-o Dir::State::Lists="$tmp/state/lists" -o Dir::Cache="$tmp/cache" -o APT::Sandbox::User=root)
	"${apt[@]}" update >&2
	(cd "$tmp" && "${apt[@]}" download "$@" >&2) || die "not to be had from Debian trixie: $*"
	for deb in "$tmp"/*.deb; do dpkg-deb -x "$deb" "$out"; done
	rm -rf "$tmp"
}

# The programs of Docker that the project brings where there is no daemon.
fetch_docker() { trixie "$1" docker.io docker-cli containerd; }
DOCKER_PIECE=$CACHE/docker-trixie-$(declare -f fetch_docker trixie | key -)

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
	jobset) "$kubernetes/bin/kubectl" kustomize "$2/files/default" ;;
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
