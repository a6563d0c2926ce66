#!/usr/bin/env bash
# Build the product's images as a user would (images/build.sh) and put them into the cluster's registry, with the
# registry's own image, which Stasis' chart installs too. Prints their names there.
. "$(dirname "$0")/lib.sh"
locked
PATH=$("$HERE/docker.sh" up):$PATH
# A tag names what the images were made of: pods take the new ones, and what is there is not built again.
made=$(cd "$REPO" && git ls-files -co --exclude-standard operator images tools requirements.lock pyproject.toml | sort | xargs cat | key -)
there() { curl -sfo /dev/null "http://$REGISTRY/v2/$1/manifests/$2" -H 'Accept: application/vnd.docker.distribution.manifest.v2+json'; }
if ! there stasis-init "$made"; then
	BASE=$("$HERE/base-image.sh")
	for image in $(BASE=$BASE DOCKER_BUILDKIT=0 "$REPO/images/build.sh" stasis "$made"); do "$HERE/image.sh" "$image" >&2; done
fi
if ! there registry e2e; then
	docker tag "$("$HERE/registry-image.sh")" registry:e2e
	"$HERE/image.sh" registry:e2e >&2
fi
for name in operator agent init; do echo "$REGISTRY/stasis-$name:$made"; done
echo "$REGISTRY/registry:e2e"
