#!/usr/bin/env bash
# The image of a registry: this machine's docker-registry program and its libraries. It is started as Docker's own
# `registry` is. Prints its name.
. "$(dirname "$0")/lib.sh"
program=$(command -v docker-registry) || die "docker-registry is needed: run tools/setup.sh"
image=stasis-e2e-registry:$(key "$0" "$program")
if ! docker image inspect "$image" >/dev/null 2>&1; then
	root=$(mktemp -d)
	mkdir -p "$root/etc/docker/registry"
	cat >"$root/etc/docker/registry/config.yml" <<-YAML
		version: 0.1
		log: {level: warn, accesslog: {disabled: true}}
		storage: {filesystem: {rootdirectory: /var/lib/registry}, delete: {enabled: true}}
		http: {addr: ":5000"}
	YAML
	chmod 755 "$root"
	tar -ch -C "$root" . -C / "${program#/}" $(ldd "$program" | grep -o '/[^ ]*' | sed 's|^/||') |
		docker import -c 'VOLUME /var/lib/registry' -c "ENTRYPOINT [\"$program\"]" \
			-c 'CMD ["serve", "/etc/docker/registry/config.yml"]' - "$image" >/dev/null
	rm -r "$root"
fi
echo "$image"
