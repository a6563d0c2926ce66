"""Our volume in a container: init's word and state, and the builds of init. Init never calls out, it reads here.

Standard library only: the guardian imports it.
"""

from __future__ import annotations

import contextlib
import os
import secrets
from collections.abc import Iterator

VOLUME = "stasis"  # below the container's root
_FOLDER = os.O_PATH | os.O_DIRECTORY | os.O_NOFOLLOW


def write_word(pid1: int, name: str, text: str) -> None:
    """Write `word` or `state` into our volume of a container, whole."""
    with _volume(pid1) as folder:
        _write(folder, name, (text + "\n").encode(), 0o644)


def put_into_volume(pid1: int, folder: str, name: str, data: bytes) -> None:
    """Have a program in a folder of our volume; one that is there stays."""
    with _volume(pid1) as volume:
        with contextlib.suppress(FileExistsError):
            os.mkdir(folder, 0o755, dir_fd=volume)
        inside = os.open(folder, _FOLDER, dir_fd=volume)
        try:
            try:
                os.stat(name, dir_fd=inside, follow_symlinks=False)
            except FileNotFoundError:
                _write(inside, name, data, 0o755)
        finally:
            os.close(inside)


@contextlib.contextmanager
def _volume(pid1: int) -> Iterator[int]:
    """The folder of our volume. The tenant can write there: nothing is opened through a symlink."""
    root = os.open(f"/proc/{pid1}/root", os.O_PATH | os.O_DIRECTORY)
    try:
        folder = os.open(VOLUME, _FOLDER, dir_fd=root)
    finally:
        os.close(root)
    try:
        yield folder
    finally:
        os.close(folder)


def _write(folder: int, name: str, data: bytes, mode: int) -> None:
    aside = f".{name}.{secrets.token_hex(8)}"  # a name that the tenant cannot have taken
    fd = os.open(aside, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW, mode, dir_fd=folder)
    with open(fd, "wb") as file:
        file.write(data)
        os.fchmod(fd, mode)
    try:
        os.rename(aside, name, src_dir_fd=folder, dst_dir_fd=folder)
    except IsADirectoryError:  # put there by the tenant: out of the way
        os.rename(name, f"{aside}.old", src_dir_fd=folder, dst_dir_fd=folder)
        os.rename(aside, name, src_dir_fd=folder, dst_dir_fd=folder)
