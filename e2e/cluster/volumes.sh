#!/usr/bin/env bash
# Persistent volumes for claims of the default class, folders on the nodes: kind's stock image has a provisioner for
# that, which is not to be had as a Go module. volumes.sh NODE...
. "$(dirname "$0")/lib.sh"
{
	cat <<-YAML
		apiVersion: storage.k8s.io/v1
		kind: StorageClass
		metadata: {name: standard, annotations: {storageclass.kubernetes.io/is-default-class: "true"}}
		provisioner: kubernetes.io/no-provisioner
		volumeBindingMode: WaitForFirstConsumer
	YAML
	for node; do
		for i in 1 2 3 4 5 6 7 8; do
			cat <<-YAML
				---
				apiVersion: v1
				kind: PersistentVolume
				metadata: {name: $node-$i}
				spec:
				  capacity: {storage: 100Gi}
				  accessModes: [ReadWriteOnce]
				  storageClassName: standard
				  local: {path: /var/local/volumes/$i}
				  nodeAffinity: {required: {nodeSelectorTerms: [{matchExpressions: [{key: kubernetes.io/hostname, operator: In, values: [$node]}]}]}}
			YAML
		done
	done
} | { kubectl delete storageclass standard --ignore-not-found >/dev/null; kubectl apply -f - >/dev/null; }
