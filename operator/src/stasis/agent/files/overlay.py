"""How overlayfs marks what is special in an upper layer (Documentation/filesystems/overlayfs.rst)."""

import os
import stat
from collections.abc import Mapping


class Marks:
    """The marks of one overlay mount: extended attributes trusted.overlay.*, or user.overlay.* where it was mounted
    with userxattr. The other kind is then an attribute as any other."""

    def __init__(self, user_xattrs: bool) -> None:
        self._prefix = "user.overlay." if user_xattrs else "trusted.overlay."

    def opaque(self, xattrs: Mapping[str, bytes]) -> bool:
        """A folder that hides what the image has at its path."""
        return xattrs.get(self._prefix + "opaque") == b"y"

    def redirected(self, xattrs: Mapping[str, bytes]) -> bool:
        """A folder of the image that was renamed: most of its content is in the image, under another name."""
        return self._prefix + "redirect" in xattrs

    def data_below(self, xattrs: Mapping[str, bytes]) -> bool:
        """A file of the image of which only attributes were changed: its data is in the image."""
        return self._prefix + "metacopy" in xattrs

    def whiteout(self, status: os.stat_result, xattrs: Mapping[str, bytes], folder: Mapping[str, bytes]) -> bool:
        """A name of the image that was removed: a device 0:0, or an empty file that is marked, in a marked folder."""
        if stat.S_ISCHR(status.st_mode):
            return status.st_rdev == 0
        marked = folder.get(self._prefix + "opaque") == b"x" and self._prefix + "whiteout" in xattrs
        return marked and stat.S_ISREG(status.st_mode) and not status.st_size

    def own(self, xattrs: Mapping[str, bytes]) -> dict[str, bytes]:
        """The attributes as the container sees them: without marks, those of an overlay nested in it unescaped."""
        nested = self._prefix + "overlay."
        return {
            self._prefix + name.removeprefix(nested) if name.startswith(nested) else name: value
            for name, value in xattrs.items()
            if not name.startswith(self._prefix) or name.startswith(nested)
        }
