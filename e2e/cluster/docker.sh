#!/usr/bin/env bash
# The project's own Docker daemon, for machines that run none: Debian's, unpacked and not installed, with a data
# folder, a socket and a parent cgroup of its own, and no rule in any firewall. docker.sh up | down
# Prints on `up` the folder with the docker program.
. "$(dirname "$0")/lib.sh"
CGROUP=/$CLUSTER

programs=$DOCKER_PIECE/usr/bin

pids_below() { find /sys/fs/cgroup -path "*$CGROUP/*" -name cgroup.procs -exec cat {} + 2>/dev/null | sort -un; }
alive() { docker version >/dev/null 2>&1; }

# ours PROGRAM: the PIDs of that program that run out of our folders.
ours() {
	local pid
	for pid in $(pgrep -x "$1"); do
		if tr '\0' ' ' <"/proc/$pid/cmdline" 2>/dev/null | grep -q -- "$RUN/"; then echo "$pid"; fi
	done
}

up() {
	build_once "$DOCKER_PIECE" fetch_docker
	PATH=$programs:$PATH
	alive && return
	sweep
	mkdir -p "$RUN/bin" "$DOCKER_ROOT"
	ln -sf "$(bin runc)/runc" "$RUN/bin/runc"    # Debian trixie's wants a newer libc than bookworm has
	PATH=$RUN/bin:$DOCKER_PIECE/usr/sbin:$PATH setsid dockerd --data-root "$DOCKER_ROOT" --exec-root "$RUN/exec" \
		--pidfile "$RUN/docker.pid" -H "$DOCKER_HOST" --exec-opt native.cgroupdriver=cgroupfs \
		--cgroup-parent "$CGROUP" --bridge=none --iptables=false --ip6tables=false --storage-driver overlay2 \
		</dev/null >"$STATE/dockerd.log" 2>&1 8>&- &
	for _ in $(seq 150); do alive && return; sleep 0.2; done
	tail -n 20 "$STATE/dockerd.log" >&2
	die "the Docker daemon does not start (log: $STATE/dockerd.log)"
}

# What a daemon leaves behind that was killed, or whose machine's scripts were.
sweep() {
	local pid link
	for pid in $(ours dockerd) $(ours containerd) $(ours containerd-shim); do kill -KILL "$pid" 2>/dev/null || true; done
	while [ -n "$(pids_below)" ]; do
		for pid in $(pids_below); do kill -KILL "$pid" 2>/dev/null || true; done
		sleep 0.1
	done
	awk -v a="$RUN/" -v b="$DOCKER_ROOT/" 'index($2, a) == 1 || index($2, b) == 1 {print $2}' /proc/self/mounts | sort -r |
		while read -r mount; do umount -l "$mount" || true; done
	if ip link show "$CLUSTER" >/dev/null 2>&1; then ip link delete "$CLUSTER"; fi
	find /sys/fs/cgroup -depth -path "*$CGROUP*" -type d -exec rmdir {} + 2>/dev/null || true
	rm -rf --one-file-system "$RUN"
	rmdir /run/docker/plugins /run/docker /run/containerd/s /run/containerd 2>/dev/null || true
}

down() {
	local pid
	pid=$(cat "$RUN/docker.pid" 2>/dev/null || true)
	if [ -n "$pid" ] && kill "$pid" 2>/dev/null; then
		for _ in $(seq 100); do kill -0 "$pid" 2>/dev/null || break; sleep 0.1; done
	fi
	sweep
}

locked
case ${1:-} in
up) if [ -n "$OWN_DOCKER" ]; then up; echo "$programs"; else dirname "$(command -v docker)"; fi ;;
down) [ -z "$OWN_DOCKER" ] || down ;;
*) die "usage: docker.sh up | down" ;;
esac
