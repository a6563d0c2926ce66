#!/usr/bin/env bash
# Everything that development, tests and the demo need on a Debian machine: packages, the Python environment, CRIU,
# the training root file system. Idempotent; what is built goes into a cache outside the repository.
# Prints the Python interpreter to use on its last line.
. "$(dirname "$0")/lib.sh"
[ "$(id -u)" = 0 ] || die "Stasis freezes, dumps and restores processes of containers: run this as root"
[ -f /etc/debian_version ] || die "this script knows Debian only; see CONTRIBUTING.md for what is needed elsewhere"

PACKAGES="ca-certificates curl docker-registry gcc git iproute2 iptables jq libc6-dev libnftables1 make nftables openssl python3 python3-venv
	runc util-linux xz-utils mmdebstrap libprotobuf-c1 libnl-3-200 libnet1"
missing=$(for p in $PACKAGES; do dpkg-query -W -f='${Status}' "$p" 2>/dev/null | grep -q 'ok installed' || echo "$p"; done)
if [ -n "$missing" ]; then
	say "installing $(echo $missing)"
	apt-get update -qq >&2
	DEBIAN_FRONTEND=noninteractive apt-get install -y -qq --no-install-recommends $missing >&2
elif [ -z "$(ls /var/lib/apt/lists 2>/dev/null | grep -v partial)" ]; then
	apt-get update -qq >&2
fi

venv() {
	say "making the Python environment"
	python3 -m venv "$1" && "$1/bin/pip" install -q --disable-pip-version-check -r "$REPO/requirements.lock" >&2
}
VENV=$CACHE/venv-$(key "$REPO/requirements.lock")
build_once "$VENV" venv
"$REPO/tools/criu.sh" >/dev/null
"$REPO/tools/rootfs.sh" >/dev/null
"$REPO/tools/init.sh" >/dev/null
echo "$VENV/bin/python"
