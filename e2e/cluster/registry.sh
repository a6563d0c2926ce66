#!/usr/bin/env bash
# Start the registry: this machine's docker-registry program and its libraries in a container on the nodes' network.
. "$(dirname "$0")/lib.sh"
program=$(command -v docker-registry) || die "docker-registry is needed: run tools/setup.sh"
image=stasis-e2e-registry:$(key "$0" "$program")
if ! docker image inspect "$image" >/dev/null 2>&1; then
	config=$(mktemp)
	cat >"$config" <<-YAML
		version: 0.1
		log: {level: warn, accesslog: {disabled: true}}
		storage: {filesystem: {rootdirectory: /var/lib/registry}, delete: {enabled: true}}
		http: {addr: ":5000"}
	YAML
	tar -ch --transform "s|${config#/}|config.yaml|" -f - -C / "${config#/}" "${program#/}" \
		$(ldd "$program" | grep -o '/[^ ]*' | sed 's|^/||') |
		docker import -c 'VOLUME /var/lib/registry' -c "ENTRYPOINT [\"$program\", \"serve\", \"/config.yaml\"]" - "$image" >/dev/null
	rm "$config"
fi
docker run -d --name "$CLUSTER-registry" --network "$CLUSTER" --ip "$REGISTRY_IP" -p "$REGISTRY_PUSH:5000" "$image" >/dev/null
for _ in $(seq 100); do (exec 3<>"/dev/tcp/${REGISTRY%:*}/${REGISTRY#*:}") 2>/dev/null && exit; sleep 0.1; done
docker logs "$CLUSTER-registry" >&2
die "the registry does not answer"
