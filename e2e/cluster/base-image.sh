#!/usr/bin/env bash
# The Debian that the product's images are built from where no image registry can be reached: made from packages, with
# this machine's certificates, which its package mirrors may need. Prints the image's name.
. "$(dirname "$0")/lib.sh"
locked
PATH=$("$HERE/docker.sh" up):$PATH
if stock; then echo debian:trixie-slim; exit; fi
certificates=${SSL_CERT_FILE:-/etc/ssl/certs/ca-certificates.crt}
image=stasis-e2e-base:$(key "$0" "$certificates")
if ! docker image inspect "$image" >/dev/null 2>&1; then
	say "making the Debian base image (half a minute, once)"
	root=$STATE/base
	unmount_below "$root"; rm -rf --one-file-system "$root"
	mmdebstrap --variant=minbase --mode=root trixie "$root" "$(debian_mirror)" >"$STATE/base.log" 2>&1 ||
		{ tail -n 20 "$STATE/base.log" >&2; die "mmdebstrap failed"; }
	rm -rf "$root"/var/cache/apt/* "$root"/var/lib/apt/lists/* "$root"/usr/share/{doc,man,locale}
	# Not below /etc/ssl, which the package ca-certificates writes.
	install -Dm644 "$certificates" "$root/usr/local/share/host-certificates.crt"
	tar -C "$root" --numeric-owner --exclude './dev/*' -c . | docker import -c 'LABEL stasis.dev/e2e=base' -c 'CMD ["bash"]' \
		-c 'ENV PIP_CERT=/usr/local/share/host-certificates.crt' -c 'ENV SSL_CERT_FILE=/usr/local/share/host-certificates.crt' - "$image" >/dev/null
	rm -rf --one-file-system "$root"
fi
echo "$image"
