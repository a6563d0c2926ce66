#!/bin/sh
# Runs on every node when it boots: one link over all nodes (VXLAN), of which the pods' bridge is the node's end. Any
# pod address can so be on any node. What leaves the link goes out as the node.
set -e
if ! ip link show cni0 >/dev/null 2>&1; then
	ip link add cni0 type bridge
	ip link set cni0 mtu 1450 up
	ip link add pods type vxlan id 57 group 239.5.7.57 dev eth0 dstport 4789
	ip link set pods mtu 1450 master cni0 up
fi
nft -f - <<NFT
table ip pod-network
delete table ip pod-network
table ip pod-network {
	chain leaving {
		type nat hook postrouting priority srcnat;
		ip saddr 10.245.0.0/16 oifname "eth0" masquerade
	}
}
NFT
