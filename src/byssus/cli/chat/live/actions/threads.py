"""Commands that go from thread to thread: /new /threads /open /rename /fork /search."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from byssus.cli.chat.live.actions.points import point_of
from byssus.cli.chat.live.drawn.picker import Choice, Picker
from byssus.cli.chat.live.session import Conversation
from byssus.cli.ids import free_fork_id, known_thread
from byssus.cli.screen import terminal
from byssus.cli.subcommand import count
from byssus.errors import InputError
from byssus.messages import Message
from byssus.values import clock

_MOST = 300  # threads and hits in a list
_PREVIEW = 6  # messages
_AROUND = 4  # messages before and behind a hit
_LEAD = 8  # characters of a snippet before what was found
_BEFORE_HIT = 100  # characters of a message before what was searched for
_ID_LENGTH = 12
_PAGE = 200  # messages that are read at once to find one
_MOST_PAGES = 500


async def do_new(session: Conversation, argument: str) -> None:
    new = argument or f"chat-{clock.new_id()[:_ID_LENGTH]}"
    if await session.cp.info(new) is not None:
        raise InputError(f"there is a thread {new!r} already; /open {new} goes there")
    await session.open(new)


async def do_open(session: Conversation, argument: str) -> None:
    await session.open(await known_thread(session.cp, argument))


async def do_rename(session: Conversation, argument: str) -> None:
    if await session.cp.info(session.thread_id) is None:
        raise InputError("this thread has no messages yet; name it when it has some")
    await session.cp.set_title(session.thread_id, argument)
    session.view.note(f"(title: {argument})")


async def do_fork(session: Conversation, argument: str) -> None:
    at = await point_of(session.cp, session.thread_id, argument) if argument else None
    new = await session.cp.fork(session.thread_id, at, new_id=await free_fork_id(session.cp, session.thread_id))
    session.view.note(f"(a copy of {session.thread_id}: {new})")
    await session.open(new)


async def do_threads(session: Conversation, argument: str) -> None:
    async def find(_: str) -> Sequence[Choice]:
        found = await session.cp.threads(_MOST, user_id=session.source.user)
        session.known_threads = [(info.id, info.title) for info in found]
        return [Choice(info.id, f"{info.title}  {info.message_count}" + _state(info.state), info.id) for info in found]

    async def preview(item: Choice) -> str:
        thread = await session.cp.load(item.value, last=_PREVIEW)
        return "" if thread is None else "\n".join(_short(message) for message in thread.messages)

    picker = Picker("threads:", find, preview, shows_end=True, text=argument, empty="no thread matches")
    chosen = await session.board.pick(picker)
    if chosen is not None and chosen != session.thread_id:
        await session.open(chosen)


def _state(state: str) -> str:
    return "" if state == "idle" else f"  {state}"


def _short(message: Message) -> str:
    return f"{message.role}: {' '.join(message.text.split())[:400]}"


async def do_search(session: Conversation, argument: str) -> None:
    hits: dict[int, Any] = {}

    async def find(words: str) -> Sequence[Choice]:
        if not any(not word.startswith("-") for word in words.split()):
            return []
        found = await session.cp.search(words, user_id=session.source.user, limit=50)
        hits.clear()
        hits.update(enumerate(found))
        return [Choice(hit["session_id"], _from_hit(hit["snippet"]), number) for number, hit in hits.items()]

    async def preview(item: Choice) -> str:
        hit = hits[item.value]
        text = hit["content"][_begin_of(hit["content"], picker.text) :][:2_000]
        return f"{hit['role']}, {terminal.when(hit['created_at'], False)}\n{text}"

    empty = "nothing was found, or no word is typed yet"
    picker = Picker("search:", find, preview, is_fixed=False, text=argument, empty=empty)
    chosen = await session.board.pick(picker)
    if chosen is None:
        return
    hit = hits[chosen]
    if hit["session_id"] != session.thread_id:
        await session.open(hit["session_id"])
    await _show_around(session, hit["message_id"])


def _from_hit(snippet: str) -> str:
    """A snippet that begins shortly before what was found, so that a narrow list shows it."""
    text = " ".join(snippet.split())
    start = text.find("**") - _LEAD
    return text if start <= 0 else f"{terminal.drawn('…', '...')}{text[start:]}"


def _begin_of(text: str, words: str) -> int:
    """Where a preview begins, so that a word that was searched for is in it."""
    lowered = text.casefold()
    places = [lowered.find(word.strip('"')) for word in words.casefold().split() if not word.startswith("-")]
    first = min((place for place in places if place >= 0), default=0)
    return max(first - _BEFORE_HIT, 0)


async def _show_around(session: Conversation, message_id: str) -> None:
    """Show a message of this thread with those around it."""
    before: int | None = None
    behind: list[Message] = []
    for _ in range(_MOST_PAGES):
        page = await session.cp.load(session.thread_id, last=_PAGE, before=before)
        if page is None or not page.messages:
            break
        messages = [*page.messages, *behind]
        for place, message in enumerate(page.messages):
            if getattr(message, "id", None) == message_id:
                shown = messages[max(place - _AROUND, 0) : place + _AROUND + 1]
                left = page.message_count - page.seqs[place]
                session.view.lines("ask", f"Message {page.seqs[place]} of this thread, {count(left, 'message')} ago:")
                for each in shown:
                    if each is message:
                        session.view.lines("ask", terminal.drawn("▶ here:", "> here:"))
                    session.view.show_message(each)
                session.view.calls.end_all()
                session.view.lines(
                    "note", f"(the thread goes on behind this; /rewind seq:{page.seqs[place]} would go back here)"
                )
                return
        before, behind = page.seqs[0], page.messages[:_AROUND]
    session.view.note("(that message is not on this branch of the thread; /tree shows what a rewind has left)")
