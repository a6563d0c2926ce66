#!/usr/bin/env bash
# A root file system with the newest torch of Debian, made once. Of sid: with another day comes another torch, which the
# table of tested versions then refuses until it was looked at: only the full matrices use it. Prints the folder.
. "$(dirname "$0")/../../tools/lib.sh"
SID=$CACHE/rootfs-sid-$(key "$0")

build() {
	say "making the sid root file system with the newest PyTorch (2-3 minutes, 1.5 GB, once)"
	local trixie; trixie=$("$REPO/tools/rootfs.sh")
	# A mirror may lag behind the date until which its list of sid is valid.
	mmdebstrap --variant=minbase --mode=root --aptopt='Acquire::Check-Valid-Until "false"' \
		--include=python3-minimal,python3-torch,python3-numpy sid "$1" "$(debian_mirror)" >"$SID.log" 2>&1 ||
		{ tail -n 20 "$SID.log" >&2; die "mmdebstrap failed"; }
	rm -rf "$1"/var/cache/apt/* "$1"/var/lib/apt/lists/*
	cp "$trixie"/usr/lib/python3/dist-packages/torch_without_libuv.* "$1/usr/lib/python3/dist-packages/"
	chroot "$1" python3 -c 'import torch.distributed' || die "PyTorch does not start in the new root file system"
}
build_once "$SID" build
echo "$SID"
