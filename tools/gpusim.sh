#!/usr/bin/env bash
# Build the simulated GPU of the tests (tests/gpusim/sim) and fetch cuda-bindings, which drives it unchanged. Prints the
# folder: libcuda.so.1, cuda-checkpoint, nvidia-smi, gpud.py, python/ (cuda-bindings).
. "$(dirname "$0")/lib.sh"
SOURCE=$REPO/tests/gpusim/sim
BINDINGS="cuda-bindings==13.5.0 cuda-pathfinder==1.9.1"
SIM=$CACHE/gpusim-$(key "$0" "$SOURCE"/*)

build() {
	local flags="-std=gnu11 -O2 -s -Wall -Wextra -Werror"
	gcc $flags -shared -fPIC -fvisibility=hidden -pthread -Wl,-soname,libcuda.so.1 -o "$1/libcuda.so.1" \
		"$SOURCE"/{device,memory,process,remote}.c || die "the simulated libcuda does not build"
	gcc $flags -o "$1/cuda-checkpoint" "$SOURCE/cuda_checkpoint.c" || die "the simulated cuda-checkpoint does not build"
	install -m 755 "$SOURCE/nvidia-smi" "$SOURCE/gpud.py" "$1"
	python3 -m pip install -q --disable-pip-version-check --root-user-action=ignore --no-deps --target "$1/python" $BINDINGS >&2
	chmod -R a+rX "$1"
}
build_once "$SIM" build
echo "$SIM"
