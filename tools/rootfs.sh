#!/usr/bin/env bash
# The root file system that training containers start from: Debian trixie with CPU PyTorch, made once.
# It is another distribution than the host on purpose: nothing of the host's libraries may be needed in a container.
. "$(dirname "$0")/lib.sh"
SUITE=trixie
ROOTFS=$CACHE/rootfs-$SUITE-$(key "$0")

build() {
	say "making the $SUITE root file system with PyTorch (1-2 minutes, 1.3 GB, once)"
	command -v mmdebstrap >/dev/null || DEBIAN_FRONTEND=noninteractive apt-get install -y -qq --no-install-recommends mmdebstrap >&2
	mmdebstrap --variant=minbase --mode=root --include=python3-minimal,python3-torch,python3-numpy,iproute2,util-linux \
		"$SUITE" "$1" "$(debian_mirror)" >"$ROOTFS.log" 2>&1 || { tail -n 20 "$ROOTFS.log" >&2; die "mmdebstrap failed"; }
	rm -rf "$1"/var/cache/apt/* "$1"/var/lib/apt/lists/*
	# Debian's torch is built without libuv, and torchrun of 2.6 asks for it all the same.
	cat >"$1/usr/lib/python3/dist-packages/torch_without_libuv.py" <<-'PY'
	import importlib.abc, importlib.util, sys


	class NoLibuv(importlib.abc.MetaPathFinder):
	    """Make use_libuv=False the default of torch's TCPStore: Debian builds torch without libuv."""

	    def find_spec(self, name, path, target=None):
	        if name != "torch.distributed":
	            return None
	        sys.meta_path.remove(self)
	        spec = importlib.util.find_spec(name)
	        run = spec.loader.exec_module

	        def exec_module(module):
	            run(module)
	            init = module.TCPStore.__init__
	            module.TCPStore.__init__ = lambda s, *a, **k: init(s, *a, **{**k, "use_libuv": False})

	        spec.loader.exec_module = exec_module
	        return spec


	sys.meta_path.insert(0, NoLibuv())
	PY
	echo 'import torch_without_libuv' >"$1/usr/lib/python3/dist-packages/torch_without_libuv.pth"
	chroot "$1" python3 -c 'import torch.distributed' || die "PyTorch does not start in the new root file system"
}
build_once "$ROOTFS" build
echo "$ROOTFS"
