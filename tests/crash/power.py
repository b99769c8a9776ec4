"""Power loss without a plug: a log of all that reaches the disk, and the images that an outage may leave of it.

`Recorder` is an apsw VFS that stands in front of the real one and writes down each write, truncate, sync and delete in
the order in which they happen, and between them whatever the program was told (`Told`). `Disk` plays such a log up to
any point and makes images of what a machine may find there when it comes up again:

- What was written before the last sync of a file is there.
- Of what was written since, any subset is there, in any order: whole writes or single sectors, some of them torn, some
  of them garbage. Bytes outside a write are safe (SQLite relies on that: SQLITE_IOCAP_POWERSAFE_OVERWRITE).
- A file that was made or deleted since its directory was synced may be there or not. One that was made again under its
  old name may also be the old one.
- The shared memory of the WAL is no part of an image: it is an index that is made anew.
- After a sync that failed, the kernel takes the pages for clean. Later syncs do not write them, whatever they say; only
  a new write to a page does.
"""

from __future__ import annotations

import contextlib
import ctypes
import os
import random
import threading
import weakref
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any, NamedTuple, TypeAlias

import apsw

SECTOR = 512
PAGE = 4096  # of the kernel's cache


class Made(NamedTuple):
    file: int
    name: str


class Deleted(NamedTuple):
    name: str
    directory_synced: bool


class Wrote(NamedTuple):
    file: int
    offset: int
    data: bytes


class Truncated(NamedTuple):
    file: int
    size: int


class Synced(NamedTuple):
    file: int
    directory_synced: bool


class SyncFailed(NamedTuple):
    file: int


class Told(NamedTuple):
    """What the program asked for or was told: `kind` is began, done, message or result."""

    kind: str
    source: str
    thread: str
    ids: tuple[str, ...]


Entry: TypeAlias = Made | Deleted | Wrote | Truncated | Synced | SyncFailed | Told
Log: TypeAlias = list[Entry]


# --- writing it down --------------------------------------------------------------------------------------------------


class Recorder(apsw.VFS):
    """The default VFS while `recording`. One lock makes the order of the log the order in which things happened."""

    def __init__(self, log: Log) -> None:
        self.base = apsw.vfs_names()[0]
        self.log = log
        self.lock = threading.RLock()
        self.directory_was_synced = False
        self.wal_syncs = 0
        self.failing_wal_syncs: set[int] = set()  # by number, from 1 up
        self._opened: weakref.WeakSet[RecordedFile] = weakref.WeakSet()
        self._files: dict[str, int] = {}
        self._count = 0
        super().__init__("recorder", self.base, makedefault=True)

    def xOpen(self, name: str | apsw.URIFilename | None, flags: list[int]) -> apsw.VFSFile:
        if name is None:
            return apsw.VFSFile(self.base, name, flags)
        path = name.filename() if isinstance(name, apsw.URIFilename) else name
        with self.lock:
            existed = os.path.exists(path)
            opened = RecordedFile(self, name, flags, os.path.basename(path))
            if not existed or opened.name not in self._files:  # a database is made, empty, before SQLite opens it
                self._count += 1
                self._files[opened.name] = self._count
                self.log.append(Made(self._count, opened.name))
            opened.file = self._files[opened.name]
            self._opened.add(opened)
            return opened

    def xDelete(self, filename: str, syncdir: bool) -> None:
        with self.lock:
            self.directory_was_synced = False
            super().xDelete(filename, syncdir)
            self._files.pop(os.path.basename(filename), None)
            self.log.append(Deleted(os.path.basename(filename), self.directory_was_synced))

    def fails_to_sync(self, file: RecordedFile) -> bool:
        """Linux tells of a failure once for each descriptor of the file that was open at the time."""
        if file.name.endswith("-wal"):
            self.wal_syncs += 1
            if self.wal_syncs in self.failing_wal_syncs:
                for other in self._opened:
                    other.is_to_fail = other.is_to_fail or other.file == file.file
        failed, file.is_to_fail = file.is_to_fail, False
        return failed

    def heal(self) -> None:
        with self.lock:
            self.failing_wal_syncs.clear()
            for file in self._opened:
                file.is_to_fail = False


