#!/bin/sh
# Run in a node by up.sh: give it its range of the flat pod network, and have the network laid at every boot.
# join-network.sh POD_CIDR (a.b.c.0/24) REGISTRY
set -e
prefix=${1%.0/24}
chmod 755 /usr/local/bin/pod-network /opt/cni/bin/*
cat >/etc/systemd/system/pod-network.service <<-UNIT
	[Unit]
	Before=kubelet.service
	[Service]
	Type=oneshot
	RemainAfterExit=true
	ExecStart=/usr/local/bin/pod-network
	[Install]
	WantedBy=multi-user.target
UNIT
systemctl --quiet enable --now pod-network.service
mkdir -p "/etc/containerd/certs.d/$2" /etc/cni/net.d
printf 'server = "http://%s"\n' "$2" >"/etc/containerd/certs.d/$2/hosts.toml"
cat >/etc/cni/net.d/10-pods.conflist.new <<-JSON
	{"cniVersion": "1.0.0", "name": "pods", "plugins": [{
	  "type": "bridge", "bridge": "cni0", "isGateway": true, "hairpinMode": true, "mtu": 1450,
	  "capabilities": {"io.kubernetes.cri.pod-annotations": true},
	  "ipam": {"type": "stasis-ipam", "routes": [{"dst": "0.0.0.0/0"}], "ranges": [[
	    {"subnet": "10.245.0.0/16", "rangeStart": "$prefix.2", "rangeEnd": "$prefix.254", "gateway": "$prefix.1"}]]}
	}]}
JSON
mv /etc/cni/net.d/10-pods.conflist.new /etc/cni/net.d/10-pods.conflist
# Folders for the volumes of volumes.yaml
for i in 1 2 3 4 5 6 7 8; do mkdir -p "/var/local/volumes/$i"; chmod 777 "/var/local/volumes/$i"; done
