#!/usr/bin/env bash
# Build CRIU from its pinned source and bundle it with its libraries and loader, so that it runs inside any container.
# Prints the bundle's folder: criu, ld-linux-x86-64.so.2, *.so.*, lib/ (empty), images.desc (protobuf descriptors).
. "$(dirname "$0")/lib.sh"
VERSION=4.2.1
SHA256=29ec0ee09e296479fe7048c80980e8ef1d0684d0b0204c2b101dfea19f6725b9
PATCHES=($REPO/tools/criu-orphans.patch $REPO/tools/criu-programs.patch)
BUNDLE=$CACHE/criu-$VERSION-$(key "$0" "${PATCHES[@]}")
PACKAGES="gcc make patch pkg-config xz-utils python3 libc6-dev libprotobuf-dev libprotobuf-c-dev protobuf-c-compiler
	protobuf-compiler libnl-3-dev libcap-dev libnet1-dev uuid-dev libbsd-dev libnftables-dev libgnutls28-dev"

build() {
	local out=$1 src
	say "building CRIU $VERSION (about a minute, once)"
	DEBIAN_FRONTEND=noninteractive apt-get install -y -qq --no-install-recommends $PACKAGES >&2
	src=$(mktemp -d)
	/usr/lib/apt/apt-helper download-file "$(debian_mirror)pool/main/c/criu/criu_$VERSION.orig.tar.xz" \
		"$src/criu.tar.xz" "SHA256:$SHA256" >&2
	tar -C "$src" --strip-components=1 -xf "$src/criu.tar.xz"
	cat "${PATCHES[@]}" | patch -s -d "$src" -p1
	# RUNDIR: CRIU keeps a cache there, and runs in a tenant's mount namespace. /proc/criu can never be.
	make -C "$src" -j"$(nproc)" RUNDIR=/proc/criu criu >"$src/build.log" 2>&1 || { tail -n 40 "$src/build.log" >&2; die "CRIU does not build"; }
	install -s "$src/criu/criu" "$out/criu"
	ldd "$out/criu" | awk '$2 == "=>" {print $3} /ld-linux/ {print $1}' | xargs -r cp -L -t "$out"
	# The loader reads these two whatever it is told, and would run a tenant's libraries with our privileges.
	sed -i 's|/etc/ld\.so\.preload|/proc/criu/preload|; s|/etc/ld\.so\.cache|/proc/criu/cache|' "$out/ld-linux-x86-64.so.2"
	if grep -q /etc/ld.so "$out"/*; then die "the loader of CRIU's bundle reads files of the container's"; fi
	mkdir "$out/lib"    # CRIU's --lib: empty on purpose, so that no plugin of a container is ever loaded
	(cd "$src/images" && protoc --include_imports --descriptor_set_out="$out/images.desc" -I. -I.. ./*.proto) ||
		die "no descriptors of CRIU's images"
	cp "$src/COPYING" "$out/COPYING"
	chmod -R a+rX "$out"
	rm -rf "$src"
}
build_once "$BUNDLE" build
echo "$BUNDLE"
