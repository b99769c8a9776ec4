"""A directory that is no disk, where there is one: nothing that the tests look at needs a real sync.

What survives the death of a process is there after it, too. What survives the loss of power is tested on made-up disks
(tests/crash), which log each write and each sync.
"""

from __future__ import annotations

import os
import shutil

_SHM = "/dev/shm"  # Linux has it; in a container it may be too small
_ROOM = 2**30


def ramdisk() -> str | None:
    """Where files may lie in memory, or None."""
    is_usable = os.access(_SHM, os.W_OK | os.X_OK) and shutil.disk_usage(_SHM).free >= _ROOM
    return _SHM if is_usable else None
