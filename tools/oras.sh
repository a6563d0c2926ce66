#!/usr/bin/env bash
# Fetch oras, which the benchmark pushes and pulls with as people do, from Debian trixie. Prints the program's path.
. "$(dirname "$0")/lib.sh"
command -v zstd >/dev/null || DEBIAN_FRONTEND=noninteractive apt-get install -y -qq --no-install-recommends zstd >&2
SUITE=trixie
ORAS=$CACHE/oras-$SUITE-$(key "$0")

build() {
	local lists; lists=$(mktemp -d)
	mkdir -p "$lists/state/lists/partial" "$lists/cache/archives/partial"
	echo "deb [signed-by=/usr/share/keyrings/debian-archive-keyring.gpg] $(debian_mirror) $SUITE main" >"$lists/sources.list"
	# Lists of its own: the machine's suites stay as they are.
	local apt=(apt-get -qq -o Dir::Etc::SourceList="$lists/sources.list" -o Dir::Etc::SourceParts=/dev/null
		-o Dir::State::Lists="$lists/state/lists" -o Dir::Cache="$lists/cache" -o APT::Sandbox::User=root)
	"${apt[@]}" update >&2
	(cd "$lists" && "${apt[@]}" download oras >&2 && dpkg-deb -x oras_*.deb "$1") || die "oras is not to be had from $SUITE"
	rm -rf "$lists"
}
build_once "$ORAS" build
echo "$ORAS/usr/bin/oras"
