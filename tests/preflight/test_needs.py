"""What a checkpoint takes is counted before the freeze."""

from __future__ import annotations

import os
import signal
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from tests.preflight.conftest import Pod, until

from stasis.agent.lookup import Root, children, inner_pids
from stasis.agent.needs import Needs, needs

pytestmark = pytest.mark.root
MIB = 1 << 20


def of(container: Pod) -> Needs:
    return needs(container.pid1, container.root)


def test_memory_is_counted_as_it_will_be_dumped(pod: Callable[[str], Pod]) -> None:
    plain = of(pod("ready()"))
    heavy = of(
        pod(
            """
            def fill(write, mib):
                for _ in range(mib):
                    write(bytes(range(256)) * 4096)
            private = mmap.mmap(-1, 30 << 20, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
            fill(private.write, 30)
            untouched = mmap.mmap(-1, 1 << 30, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
            shared = mmap.mmap(-1, 20 << 20)
            fill(shared.write, 20)
            file = open(os.memfd_create("m"), "wb"); fill(file.write, 10); file.flush()
            ghost = open("ghost", "wb"); fill(ghost.write, 5); ghost.flush(); os.unlink("ghost")
            if os.fork() == 0:  # shared memory counts once, private memory once more
                signal.pause()
            ready()
            """
        )
    )
    assert heavy.private - plain.private == pytest.approx(60 * MIB, abs=12 * MIB)
    assert heavy.shared - plain.shared == pytest.approx(30 * MIB, abs=MIB)
    assert heavy.ghosts == pytest.approx(5 * MIB, abs=MIB)
    assert heavy.memory == heavy.private + heavy.shared
    assert heavy.total == heavy.memory + heavy.ghosts


def test_processes_threads_and_descriptors(pod: Callable[[str], Pod]) -> None:
    container = pod(
        """
        kept = [os.open("/dev/null", os.O_RDONLY) for _ in range(50)]
        for _ in range(4):
            threading.Thread(target=signal.pause, daemon=True).start()
        child = os.fork() or signal.pause()
        os.kill(child, signal.SIGSTOP)
        ready()
        """
    )
    (child,) = children(container.trainer)
    until(lambda: of(container).stopped, "stopped")

    found = of(container)
    assert found.processes == 3
    assert found.threads == 7
    assert found.descriptors > 100
    assert found.stopped == (inner_pids(child)[-1],)
    assert found.last_pid == inner_pids(child)[-1]


@pytest.fixture
def huge_pages() -> Iterator[None]:
    path = Path("/proc/sys/vm/nr_hugepages")
    before = path.read_text()
    path.write_text("16")
    yield
    path.write_text(before)


@pytest.mark.usefixtures("huge_pages")
def test_huge_pages_by_size(pod: Callable[[str], Pod]) -> None:
    found = of(
        pod(
            """
            m = mmap.mmap(-1, 8 << 20, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS | 0x40000)
            m.write(b"x" * (6 << 20))
            ready()
            """
        )
    )
    assert found.huge_pages == {2 * MIB: 3}
    assert found.memory == found.private + found.shared + 6 * MIB


def test_a_tree_that_is_gone(pod: Callable[[str], Pod]) -> None:
    container = pod("ready()\nos._exit(0)")
    os.kill(container.trainer, signal.SIGUSR1)
    container.process.wait(20)
    with pytest.raises(ProcessLookupError):
        needs(container.pid1, Root(container.root.pid, container.root.start))
