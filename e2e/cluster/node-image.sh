#!/usr/bin/env bash
# The image of kind's nodes, made without any image registry: Debian trixie, kind's own files, programs built from Go
# modules, and the images of the control plane, JobSet and Trainer already in containerd's store. Prints its name.
. "$(dirname "$0")/lib.sh"
locked
PATH=$("$HERE/docker.sh" up):$PATH
pieces=$("$HERE/program.sh" kubernetes etcd containerd runc cni coredns kind jobset trainer)
read -r kubernetes etcd containerd runc cni coredns kind jobset trainer <<<"$(echo $pieces)"
IMAGE=stasis-e2e-node:$(cat "$0" "$HERE/pause.c" <(echo "$pieces") | key -)
if docker image inspect "$IMAGE" >/dev/null 2>&1; then echo "$IMAGE"; exit; fi

say "making the image of the nodes (about a minute, once)"
work=$STATE/node; root=$work/root
unmount_below "$work"; rm -rf --one-file-system "$work"; mkdir -p "$root" "$work/images" "$work/state"
command -v mmdebstrap >/dev/null || die "mmdebstrap is needed: run tools/setup.sh"
mmdebstrap --variant=minbase --mode=root --include=systemd,conntrack,iptables,nftables,iproute2,ethtool,util-linux,mount,kmod,libseccomp2,bash,ca-certificates,curl,jq,procps \
	trixie "$root" "$(debian_mirror)" >"$work/mmdebstrap.log" 2>&1 || { tail -n 20 "$work/mmdebstrap.log" >&2; die "mmdebstrap failed"; }
