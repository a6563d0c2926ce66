"""A CUDA program without a framework: its counters and ballast are in device memory alone, each step checks them.

`program.py count|kernel|queue|fork|spawn|multicast|ipc`. A line a step: the step's number.
"""

import ctypes
import os
import sys
import time
import zlib

cuda = ctypes.CDLL("libcuda.so.1")
PAGE, KERNEL_MS = 4096, int(os.environ.get("KERNEL_MS", "5"))


def check(code: int) -> None:
    if code and "STAY" in os.environ:
        time.sleep(3600)
    if code:
        sys.exit(f"CUDA error {code}")


def allocate(size: int) -> int:
    address = ctypes.c_ulonglong()
    check(cuda.cuMemAlloc_v2(ctypes.byref(address), ctypes.c_size_t(size)))
    return address.value


def read(address: int, size: int) -> bytes:
    data = ctypes.create_string_buffer(size)
    check(cuda.cuMemcpyDtoH_v2(data, ctypes.c_ulonglong(address), ctypes.c_size_t(size)))
    return data.raw


def write(address: int, data: bytes) -> None:
    check(cuda.cuMemcpyHtoD_v2(ctypes.c_ulonglong(address), data, ctypes.c_size_t(len(data))))


def page(number: int) -> bytes:
    return zlib.crc32(str(number).encode()).to_bytes(4, "little") * (PAGE // 4)


def initialise() -> None:
    check(cuda.cuInit(0))
    check(cuda.cudasimSetDevice(int(os.environ.get("DEVICE", "0"))))


def queue(counter: int) -> None:
    """Launches run on while the host does other things; each must be counted once."""
    launched = 0
    while True:
        for _ in range(4):
            check(cuda.cudasimLaunchAdd(ctypes.c_ulonglong(counter), 20))
            launched += 1
        counted = int.from_bytes(read(counter, 8), "little")
        if counted != launched:
            sys.exit(f"{counted} of {launched} launches were counted")
        print(launched, flush=True)


def share(address: int, mode: str) -> None:
    if mode == "multicast":
        check(cuda.cudasimMulticast(ctypes.c_ulonglong(address)))
    if mode == "ipc":
        check(cuda.cuIpcGetMemHandle(ctypes.create_string_buffer(64), ctypes.c_ulonglong(address)))


def main() -> None:
    mode = sys.argv[1]
    if mode == "spawn" and not os.fork():  # a second CUDA process
        mode = "silent"
    initialise()
    counter, count = allocate(PAGE), int(os.environ.get("PAGES", "1024"))
    ballast = [allocate(count * PAGE // 2) for _ in range(2)]
    for number in range(count):
        write(ballast[number % 2] + number // 2 * PAGE, page(number))
    share(ballast[0], mode)
    write(counter, bytes(8))
    if mode == "fork" and not os.fork():  # it inherits the device, and cannot use it
        time.sleep(3600)
    if mode == "queue":
        queue(counter)
    step = 0
    while True:
        check(cuda.cudasimKernelBegin())
        time.sleep(KERNEL_MS / 1000)
        check(cuda.cudasimKernelEnd())
        if int.from_bytes(read(counter, 8), "little") != step:
            sys.exit("the counter is another")
        for number in (step % count, step * 7919 % count, count - 1):
            if read(ballast[number % 2] + number // 2 * PAGE, PAGE) != page(number):
                sys.exit(f"page {number} is another")
        step += 1
        write(counter, step.to_bytes(8, "little"))
        if mode != "silent":
            print(step, flush=True)
        time.sleep(0.005)


if __name__ == "__main__":
    main()