class RecordedFile(apsw.VFSFile):
    file: int
    is_to_fail = False

    def __init__(self, recorder: Recorder, path: str | apsw.URIFilename, flags: list[int], name: str) -> None:
        self.name = name
        self._recorder = recorder
        self._log = recorder.log
        super().__init__(recorder.base, path, flags)

    def xWrite(self, data: Any, offset: int) -> None:
        with self._recorder.lock:
            super().xWrite(data, offset)
            self._log.append(Wrote(self.file, offset, bytes(data)))

    def xTruncate(self, newsize: int) -> None:
        with self._recorder.lock:
            super().xTruncate(newsize)
            self._log.append(Truncated(self.file, newsize))

    def xSync(self, flags: int) -> None:
        recorder = self._recorder
        with recorder.lock:
            if recorder.fails_to_sync(self):
                self._log.append(SyncFailed(self.file))
                raise apsw.exception_for(apsw.SQLITE_IOERR_FSYNC)
            recorder.directory_was_synced = False
            super().xSync(flags)
            self._log.append(Synced(self.file, recorder.directory_was_synced))


@contextlib.contextmanager
def recording(log: Log) -> Iterator[Recorder]:
    """All databases that are opened in here are written down. They must lie in one directory."""
    recorder = Recorder(log)

    def note(_: bytes) -> None:
        recorder.directory_was_synced = True

    try:
        with _directory_syncs(recorder, note):
            yield recorder
    finally:
        recorder.unregister()


@contextlib.contextmanager
def _directory_syncs(vfs: apsw.VFS, note: Callable[[bytes], None]) -> Iterator[None]:
    """Hear when SQLite syncs a directory. It does so inside other calls, and opens the directory through its table of
    system calls for this purpose only: that is looked at, and not what its source says today."""
    kind = ctypes.CFUNCTYPE(ctypes.c_int, ctypes.c_char_p, ctypes.POINTER(ctypes.c_int))
    address = vfs.xGetSystemCall("openDirectory")
    assert address
    real = kind(address)

    def open_directory(name: bytes, descriptor: Any) -> int:
        note(name)
        return int(real(name, descriptor))

    hook = kind(open_directory)
    assert vfs.xSetSystemCall("openDirectory", ctypes.cast(hook, ctypes.c_void_p).value or 0)
    try:
        yield
    finally:
        vfs.xSetSystemCall("openDirectory", address)


# --- playing it -------------------------------------------------------------------------------------------------------


class Fate(NamedTuple):
    """How an image treats what was not synced: chances of a piece, and whether a piece is a sector or a whole write."""

    kept: float
    torn: float
    garbage: float
    by_sector: bool

    @classmethod
    def drawn(cls, rng: random.Random) -> Fate:
        return cls(
            rng.choice((0.0, 0.1, 0.5, 0.9, 1.0)),
            rng.choice((0.0, 0.0, 0.2)),
            rng.choice((0.0, 0.0, 0.1)),
            rng.random() < 0.5,
        )


