# CASE {"at": 2, "variants": {"plain": {}, "pinned": {"env": {"PIN": "1"}}}}
# CPU affinity, I/O priority, nice value, timer slack of the process and of one thread
import ctypes
import os
import threading
import time
import zlib

N, crc = 10, 0
libc = ctypes.CDLL(None, use_errno=True)
IOPRIO_SET, IOPRIO_GET = 251, 252
IDLE = 3 << 13


def state():
    return (
        sorted(os.sched_getaffinity(0)),
        libc.syscall(IOPRIO_GET, 1, 0),
        os.getpriority(os.PRIO_PROCESS, 0),
        libc.prctl(30, 0, 0, 0, 0),
    )


def work():
    if "PIN" in os.environ:
        os.sched_setaffinity(0, {max(os.sched_getaffinity(0))})
        libc.syscall(IOPRIO_SET, 1, 0, IDLE)
        libc.prctl(29, 123456, 0, 0, 0)
        os.setpriority(os.PRIO_PROCESS, threading.get_native_id(), 5)
    was = state()
    while True:
        if state() != was:
            print("CORRUPT thread", state(), "was", was, flush=True)
            os._exit(3)
        time.sleep(0.05)


threading.Thread(target=work, daemon=True).start()
main = state()
for i in range(N):
    if state() != main:
        print("CORRUPT", state(), "was", main, flush=True)
        os._exit(3)
    crc = zlib.crc32(b"%d" % i, crc)
    print("step", i, f"{crc:08x}", flush=True)
    time.sleep(0.15)
print("done", flush=True)
