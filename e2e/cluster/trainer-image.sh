#!/usr/bin/env bash
# The training image of the e2e tests, of the root file system that all training containers start from: an OCI layout
# folder with one zstd layer. Prints the folder; the image's tag in it is `e2e`.
. "$(dirname "$0")/lib.sh"
ROOTFS=$("$REPO/tools/rootfs.sh")
ORAS=$("$REPO/tools/oras.sh")
LAYOUT=$CACHE/trainer-image-$(cat "$0" <(echo "$ROOTFS") | key -)

build() {
	local out=$1
	say "making the training image (half a minute, once)"
	tar -C "$ROOTFS" --numeric-owner --exclude './dev/*' -c . | tee >(sha256sum | cut -d' ' -f1 >"$out/diff") |
		zstd -q -3 -T0 -o "$out/layer"
	# tee does not wait for sha256sum
	until [ -s "$out/diff" ]; do sleep 0.1; done
	printf '{"architecture":"amd64","os":"linux","config":{"Env":["PATH=/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin"],"Cmd":["python3"]},"rootfs":{"type":"layers","diff_ids":["sha256:%s"]}}' \
		"$(cat "$out/diff")" >"$out/config"
	(cd "$out" && "$ORAS" push --oci-layout .:e2e --config config:application/vnd.oci.image.config.v1+json \
		layer:application/vnd.oci.image.layer.v1.tar+zstd >&2 && rm config diff layer)
}
build_once "$LAYOUT" build
echo "$LAYOUT"
