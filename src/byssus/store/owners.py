"""Who a process is, and whether another one is gone.

A process is known by the machine's boot, its pid namespace, its pid and the time of its start: a pid alone is used
again, and a host name is shared by many containers. What cannot be told for sure counts as alive: then a lease has to
run out.
"""

from __future__ import annotations

import functools
import os
import socket

_ID = "pid={pid} start={start} boot={boot} namespace={namespace}"


def name(token: str) -> str:
    """The name under which this process holds a lease: what people read first, then what tells it apart."""
    return f"{_host()}:{os.getpid()} {_self(os.getpid())} lease={token}"


def token_of(owner: str) -> str | None:
    """The token of a lease that this very process holds or held; None if the owner is somebody else."""
    who, _, token = owner.partition(" ")[2].rpartition(" lease=")
    return token if who == _self(os.getpid()) and "boot=?" not in who else None


def process_has_ended(owner: str) -> bool:
    """Whether the process that took a lease is known to have ended: only if it ran on this boot of this machine."""
    try:
        known = dict(part.split("=", 1) for part in owner.split(" ")[1:])
        here = known["boot"] != "?" and (known["boot"], known["namespace"]) == (_boot(), _namespace())
        return here and _start_of(int(known["pid"])) != known["start"]
    except (KeyError, ValueError):  # written by something that we do not know
        return False


@functools.lru_cache(maxsize=1)
def _self(pid: int) -> str:
    return _ID.format(pid=pid, start=_start_of(pid), boot=_boot(), namespace=_namespace())


@functools.cache
def _host() -> str:
    return socket.gethostname().replace(" ", "-") or "localhost"


@functools.cache
def _boot() -> str:
    try:
        return _read("/proc/sys/kernel/random/boot_id").strip()
    except OSError:
        return "?"


def _namespace() -> str:
    try:
        return os.readlink("/proc/self/ns/pid").replace(" ", "")
    except OSError:
        return "?"


def _start_of(pid: int) -> str:
    """When a process began, in ticks since the boot; empty if there is none, or only one that waits to be buried."""
    try:
        # The name, in parentheses, may contain anything; what follows the last one is: state, parent, ... start (20th).
        fields = _read(f"/proc/{pid}/stat").rpartition(")")[2].split()
    except OSError:
        return ""
    return "" if fields[0] in "ZX" else fields[19]


def _read(path: str) -> str:
    with open(path, encoding="utf-8", errors="replace") as file:
        return file.read()
