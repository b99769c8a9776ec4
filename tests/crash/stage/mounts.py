"""Mounts for a scene alone: the process gets a mount namespace of its own, which goes with it.

Root may do that everywhere, somebody else where user namespaces are allowed. Where neither works, a scene does the
nearest thing that it can, and says so: `note` is printed by whoever runs it.
"""

from __future__ import annotations

import contextlib
import ctypes
import os
import subprocess
import sys
from pathlib import Path

NOTE = "note: "
_NEW_MOUNTS, _NEW_USER = 0x00020000, 0x10000000


def note(text: str) -> None:
    print(f"{NOTE}{text}", flush=True)  # noqa: T201 - the runner passes it on


def own_mounts() -> bool:
    """Give this process mounts of its own, once and for all that it forks; False where that is not allowed."""
    if sys.platform != "linux":
        return False
    libc = ctypes.CDLL(None, use_errno=True)
    user, group = os.geteuid(), os.getegid()
    if libc.unshare(_NEW_MOUNTS) != 0:
        if libc.unshare(_NEW_USER | _NEW_MOUNTS) != 0:
            return False
        with contextlib.suppress(OSError):
            Path("/proc/self/setgroups").write_text("deny")
        Path("/proc/self/uid_map").write_text(f"0 {user} 1")
        Path("/proc/self/gid_map").write_text(f"0 {group} 1")
    return mount("--make-rprivate", "/")


def mount(*arguments: object) -> bool:
    try:
        done = subprocess.run(["mount", *map(str, arguments)], capture_output=True, text=True, check=False)
    except FileNotFoundError:
        return False
    return done.returncode == 0


def unmount(path: Path) -> None:
    subprocess.run(["umount", "--lazy", str(path)], check=True)


def small_disk(path: Path, size: int) -> bool:
    """Mount a disk of so many bytes there; False where that is not allowed."""
    path.mkdir(exist_ok=True)
    return own_mounts() and mount("-t", "tmpfs", "-o", f"size={size}", "none", path)
