"""A learning-free switch of TAP devices with a delay:  switch.py SECONDS, then one pid a line on stdin.

In each pid's network namespace it makes a TAP device `eth0`. A frame is delivered to every other port (as a hub does),
the given time after it was sent.
"""

import collections
import ctypes
import fcntl
import os
import select
import struct
import sys
import time

TUNSETIFF, IFF_TAP, IFF_NO_PI, CLONE_NEWNET = 0x400454CA, 2, 0x1000, 0x40000000


def attach(pid: int) -> int:
    libc = ctypes.CDLL(None, use_errno=True)
    here, there = os.open("/proc/self/ns/net", os.O_RDONLY), os.open(f"/proc/{pid}/ns/net", os.O_RDONLY)
    assert libc.setns(there, CLONE_NEWNET) == 0
    tap = os.open("/dev/net/tun", os.O_RDWR | os.O_NONBLOCK)  # belongs to the namespace it was opened in
    fcntl.ioctl(tap, TUNSETIFF, struct.pack("16sH22x", b"eth0", IFF_TAP | IFF_NO_PI))
    assert libc.setns(here, CLONE_NEWNET) == 0
    os.close(here)
    os.close(there)
    return tap


def main() -> None:
    delay = float(sys.argv[1])
    ports: list[int] = []
    late: collections.deque[tuple[float, int, bytes]] = collections.deque()
    poll = select.poll()
    poll.register(0, select.POLLIN)
    while True:
        wait = None if not late else max(0.0, (late[0][0] - time.monotonic()) * 1000)
        for fd, _ in poll.poll(wait):
            if fd == 0:
                line = os.read(0, 64)
                if not line:
                    return
                ports.append(attach(int(line)))
                poll.register(ports[-1], select.POLLIN)
                os.write(1, b"attached\n")
                continue
            try:
                while True:
                    late.append((time.monotonic() + delay, fd, os.read(fd, 65536)))
            except BlockingIOError:
                pass
            except OSError:  # the namespace is gone, and the device with it
                poll.unregister(fd)
                ports.remove(fd)
        while late and late[0][0] <= time.monotonic():
            _, source, frame = late.popleft()
            for port in ports:
                if port != source:
                    try:
                        os.write(port, frame)
                    except OSError:
                        pass


main()
