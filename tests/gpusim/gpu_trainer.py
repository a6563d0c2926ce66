"""The gangs' trainer with its state on a GPU: the running value, its blocks and a ballast are in device memory alone.

As tests/gang/trainer.py (mounted at /gang), whose lines it prints: the loss of a step is a chain over all ranks' blocks
and all steps before. A rank whose device memory is another says so and ends.
"""

import ctypes
import os
import random
import struct
import sys
import time
import zlib

sys.path.insert(0, "/gang")
from trainer import SIZE, block, connect, receive

cuda = ctypes.CDLL("libcuda.so.1")
SLOTS, PAGE = 8, 4096


def check(code: int) -> None:
    if code:
        sys.exit(f"CUDA error {code}")


class Memory:
    def __init__(self, size: int) -> None:
        address = ctypes.c_ulonglong()
        check(cuda.cuMemAlloc_v2(ctypes.byref(address), ctypes.c_size_t(size)))
        self.address = address.value

    def write(self, data: bytes, at: int = 0) -> None:
        check(cuda.cuMemcpyHtoD_v2(ctypes.c_ulonglong(self.address + at), data, ctypes.c_size_t(len(data))))

    def read(self, size: int, at: int = 0) -> bytes:
        data = ctypes.create_string_buffer(size)
        check(cuda.cuMemcpyDtoH_v2(data, ctypes.c_ulonglong(self.address + at), ctypes.c_size_t(size)))
        return data.raw


def page(number: int) -> bytes:
    return zlib.crc32(str(number).encode()).to_bytes(4, "little") * (PAGE // 4)


def main() -> None:
    rank, world, pause = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"]), float(sys.argv[1])
    peers = connect(rank, world)
    number, step, more = random.SystemRandom().getrandbits(32), 0, True
    check(cuda.cuInit(0))
    value, blocks, count = Memory(PAGE), Memory(SLOTS * SIZE), int(os.environ.get("GPU_PAGES", "1024"))
    ballast = Memory(count * PAGE)
    for n in range(count):
        ballast.write(page(n), n * PAGE)
    value.write(struct.pack("<QI", 0, 0))
    if "FORK" in os.environ and not os.fork():
        time.sleep(3600)
    while more:
        done, loss = struct.unpack("<QI", value.read(12))
        if done != step:
            sys.exit(f"the device is at step {done}, not {step}")
        for n in (step % count, step * 7919 % count, count - 1):
            if ballast.read(PAGE, n * PAGE) != page(n):
                sys.exit(f"page {n} of device memory is another")
        check(cuda.cudasimKernelBegin())
        time.sleep(float(os.environ.get("KERNEL", "0.005")))
        check(cuda.cudasimKernelEnd())
        slot = step % SLOTS * SIZE
        if step >= SLOTS and blocks.read(SIZE, slot) != block(rank, step - SLOTS):
            sys.exit(f"the block of step {step - SLOTS} in device memory is another")
        blocks.write(block(rank, step), slot)
        mine = blocks.read(SIZE, slot)
        if rank == 0:
            more = not os.path.exists("/control/stop")
            parts = [mine, *(receive(peer, SIZE) for peer in peers)]
            for part in parts:
                loss = zlib.crc32(part, loss)
            for peer in peers:
                peer.sendall(struct.pack("<I?", loss, more) + b"".join(parts))
        else:
            peers[0].sendall(mine)
            loss, more = struct.unpack("<I?", receive(peers[0], 5))
            receive(peers[0], SIZE * world)
        value.write(struct.pack("<QI", step + 1, loss))
        print(f"step {step} rank {rank} loss {loss} number {number:08x} pid {os.getpid()}", flush=True)
        step += 1
        time.sleep(pause)
    print("done", flush=True)


if __name__ == "__main__":
    main()
