"""The ledger of a stored thread: the tool calls of its last reply.

A result goes into the slot that was reserved for it. Behind a reply that another program stored, there may be no slot:
then it goes to the end of the log. In both cases it joins the list of messages when its turn is closed, in call order.
"""

from __future__ import annotations

import asyncio
from collections.abc import Mapping, Sequence

from byssus.errors import InputError
from byssus.messages import ToolCall, ToolResultMessage
from byssus.providers import history
from byssus.queries.log import answers, threads, tool_calls
from byssus.queries.log.answers import NewAnswer, Question
from byssus.queries.log.threads import Position
from byssus.queries.log.tool_calls import EXPIRED, STARTED, WAITING, LedgerEntry, Start
from byssus.queries.versions import children
from byssus.queries.versions.children import NewChild
from byssus.run.driven_thread import Change, DrivenThread, is_committed, may_be_late, settled
from byssus.run.journal import ChildHome
from byssus.run.outside.answering import answered, approved
from byssus.threads import approvals
from byssus.threads.encoding import message_row
from byssus.tools import Outcome
from byssus.values import clock
from byssus.values.decisions import Pending
from byssus.values.inputs import column_id, column_text, is_long_id

_NUMBER = "-1000000"  # what is added to the id of a child, at most


class ThreadLedger:
    """The tool calls of a thread's last reply."""

    def __init__(self, thread: DrivenThread) -> None:
        self.unsaved: dict[tuple[str, int], ToolResultMessage] = {}
        self.questions: list[Pending] = []
        self._thread = thread

    @property
    def entries(self) -> Mapping[int, LedgerEntry]:
        return self._thread.entries

    @property
    def namespace(self) -> str:
        return self._thread.key.namespace

    @property
    def reply_key(self) -> str:
        namespace, thread_id = self._thread.key
        where = f"{namespace}/{thread_id}" if namespace else thread_id
        return f"{where}/{self._thread.geometry.reply}/{self._thread.reply_id}"

    def open_calls(self) -> dict[int, ToolCall]:
        messages, taken = self._thread.messages, self._thread.geometry.taken
        found = history.open_calls(messages)
        reply = history.last_reply(messages)
        if found and reply is not None and len({call.id for call in reply.tool_calls}) < len(reply.tool_calls):
            # The service used an id twice: only the seq shows which of the calls has a result.
            seq = self._thread.geometry.seq
            without = {i: call for i, call in enumerate(reply.tool_calls) if seq(i) not in taken}
            return without if len(without) == len(found) else found
        return found

    def _calls(self) -> Sequence[ToolCall]:
        reply = history.last_reply(self._thread.messages)
        return [] if reply is None else reply.tool_calls

    async def refresh(self) -> None:
        thread = self._thread
        if thread.position is None or not self.open_calls():
            thread.entries, self.questions = {}, []
            return
        store, branch, reply = thread.store, thread.position.branch, thread.geometry.reply
        rows = await self._rows(branch, reply)
        calls = self._calls()
        # An entry that came with an import may name another tool than the reply does: a person must not approve the one
        # and have the other run.
        named = {i: column_text(call.name) for i, call in enumerate(calls)}
        open_ = [entry for entry in rows if entry.status in tool_calls.OPEN]
        thread.entries = {entry.call_index: entry for entry in open_ if named.get(entry.call_index) == entry.name}
        has_started = any(entry.status == STARTED for entry in open_)
        self.questions = await self._questions_below() if has_started else []
        if thread.reply_id is None:
            thread.reply_id = await store.read(threads.message_id, branch, reply)

    async def _questions_below(self) -> list[Pending]:
        key = self._thread.key
        waiting = await approvals.pending(self._thread.store, key)
        return [call for call in waiting if call.thread_id != key.id]

    async def _rows(self, branch: int, reply: int) -> list[LedgerEntry]:
        """What the ledger has about a reply. The default answers of questions whose time is over are recorded first."""
        store = self._thread.store
        rows = await store.read(tool_calls.of_reply, branch, reply)
        if any(entry.status == EXPIRED for entry in rows):
            await store.write(answers.expire, branch, reply)
            rows = await store.read(tool_calls.of_reply, branch, reply)
        if not any(entry.approvers > 1 for entry in rows):
            return rows
        given = await store.read(answers.approvals_of_reply, branch, reply)
        return [entry._replace(approvals=tuple(row for row in given if row.call == entry.call_index)) for entry in rows]

    def was_recorded(self, call_index: int, /) -> bool:
        return self._thread.geometry.is_recorded(call_index)

    @property
    def is_foreign(self) -> bool:
        return self._thread.geometry.is_foreign

    async def distrust(self, calls: int, /) -> None:
        thread = self._thread
        last = thread.geometry.seq(calls - 1)
        await thread.submit(threads.distrust, last, by=thread.lease())
        thread.geometry = thread.geometry._replace(unledgered=max(thread.geometry.unledgered, last))

    async def start(self, entry: LedgerEntry, /) -> None:
        thread = self._thread
        await thread.submit(tool_calls.start, self._start(entry), by=thread.lease())
        thread.entries[entry.call_index] = entry

    async def ask(self, entry: LedgerEntry, question: Question, /) -> None:
        thread, start = self._thread, self._start(entry)
        await thread.submit(tool_calls.ask, start, question, edited=entry.edited, by=thread.lease())
        thread.entries[entry.call_index] = entry

    def _start(self, entry: LedgerEntry) -> Start:
        driver, reply, key = self._thread.driver, self._thread.geometry.reply, entry.idempotency_key
        assert driver is not None
        call_id, name = column_id(entry.call_id), column_text(entry.name)
        return Start(reply, entry.call_index, call_id, name, entry.arguments, entry.recovery, key, driver.run_id)

    async def answer(self, call_id: str, answer: NewAnswer, /) -> bool:
        store, key = self._thread.store, self._thread.key
        waiting = [call for call in await approvals.pending(store, key) if call.call_id == column_id(call_id)]
        if waiting and all(call.thread_id != key.id for call in waiting):  # a question of a child
            if len(waiting) > 1:
                threads_ = ", ".join(repr(call.thread_id) for call in waiting)
                raise InputError(f"call {call_id!r} waits on several threads: {threads_}; answer it on one of these")
            is_settled = await approvals.record_answer(store, key._replace(id=waiting[0].thread_id), call_id, answer)
            self.questions = await self._questions_below()
            return is_settled
        is_settled = await approvals.record_answer(store, key, call_id, answer)
        entries = self._thread.entries
        for call_index, entry in sorted(entries.items()):
            if entry.call_id == call_id and entry.status == WAITING:
                entries[call_index] = answered(entry, answer) if is_settled else approved(entry, answer)
                break
        return is_settled

    async def tool_of(self, call_id: str, /) -> str | None:
        waiting = await approvals.pending(self._thread.store, self._thread.key)
        own = (call for call in waiting if call.thread_id == self._thread.key.id)
        return next((call.tool_name for call in own if call.call_id == column_id(call_id)), None)

    async def settle(self, call_index: int, outcome: Outcome, /) -> None:
        extra, write = self._savable_extra(), None
        change = Change(settled=call_index, extra=extra)
        try:
            write = self._submit(call_index, outcome, extra)
            await settled(write, lambda position: self._thread.apply(position, change))
        except BaseException:
            self._thread.position = None  # the result may be stored, and is not in the list
            if (write is None or not is_committed(write)) and outcome.ending in ("done", "failed"):
                self._keep(call_index, outcome.message)  # the tool ran: do not run it again while we have its result
                if may_be_late(write):
                    self._write_late(call_index, outcome, extra)
            raise

    def _savable_extra(self) -> str | None:
        """The extra, with what the tool wrote to it: the tool will not run again."""
        try:
            return self._thread.changed_extra()
        except InputError:  # `finish` raises it
            return None

    def _submit(self, call_index: int, outcome: Outcome, extra: str | None) -> asyncio.Future[Position]:
        thread, row = self._thread, message_row(outcome.message)
        geometry, status, elapsed = thread.geometry, outcome.ending, outcome.elapsed_ms
        if geometry.is_free(call_index):
            end = (call_index, geometry.seq(call_index), row, status, elapsed)
            return thread.submit(tool_calls.finish, geometry.reply, [end], by=thread.lease(), extra=extra)
        behind = (call_index, row, status, elapsed)
        return thread.submit(tool_calls.finish_behind, geometry.reply, [behind], by=thread.lease(), extra=extra)

    def _write_late(self, call_index: int, outcome: Outcome, extra: str | None) -> None:
        geometry, row = self._thread.geometry, message_row(outcome.message)
        self._thread.write_late(
            f"the result of call {outcome.message.tool_call_id!r} ({outcome.message.tool_name})",
            tool_calls.finish_late,
            reply=geometry.reply,
            end=(call_index, geometry.seq(call_index), row, outcome.ending, outcome.elapsed_ms),
            has_slot=geometry.is_free(call_index),
            extra=extra,
        )

    def _keep(self, call_index: int, result: ToolResultMessage) -> None:
        of_this_reply = {key: known for key, known in self.unsaved.items() if key[0] == self.reply_key}
        self.unsaved = {**of_this_reply, (self.reply_key, call_index): result}

    async def child_of(self, key: str, name: str, limit: int | None, /) -> ChildHome | None:
        thread = self._thread
        assert thread.driver is not None
        stem = f"{thread.key.id}.{name}"
        new = NewChild(key, thread.driver.run_id, clock.new_id() if is_long_id(stem + _NUMBER) else stem, limit)
        name_of_child = await thread.submit(children.begin, new, by=thread.lease())
        return None if name_of_child is None else ChildHome(thread.database, thread.key._replace(id=name_of_child))

    def keep_child(self, key: str, child: object, /) -> None:
        pass

    def close_turn(self, results: Sequence[ToolResultMessage], /) -> None:
        self._thread.messages.extend(results)
        self._thread.unseen -= len(results)
