"""Where a database is, as people write it: the path of a SQLite file, or the DSN of a Postgres database.

- Postgres is what begins with `postgresql://` or `postgres://`, in upper or lower case, with a driver as SQLAlchemy
  writes it (`postgresql+psycopg://`), with white space around it; and what libpq reads: `host=... dbname=...`.
- Nothing that looks like a DSN is taken for the name of a file, or there would be a file with a password in its name.
  A path that looks like one can be written with `./` before it.
- `redacted` is for every text that may show a place. A DSN that is not recognised keeps its password to itself, too.
"""

from __future__ import annotations

import os
import re

EXAMPLE = "postgresql://user:password@host:5432/database"

_POSTGRES = re.compile(r"postgres(?:ql)?(?:\+\w+)?://", re.IGNORECASE)
_WHERE = "host|hostaddr|dbname|service"  # each of these alone makes a DSN
_SETTING = re.compile(
    rf"(?:({_WHERE})|port|user|passfile|sslmode|sslcert|sslkey|sslrootcert|options|application_name|connect_timeout"
    r"|client_encoding|target_session_attrs|channel_binding|require_auth|gssencmode|keepalives)\s*=\s*",
    re.IGNORECASE,
)
_NEXT_SETTING = re.compile(r"[\s;]\w+\s*=")
_IN_A_FOLDER = re.compile(r"[^\s/]+/")  # as in host=web1/chat.db
_SECRET = r"\b(?:(?:ssl)?pass(?:word|wd|phrase)?|pwd|secret|(?:auth_?|access_?)?token)\s*="  # noqa: S105
_SECRET_SETTING = re.compile(rf"(?:^|[\s;?&]){_SECRET}", re.IGNORECASE)
_LOGIN = re.compile(r"(?://)?[^\s/\\:@]+:[^@]*@[^\s@]")  # user:secret@host
_FOLDER = re.compile(r"\.{0,2}[/\\]|~")
_DRIVE = re.compile(r"[A-Za-z]:[\\/]")

# Whatever is between a scheme and the last @: nothing tells where a password ends that was not percent-encoded.
_IN_URL = re.compile(rf"([A-Za-z][\w+.-]+:/+)(?!/|\*\*\*@|{EXAMPLE.partition('://')[2]}).*@", re.DOTALL)
_IN_LOGIN = re.compile(r"(?<![\w/:])((?://)?[^\s/\\:@'\"]+):(?!//|/?\*\*\*@)[^\s@]+@(?=[^\s@])")
_IN_SETTING = re.compile(rf"({_SECRET}).*", re.IGNORECASE | re.DOTALL)


def postgres_dsn(place: object) -> str | None:
    """The DSN as libpq reads it, if Postgres is meant; else None."""
    if not isinstance(place, str):
        return None
    dsn = place.strip()
    if scheme := _POSTGRES.match(dsn):
        return f"postgresql://{dsn[scheme.end() :]}"
    return dsn if "://" not in dsn and _is_settings(dsn) else None


def looks_like_dsn(place: str) -> bool:
    """Whether it is no path: a DSN of any database, or what was meant to be one."""
    place = place.strip()
    if os.name == "nt" and _DRIVE.match(place):
        return False
    return "://" in place or _LOGIN.match(place) is not None or _is_settings(place)


def _is_settings(place: str) -> bool:
    if _FOLDER.match(place):
        return False
    if _SECRET_SETTING.search(place):
        return True
    first = _SETTING.match(place)
    if first is None:
        return False
    value = place[first.end() :]
    return _NEXT_SETTING.search(value) is not None or (first[1] is not None and not _IN_A_FOLDER.match(value))


def redacted(text: str) -> str:
    """The text without the passwords of what looks like a DSN in it. Cut a long text afterwards, never before."""
    return EXAMPLE.join(map(_redacted, text.split(EXAMPLE)))  # which ends no password


def _redacted(text: str) -> str:
    text = _IN_URL.sub(r"\1***@", text)
    if (login := _LOGIN.match(text)) and ":/" not in text:  # it is all of the text: white space may be in its password
        return f"{login[0].partition(':')[0]}:***@{text.rpartition('@')[2]}"
    return _IN_SETTING.sub(r"\1***", _IN_LOGIN.sub(r"\1:***@", text))
