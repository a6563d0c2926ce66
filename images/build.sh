#!/usr/bin/env bash
# Build the product's images with Docker. images/build.sh [PREFIX [TAG]] prints their names: PREFIX-operator:TAG,
# PREFIX-agent:TAG, PREFIX-init:TAG; PREFIX is `stasis` by default, TAG the version. BASE is what they are made from
# (debian:trixie-slim). Works with the classic builder too (DOCKER_BUILDKIT=0).
. "$(dirname "$0")/../tools/lib.sh"
prefix=${1:-stasis}
tag=${2:-$(sed -n 's/^version = "\(.*\)"/\1/p' "$REPO/pyproject.toml")}
criu=$("$REPO/tools/criu.sh")
init=$("$REPO/tools/init.sh")
context=$(mktemp -d)
trap 'rm -rf "$context"' EXIT

# image NAME ARGUMENT...: build it from what lies in the context by then, and from nothing else.
image() {
	local name=$1; shift
	docker build -q --network host -t "$prefix-$name:$tag" "$@" -f "$REPO/images/$name/Dockerfile" "$context" >"$context.log" 2>&1 ||
		{ cat "$context.log" >&2; rm "$context.log"; die "the image $name does not build"; }
	rm "$context.log"
	find "$context" -mindepth 1 -delete
	echo "$prefix-$name:$tag"
}

cp "$REPO"/{pyproject.toml,requirements.lock,README.md,LICENSE} "$context/"
tar -C "$REPO" --exclude __pycache__ -c operator | tar -C "$context" -x
image operator --build-arg BASE="${BASE:-debian:trixie-slim}"
mkdir "$context/bundle"
cp -r "$criu" "$(dirname "$init")" "$context/bundle/"
image agent --build-arg OPERATOR="$prefix-operator:$tag"
cp "$init" "$context/init"
image init
