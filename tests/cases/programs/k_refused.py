# CASE {"at": 2, "variants": {"plain": {}, "then-broken": {"env": {"BREAK": "1"}}}}
# holds a System V semaphore: refused; in the variant it breaks after the refusal
import ctypes
import os
import time
import zlib

N, crc = 8, 0
libc = ctypes.CDLL(None, use_errno=True)
semaphore = libc.semget(0x5153, 1, 0o1600)
for i in range(N):
    if i == N - 1 and "BREAK" in os.environ:
        print("CORRUPT disturbed by the refusal", flush=True)
        os._exit(3)
    crc = zlib.crc32(b"%d" % i, crc)
    print("step", i, f"{crc:08x}", flush=True)
    time.sleep(0.15)
print("done", flush=True)