class _File:
    def __init__(self, name: str) -> None:
        self.name = name
        self.now = bytearray()  # as the running machine sees it
        self.durable = bytearray()
        self.pending: list[Wrote | Truncated] = []
        self.dropped: set[int] = set()  # pages whose sync failed: clean for the kernel, old or new on the disk

    def change(self, change: Wrote | Truncated) -> None:
        _apply(self.now, change)
        self.pending.append(change)

    def sync(self) -> None:
        for change in self.pending:
            _apply(self.durable, change)
        if self.dropped:  # a page is written as a whole, with what an earlier sync has failed to write of it
            _resize(self.durable, len(self.now))
            for page in (rewritten := self.dropped & set(self._dirty_pages())):
                self.durable[page * PAGE : (page + 1) * PAGE] = self.now[page * PAGE : (page + 1) * PAGE]
            self.dropped -= rewritten
        self.pending.clear()

    def fail_to_sync(self) -> None:
        self.dropped |= set(self._dirty_pages())
        self.pending.clear()

    def _dirty_pages(self) -> Iterator[int]:
        for change in self.pending:
            if isinstance(change, Wrote):
                yield from range(change.offset // PAGE, (change.offset + len(change.data) - 1) // PAGE + 1)

    def after_an_outage(self, rng: random.Random) -> bytes:
        image, fate = bytearray(self.durable), Fate.drawn(rng)
        for page in sorted(
            self.dropped
        ):  # old or new; no garbage, because such a page also holds what was synced before
            data = bytes(self.now[page * PAGE : (page + 1) * PAGE])
            _apply_perhaps(image, Wrote(0, page * PAGE, data), rng, fate._replace(by_sector=True, garbage=0))
        for change in self.pending:
            _apply_perhaps(image, change, rng, fate)
        if rng.random() < 0.3 and len(image) < len(self.now):  # it has grown, and nothing was written there yet
            _resize(image, len(self.now))
        return bytes(image)


def _apply(content: bytearray, change: Wrote | Truncated) -> None:
    if isinstance(change, Truncated):
        _resize(content, change.size)
    else:
        if len(content) < change.offset:
            _resize(content, change.offset)
        content[change.offset : change.offset + len(change.data)] = change.data


def _resize(content: bytearray, size: int) -> None:
    del content[size:]
    content.extend(bytes(size - len(content)))


def _apply_perhaps(content: bytearray, change: Wrote | Truncated, rng: random.Random, fate: Fate) -> None:
    if isinstance(change, Truncated):
        if rng.random() < fate.kept:
            _apply(content, change)
        return
    for offset, data in _pieces(change, by_sector=fate.by_sector):
        if rng.random() < fate.garbage:
            data = rng.randbytes(len(data))
        elif rng.random() >= fate.kept:
            continue
        if rng.random() < fate.torn:
            cut = rng.randrange(len(data))
            offset, data = (offset, data[:cut]) if rng.random() < 0.5 else (offset + cut, data[cut:])
        _apply(content, Wrote(0, offset, data))


def _pieces(write: Wrote, *, by_sector: bool) -> Iterator[tuple[int, bytes]]:
    if not by_sector:
        yield write.offset, write.data
        return
    start, end = write.offset, write.offset + len(write.data)
    while start < end:
        stop = min(end, (start // SECTOR + 1) * SECTOR)
        yield start, write.data[start - write.offset : stop - write.offset]
        start = stop


class Disk:
    """The disk at some point of a log. `lies_about` are the syncs that it confirms and does not do: those of files
    whose names end so, and "/" for the directory."""

    def __init__(self, lies_about: Sequence[str] = ()) -> None:
        self._lies_about = tuple(lies_about)
        self._files: dict[int, _File] = {}
        self._names: dict[str, int | None] = {}  # as the directory was when it was last synced
        self._renamed: list[tuple[str, int | None]] = []

    def play(self, entry: Entry) -> None:
        match entry:
            case Made(file, name):
                self._files[file] = _File(name)
                self._renamed.append((name, file))
            case Deleted(name, directory_synced):
                self._renamed.append((name, None))
                self._sync_directory(directory_synced)
            case Wrote(file) | Truncated(file):
                self._files[file].change(entry)
            case Synced(file, directory_synced):
                if not self._files[file].name.endswith(tuple(self._lies_about)):
                    self._files[file].sync()
                self._sync_directory(directory_synced)
            case SyncFailed(file):
                self._files[file].fail_to_sync()

    def _sync_directory(self, synced: bool) -> None:
        if synced and "/" not in self._lies_about:
            self._names.update(self._renamed)
            self._renamed.clear()

    def outage(self, rng: random.Random) -> dict[str, bytes]:
        """One of the many things that may be there when the machine comes up again: file names and contents."""
        found = dict(self._names)
        for name in {name for name, _ in self._renamed}:
            states = [self._names.get(name), *(file for renamed, file in self._renamed if renamed == name)]
            found[name] = rng.choice(states)
        return {
            name: self._files[file].after_an_outage(rng) for name, file in sorted(found.items()) if file is not None
        }


def write_image(image: dict[str, bytes], directory: Path) -> None:
    directory.mkdir(parents=True, exist_ok=True)
    for name, content in image.items():
        (directory / name).write_bytes(content)
