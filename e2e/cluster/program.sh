#!/usr/bin/env bash
# Build the Go programs that go/NAME pins: what its go.mod lists as tools, from the Go module proxy's sources.
# program.sh NAME... prints one folder a NAME (bin/, and files/ where a build.env names some), each keyed by that
# NAME's own pins, so that a new version of one rebuilds no other.
. "$(dirname "$0")/../../tools/lib.sh"
GO_DIR=$REPO/e2e/cluster/go

build() {
	local name=$1 out=$2 CGO_ENABLED=0 TAGS="" LDFLAGS="" FILES="" PACKAGES=tool
	command -v go >/dev/null || die "Go is needed: 1.21 or newer, which fetches the version that go.mod wants by itself"
	say "building $name from Go modules (once)"
	. "$GO_DIR/$name/build.env"
	cd "$GO_DIR/$name"
	# Sources and objects, 10 GB of them, go when all programs are built (up.sh).
	exec 7>"$CACHE/go.lock"; flock -s 7
	export CGO_ENABLED GOTOOLCHAIN=auto GOWORK=off GOFLAGS="-mod=readonly -modcacherw" GOCACHE=$CACHE/go/build GOMODCACHE=$CACHE/go/mod
	[ "$CGO_ENABLED" = 0 ] || DEBIAN_FRONTEND=noninteractive \
		apt-get install -y -qq --no-install-recommends gcc libc6-dev libseccomp-dev pkg-config >&2
	mkdir -p "$out/bin"
	nice -n 10 go build -trimpath -buildvcs=false -tags "$TAGS" -ldflags "-s -w $(echo $LDFLAGS)" \
		-o "$out/bin/" $PACKAGES >&2 || die "$name does not build"
	if [ -n "$FILES" ]; then
		set -- $FILES
		cp -r "$(go list -m -f '{{.Dir}}' "$1")/$2" "$out/files"
		chmod -R u+w "$out/files"
	fi
	exec 7>&-
}

for name; do
	dir=$CACHE/$name-$(key "$GO_DIR/$name"/*)
	build_once "$dir" build "$name"
	echo "$dir"
done
