#!/usr/bin/env bash
# Build init, the static program that is PID 1 of prepared containers. Prints the binary's path, which holds the digest
# of its source: a tree that was dumped under one build finds that very build again at its restore.
. "$(dirname "$0")/lib.sh"
SOURCE=$REPO/images/init
VERSION=$(sed -n 's/^version = "\(.*\)"/\1/p' "$REPO/pyproject.toml")
BUILD=$(cat <(echo "$VERSION") "$0" "$SOURCE"/*.[ch] | sha256sum | cut -c1-12)

build() {
	gcc -std=gnu11 -static -s -Os -Wall -Wextra -Werror -DVERSION="\"$VERSION\"" -DBUILD="\"$BUILD\"" \
		-o "$1/init" "$SOURCE"/*.c || die "init does not build"
}
build_once "$CACHE/init-$VERSION-$BUILD" build
echo "$CACHE/init-$VERSION-$BUILD/init"
