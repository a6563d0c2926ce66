#!/usr/bin/env bash
# Build the library that stands in for CAP_SYS_RESOURCE in tests (tests/support/prlimit_shim.c). Prints its path.
. "$(dirname "$0")/lib.sh"
SOURCE=$REPO/tests/support/prlimit_shim.c
SHIM=$CACHE/prlimit-shim-$(key "$0" "$SOURCE")

build() {
	gcc -std=gnu11 -shared -fPIC -O2 -s -Wall -Wextra -Werror -o "$1/prlimit_shim.so" "$SOURCE" || die "the shim does not build"
}
build_once "$SHIM" build
echo "$SHIM/prlimit_shim.so"
