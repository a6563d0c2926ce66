#!/usr/bin/env bash
# Fetch oras, which the benchmark pushes and pulls with as people do, from Debian trixie. Prints the program's path.
. "$(dirname "$0")/lib.sh"
command -v zstd >/dev/null || DEBIAN_FRONTEND=noninteractive apt-get install -y -qq --no-install-recommends zstd >&2
ORAS=$CACHE/oras-trixie-$({ cat "$0"; declare -f trixie; } | key -)

build() { trixie "$1" oras; }
build_once "$ORAS" build
echo "$ORAS/usr/bin/oras"
