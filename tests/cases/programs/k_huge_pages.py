# CASE {"at": 2, "hugepages": 8}
# anonymous memory in huge pages, shared with a child
import mmap
import os
import time
import zlib

N, crc, MIB = 10, 0, 1 << 20
private = mmap.mmap(-1, 4 * MIB, mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS | 0x40000)
shared = mmap.mmap(-1, 4 * MIB, mmap.MAP_SHARED | mmap.MAP_ANONYMOUS | 0x40000)
private[:] = blob = os.urandom(MIB) * 4
(r, w), (back, reply) = os.pipe(), os.pipe()
if os.fork() == 0:
    while data := os.read(r, 1):
        shared[data[0]] = data[0] + 1
        os.write(reply, data)
    os._exit(0)
huge = int(open("/proc/self/smaps").read().count("KernelPageSize:     2048 kB"))
for i in range(N):
    os.write(w, bytes([i]))
    os.read(back, 1)
    if private[:] != blob or shared[i] != i + 1:
        print("CORRUPT memory in huge pages", flush=True)
        os._exit(3)
    if open("/proc/self/smaps").read().count("KernelPageSize:     2048 kB") != huge:
        print("CORRUPT no longer in huge pages", flush=True)
        os._exit(3)
    crc = zlib.crc32(b"%d" % i, crc)
    print("step", i, f"{crc:08x}", flush=True)
    time.sleep(0.15)
os.close(w)
print("done", flush=True)