rm -rf "$root"/var/cache/apt/* "$root"/var/lib/apt/lists/* "$root"/usr/share/{doc,man,locale}

# As in kind's Dockerfile of its base image: its files and their modes, then its RUN lines.
cp -r "$kind/files/etc" "$kind/files/kind" "$root/"
cp "$kind"/files/usr/local/bin/* "$root/usr/local/bin/"
(cd "$kind/files" && find etc -type f) | (cd "$root" && xargs chmod 644)
chmod 755 "$root"/usr/local/bin/* "$root"/kind "$root"/kind/bin "$root"/kind/bin/*
(
	cd "$root"
	rm -f lib/systemd/system/sysinit.target.wants/systemd-tmpfiles-setup.service lib/systemd/system/multi-user.target.wants/* \
		etc/systemd/system/*.wants/* lib/systemd/system/local-fs.target.wants/* lib/systemd/system/basic.target.wants/* \
		lib/systemd/system/sockets.target.wants/*{udev,initctl}*
	echo "ReadKMsg=no" >>etc/systemd/journald.conf
	ln -sf /usr/lib/systemd/systemd sbin/init
	mkdir -p etc/kubernetes/manifests opt/cni/bin kind/manifests lib/modules
	cp "$containerd"/bin/* usr/local/bin/
	cp "$runc/bin/runc" usr/local/sbin/
	cp "$kubernetes"/bin/{kubeadm,kubelet,kubectl} usr/bin/
	cp "$cni"/bin/* opt/cni/bin/
	"$kubernetes/bin/kubeadm" version -o short | tr -d '\n' >kind/version
)
chroot "$root" systemctl --quiet enable kubelet.service containerd.service undo-mount-hacks.service 2>/dev/null    # 'no /proc'
chroot "$root" systemctl --quiet mask systemd-binfmt.service 2>/dev/null
"$containerd/bin/ctr" oci spec | jq '.hooks.createContainer += [{path: "/kind/bin/mount-product-files.sh"}] | del(.process.rlimits)' \
	>"$root/etc/containerd/cri-base.json"
# A machine without CAP_SYS_RESOURCE cannot lower an oom_score_adj.
sed -i 's/restrict_oom_score_adj = false/restrict_oom_score_adj = true/' "$root/etc/containerd/config.toml"

# image NAME OPTION...: what lies in $work/image becomes the image NAME.
images=()
image() {
	local name=$1; shift
	tar -C "$work/image" --owner=0 --group=0 --numeric-owner --mtime=@0 -c . | docker import "$@" - "$name" >/dev/null
	images+=("$name")
	rm -rf "$work/image"; mkdir -p "$work/image"/{tmp,etc}
}
path='ENV PATH=/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin'

images_of() { render "$1" "$2" | sed -n "s|^ *\(- \)\?image: ||p" | sort -u; }
mkdir -p "$work/image"/{tmp,etc}
gcc -Os -static -s -o "$work/pause" "$HERE/pause.c"
version=$(<"$root/kind/version")
for name in $("$kubernetes/bin/kubeadm" config images list --kubernetes-version "$version") registry.k8s.io/pause:3.10; do
	case $name in
	*/etcd:*) install -D "$etcd/bin/server" "$work/image/usr/local/bin/etcd"; image "$name" -c "$path" ;;
	*/coredns:*) install "$coredns/bin/coredns" "$work/image/coredns"; image "$name" -c 'ENTRYPOINT ["/coredns"]' ;;
	*/pause:*) install "$work/pause" "$work/image/pause"; image "$name" -c 'ENTRYPOINT ["/pause"]' ;;
	*)
		program=${name##*/}; program=${program%:*}
		install -D "$kubernetes/bin/$program" "$work/image/usr/local/bin/$program"
		if [ "$program" = kube-proxy ]; then    # drives nft
			chroot "$root" sh -c 'tar -ch /usr/sbin/nft $(ldd /usr/sbin/nft | grep -o "/[^ ]*")' 2>/dev/null | tar -C "$work/image" -x
		fi
		image "$name" -c "$path"
		;;
	esac
done
install "$jobset/bin/jobset" "$work/image/manager"
image "$(images_of jobset "$jobset")" -c 'ENTRYPOINT ["/manager"]' -c 'USER 65532:65532'
install "$trainer/bin/trainer-controller-manager" "$work/image/manager"
image "$(images_of trainer "$trainer")" -c 'ENTRYPOINT ["/manager"]' -c 'USER 65532:65532'

# A containerd of this machine whose root is the one within the image.
cat >"$work/containerd.toml" <<-TOML
	version = 3
	root = "$root/var/lib/containerd"
	state = "$work/state"
	disabled_plugins = ["io.containerd.grpc.v1.cri", "io.containerd.cri.v1.images", "io.containerd.cri.v1.runtime", "io.containerd.nri.v1.nri"]
	[grpc]
	  address = "$work/containerd.sock"
	[ttrpc]
	  address = "$work/containerd.sock.ttrpc"
TOML
setpriv --pdeathsig KILL "$containerd/bin/containerd" --config "$work/containerd.toml" >"$work/containerd.log" 2>&1 8>&- &
daemon=$!
for _ in $(seq 100); do [ -S "$work/containerd.sock" ] && break; sleep 0.1; done
docker save "${images[@]}" | "$containerd/bin/ctr" -a "$work/containerd.sock" -n k8s.io images import \
	--all-platforms --no-unpack --digests --label io.cri-containerd.pinned=pinned - >"$work/import.log" 2>&1 ||
	{ cat "$work/import.log" >&2; die "the images cannot be preloaded"; }
"$containerd/bin/ctr" -a "$work/containerd.sock" -n k8s.io images ls -q >"$work/preloaded" 2>/dev/null
for name in "${images[@]}"; do grep -qxF "$name" "$work/preloaded" || die "not preloaded: $name"; done
kill "$daemon"; wait "$daemon" || true
docker image rm "${images[@]}" >/dev/null
old=$(docker image ls -q stasis-e2e-node)
[ -z "$old" ] || docker image rm $old >/dev/null 2>&1 || true    # one that runs stays
tar -C "$root" --numeric-owner -c . | docker import -c 'LABEL stasis.dev/e2e=node' -c 'ENV container=docker' -c 'STOPSIGNAL SIGRTMIN+3' \
	-c 'ENTRYPOINT ["/usr/local/bin/entrypoint", "/sbin/init"]' - "$IMAGE" >/dev/null
rm -rf --one-file-system "$work"
echo "$IMAGE"
