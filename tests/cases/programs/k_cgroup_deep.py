# CASE {"at": 2, "cgroup_rw": true}
# a cgroup of its own where trees are frozen, with a child in a deeper one
import os
import time
import zlib

N, crc = 10, 0
base = "/sys/fs/cgroup/freezer" if os.path.isdir("/sys/fs/cgroup/freezer") else "/sys/fs/cgroup"


def join(path):
    os.makedirs(path, exist_ok=True)
    with open(path + "/cgroup.procs", "w") as procs:
        procs.write(str(os.getpid()))


def inside(pid, path):
    return str(pid) in open(path + "/cgroup.procs").read().split()


(r, w), (back, reply) = os.pipe(), os.pipe()
if (child := os.fork()) == 0:
    join(base + "/worker/deep")
    os.write(reply, b"x")
    os.read(r, 1)
    os._exit(0)
os.read(back, 1)
join(base + "/worker")
for i in range(N):
    end = time.monotonic() + 5  # while it is being suspended, and for a moment after the resume, it is elsewhere
    while not (inside(os.getpid(), base + "/worker") and inside(child, base + "/worker/deep")):
        if time.monotonic() > end:
            print("CORRUPT not in its own cgroups but in", open("/proc/self/cgroup").read(), flush=True)
            os._exit(3)
        time.sleep(0.02)
    crc = zlib.crc32(b"%d" % i, crc)
    print("step", i, f"{crc:08x}", flush=True)
    time.sleep(0.15)
os.write(w, b"x")
print("done", flush=True)
