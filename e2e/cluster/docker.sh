#!/usr/bin/env bash
# The project's own Docker daemon, for machines that run none: Debian's, unpacked and not installed, with a data
# folder, a socket and a parent cgroup of its own, and no rule in any firewall. docker.sh up | down | wipe
# Prints on `up` the folder with the docker program; wipe also removes all its images.
. "$(dirname "$0")/lib.sh"
programs=$DOCKER_PIECE/usr/bin

alive() { docker version >/dev/null 2>&1; }

# cgroups EXPRESSION...: find(1) over our containers' cgroups, of every hierarchy.
cgroups() { find /sys/fs/cgroup -depth \( -path "*/$CLUSTER" -o -path "*/$CLUSTER/*" \) "$@" 2>/dev/null || true; }

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
		--cgroup-parent "/$CLUSTER" --bridge=none --iptables=false --ip6tables=false --storage-driver overlay2 \
		</dev/null >"$STATE/dockerd.log" 2>&1 8>&- &
	for _ in $(seq 150); do alive && return; sleep 0.2; done
	tail -n 20 "$STATE/dockerd.log" >&2
	die "the Docker daemon does not start (log: $STATE/dockerd.log)"
}

# What a daemon that was killed leaves behind.
sweep() {
	local pid pids
	for pid in $(ours dockerd) $(ours containerd) $(ours containerd-shim); do kill -KILL "$pid" 2>/dev/null || true; done
	for _ in $(seq 100); do
		pids=$(cgroups -name cgroup.procs -exec cat {} + | sort -un)
		[ -n "$pids" ] || break
		kill -KILL $pids 2>/dev/null || true
		thaw "/$CLUSTER/"
		sleep 0.1
	done
	[ -z "$pids" ] || die "processes that cannot be killed: $(echo $pids)"
	unmount_below "$RUN" "$DOCKER_ROOT"
	if ip link show "$CLUSTER" >/dev/null 2>&1; then ip link delete "$CLUSTER"; fi
	cgroups -type d -exec rmdir {} +
	rm -rf --one-file-system "$RUN"
	pgrep -x dockerd >/dev/null || rmdir /run/docker/plugins /run/docker /run/containerd/s /run/containerd /lib/modules 2>/dev/null || true
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
wipe) [ -z "$OWN_DOCKER" ] || { down; rm -rf --one-file-system "$DOCKER_ROOT"; } ;;
*) die "usage: docker.sh up | down | wipe" ;;
esac
