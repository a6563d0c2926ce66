#!/usr/bin/env bash
# Put an image into the cluster's registry; its name there is printed. image.sh NAME:TAG [FOLDER|DOCKERFILE]
# With a folder or Dockerfile it is built first, from our base where that says FROM debian:trixie-slim.
. "$(dirname "$0")/lib.sh"
locked
PATH=$("$HERE/docker.sh" up):$PATH
name=$1 source=${2:-}
if [ -n "$source" ]; then
	[ -d "$source" ] && source=$source/Dockerfile
	base=$("$HERE/base-image.sh")
	[ "$base" = debian:trixie-slim ] || docker tag "$base" debian:trixie-slim
	DOCKER_BUILDKIT=0 docker build -q --network host -t "$name" -f "$source" "$(dirname "$source")" >&2
fi
docker tag "$name" "$REGISTRY_PUSH/$name"
docker push -q "$REGISTRY_PUSH/$name" >/dev/null
docker image rm "$REGISTRY_PUSH/$name" >/dev/null
echo "$REGISTRY/$name"
