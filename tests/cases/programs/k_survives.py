# CASE {"at": 2, "gap": 0, "variants": {"plain": {}, "lies": {"env": {"LIE": "1"}}, "skips": {"env": {"SKIP": "1"}}, "dies": {"env": {"DIE": "1"}}, "hangs": {"env": {"HANG": "1"}, "timeout": 5}}}
# ruff: noqa: E501
# survives, and is in every other variant disturbed by something that it blames on the resume
import os
import time
import zlib

N, crc = 12, 0
token = open("/var/run/secrets/kubernetes.io/serviceaccount/token").read()
i = 0
while i < N:
    resumed = token != open("/var/run/secrets/kubernetes.io/serviceaccount/token").read()
    if resumed and "LIE" in os.environ:
        print("CORRUPT it is not what it was", flush=True)
        os._exit(3)
    if resumed and "DIE" in os.environ:
        os._exit(1)
    if resumed and "HANG" in os.environ:
        time.sleep(1000)
    if resumed and os.environ.pop("SKIP", ""):
        i += 1
    crc = zlib.crc32(b"%d" % i, crc)
    print("step", i, f"{crc:08x}", flush=True)
    time.sleep(0.15)
    i += 1
print("done", flush=True)
