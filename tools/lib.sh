# Shared by the provisioning scripts: where built things live, and how a piece is built exactly once.
set -euo pipefail
REPO=$(cd "$(dirname "${BASH_SOURCE[0]}")/.." && pwd)
CACHE=${STASIS_CACHE:-${XDG_CACHE_HOME:-$HOME/.cache}/stasis}
mkdir -p "$CACHE"

say() { printf '\033[1m==>\033[0m %s\n' "$*" >&2; }
die() { printf 'error: %s\n' "$*" >&2; exit 1; }

# key FILE... -> 12 hex digits: a built piece is named after the files (pins, scripts) that made it.
key() { cat "$@" | sha256sum | cut -c1-12; }

# build_once DIR COMMAND...: run COMMAND with a temporary folder as last argument and put the result at DIR whole,
# under a lock, so that neither a crash nor two builds at once can leave a half-built piece behind.
build_once() {
	local dir=$1; shift
	[ -e "$dir" ] && return 0
	exec 9>"$dir.lock"; flock 9
	if [ ! -e "$dir" ]; then
		rm -rf "$dir.part"; mkdir -p "$dir.part"
		"$@" "$dir.part"
		mv -T "$dir.part" "$dir"
	fi
	flock -u 9; exec 9>&-
}

# The Debian mirror of this machine, as apt has it.
debian_mirror() {
	apt-get indextargets --format '$(ORIGIN)|$(REPO_URI)' 'Created-By: Packages' |
		sed -n 's/^Debian|//p' | grep -v security | head -n 1
}

# trixie DIR PACKAGE...: unpack packages of Debian trixie, whatever the machine runs, and install none.
trixie() {
	local out=$1 tmp apt; shift
	tmp=$(mktemp -d)
	mkdir -p "$tmp/state/lists/partial" "$tmp/cache/archives/partial"
	echo "deb [signed-by=/usr/share/keyrings/debian-archive-keyring.gpg] $(debian_mirror) trixie main" >"$tmp/sources.list"
	# Lists of its own: the machine's suites stay as they are.
	apt=(apt-get -qq -o Dir::Etc::SourceList="$tmp/sources.list" -o Dir::Etc::SourceParts=/dev/null
		-o Dir::State::Lists="$tmp/state/lists" -o Dir::Cache="$tmp/cache" -o APT::Sandbox::User=root)
	"${apt[@]}" update >&2
	(cd "$tmp" && "${apt[@]}" download "$@" >&2) || die "not to be had from Debian trixie: $*"
	for deb in "$tmp"/*.deb; do dpkg-deb -x "$deb" "$out"; done
	rm -rf "$tmp"
}
