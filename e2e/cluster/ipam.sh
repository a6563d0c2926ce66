#!/usr/bin/env bash
# Build stasis-ipam (images/cni). Prints the folder it lies in.
. "$(dirname "$0")/../../tools/lib.sh"
SOURCE=$REPO/images/cni
IPAM=$CACHE/stasis-ipam-$(key "$0" "$SOURCE"/*.{go,mod})

build() { (cd "$SOURCE" && CGO_ENABLED=0 GOWORK=off go build -trimpath -buildvcs=false -ldflags '-s -w' -o "$1/stasis-ipam" .) >&2; }
build_once "$IPAM" build
echo "$IPAM"
