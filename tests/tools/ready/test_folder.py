"""A folder that nothing leads out of: neither names nor links, nor what is swapped in the middle of a call."""

from __future__ import annotations

import contextlib
import os
import shutil
import threading
from pathlib import Path

import pytest

from byssus.errors import InputError
from byssus.tools.ready.folder import LARGEST, Folder, Opened

SECRET = "the secret of another folder"


@pytest.fixture
def folder(tmp_path: Path) -> Folder:
    """A folder beside another one that it must not reach."""
    (tmp_path / "outside").mkdir()
    (tmp_path / "outside" / "secret.txt").write_text(SECRET)
    inside = tmp_path / "inside"
    (inside / "deep" / "er").mkdir(parents=True)
    (inside / "deep" / "er" / "a.txt").write_text("a")
    (inside / "link.txt").symlink_to("deep/er/a.txt")
    (inside / "out.txt").symlink_to(tmp_path / "outside" / "secret.txt")
    (inside / "out").symlink_to(tmp_path / "outside")
    os.mkfifo(inside / "pipe")
    return Folder(inside)


@pytest.mark.parametrize("path", ["deep/er/a.txt", "./deep//er/./a.txt", "deep/er/a.txt/"])
def test_a_path_below_the_folder_is_read(folder: Folder, path: str) -> None:
    assert folder.read(path).data == b"a"
    assert folder.read(f"{folder.path}/{path}").data == b"a"


@pytest.mark.parametrize(
    ("path", "why"),
    [
        ("../outside/secret.txt", "has '..'"),
        ("deep/../../outside/secret.txt", "has '..'"),
        ("deep/er/../er/a.txt", "has '..'"),
        ("/etc/passwd", "is outside the folder"),
        ("{folder}-other/a.txt", "is outside the folder"),
        ("{folder}/../outside/secret.txt", "has '..'"),
        ("out.txt", "'out.txt' is a symbolic link; links are not followed"),
        ("link.txt", "'link.txt' is a symbolic link; links are not followed"),
        ("out/secret.txt", "'out' is a symbolic link; links are not followed"),
        ("a\0b", "has a NUL character"),
        ("\ud800", "surrogates not allowed"),
        ("", "is the folder itself"),
        ("deep", "is a directory"),
        ("pipe", "is no regular file"),
        ("nowhere.txt", "there is no such file"),
        ("deep/er/a.txt/b", "not a directory"),
        ("x" * 300, "file name too long"),
    ],
)
def test_any_other_path_is_refused_with_the_reason(folder: Folder, path: str, why: str) -> None:
    path = path.replace("{folder}", folder.path)
    for use in (folder.read, folder.find):
        if use == folder.find and why == "there is no such file":
            assert folder.find(path) is None
            continue
        with pytest.raises(InputError, match="(?i)" + why) as refused:
            use(path)
        assert SECRET not in str(refused.value)


@pytest.mark.parametrize("path", ["../new.txt", "/tmp/new.txt", "out/new.txt", "out/new/deep.txt", "deep/a\0"])
def test_nothing_is_written_outside(folder: Folder, path: str, tmp_path: Path) -> None:
    before = sorted(tmp_path.rglob("*"))
    with pytest.raises(InputError):
        folder.write(path, b"new", None)
    assert sorted(tmp_path.rglob("*")) == before


def test_a_directory_that_is_swapped_for_a_link_during_calls_never_leads_out(folder: Folder, tmp_path: Path) -> None:
    (tmp_path / "inside" / "swapped").mkdir()
    (tmp_path / "inside" / "swapped" / "secret.txt").write_text("mine")
    real, link = str(tmp_path / "inside" / "swapped"), str(tmp_path / "inside" / "swapping")
    enough = threading.Event()

    def swap() -> None:
        while not enough.is_set():
            os.rename(real, f"{real}.away")
            with contextlib.suppress(FileExistsError):  # a write has made the missing directory
                os.symlink(tmp_path / "outside", real)
                os.rename(real, link)
                os.unlink(link)
            while os.path.exists(f"{real}.away"):
                with contextlib.suppress(OSError):  # a write puts something into the directory that it has made
                    os.rename(f"{real}.away", real)
                    continue
                shutil.rmtree(real, ignore_errors=True)

    swapper = threading.Thread(target=swap)
    swapper.start()
    seen, refused = set[bytes](), 0
    try:
        while len(seen) < 1 or refused < 20:
            try:
                seen.add(folder.read("swapped/secret.txt").data)
                folder.write("swapped/secret.txt", b"mine", Opened(b"mine", 0o600))
            except InputError:
                refused += 1
    finally:
        enough.set()
        swapper.join()
    assert seen == {b"mine"}
    assert sorted(os.listdir(tmp_path / "outside")) == ["secret.txt"]


def test_a_hard_link_is_read_but_a_write_leaves_the_other_name_as_it_was(folder: Folder, tmp_path: Path) -> None:
    os.link(tmp_path / "outside" / "secret.txt", tmp_path / "inside" / "hard.txt")
    opened = folder.read("hard.txt")
    assert opened.data == SECRET.encode()
    folder.write("hard.txt", b"new", opened)
    assert folder.read("hard.txt").data == b"new"
    assert (tmp_path / "outside" / "secret.txt").read_text() == SECRET


def test_a_write_keeps_the_mode_makes_directories_and_leaves_no_draft(folder: Folder, tmp_path: Path) -> None:
    script = tmp_path / "inside" / "deep" / "run.sh"
    script.touch(0o750)
    folder.write("deep/run.sh", b"#!/bin/sh\n", folder.read("deep/run.sh"))
    assert script.stat().st_mode & 0o777 == 0o750
    folder.write("new/deep/b.txt", b"b", None)
    assert (tmp_path / "inside" / "new" / "deep" / "b.txt").read_bytes() == b"b"
    with pytest.raises(InputError, match="file exists"):
        folder.write("new/deep/b.txt", b"c", None)
    assert [path.name for path in (tmp_path / "inside").rglob("*.tmp")] == []
    assert (tmp_path / "inside" / "new" / "deep" / "b.txt").read_bytes() == b"b"


def test_of_two_writes_at_once_over_one_content_one_is_refused(folder: Folder) -> None:
    before, outcomes, together = folder.read("deep/er/a.txt"), list[str](), threading.Barrier(2)

    def write(data: bytes) -> None:
        together.wait()
        try:
            folder.write("deep/er/a.txt", data, before)
            outcomes.append("written")
        except InputError as error:
            outcomes.append(str(error))

    writers = [threading.Thread(target=write, args=(data,)) for data in (b"one", b"two")]
    for writer in writers:
        writer.start()
    for writer in writers:
        writer.join()
    assert sorted(outcomes) == ["'deep/er/a.txt' has changed meanwhile; read it again", "written"]


def test_a_file_of_20_mb_is_refused_with_its_size(folder: Folder, tmp_path: Path) -> None:
    with (tmp_path / "inside" / "large.bin").open("wb") as file:
        file.truncate(20_000_000)
    with pytest.raises(InputError, match=f"has 20,000,000 bytes, and at most {LARGEST:,} are read"):
        folder.read("large.bin")


def test_a_folder_must_be_a_directory(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    for path in (tmp_path / "file", tmp_path / "nowhere"):
        with pytest.raises(InputError, match="does not exist, or is no directory"):
            Folder(path)
