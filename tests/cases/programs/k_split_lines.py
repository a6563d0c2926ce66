# CASE {"at": 2}
# writes every line in pieces, so that it is suspended within one
import os
import time
import zlib

N, crc = 10, 0
for i in range(N):
    crc = zlib.crc32(b"%d" % i, crc)
    for piece in ("step ", str(i), " ", f"{crc:08x}"):
        os.write(1, piece.encode())
        time.sleep(0.1)
    os.write(1, b"\n")
os.write(1, b"done\n")
