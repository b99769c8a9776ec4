"""A database with a thread of every kind, for what must carry all of it: exports, copies and checks."""

from __future__ import annotations

import hashlib
import json
from typing import Any

from byssus import AssistantMessage, Usage, UserMessage
from byssus.checkpointer import Checkpoint, Checkpointer, CheckpointMetadata, keep_tagged
from byssus.maintenance.shapes import COUNTED
from byssus.messages import dumps, from_value
from byssus.store.database import Tx
from tests.support.approvals import Deleting, delete
from tests.support.checkpointers import with_users
from tests.support.leases import agent_on
from tests.support.marks import mark, summarize
from tests.support.tool_calls import Acting, act, interrupt

EXTRA = {
    "nan": float("nan"),
    "huge": 10**400,
    "nul": "a\0b",
    "lone": "\ud800",
    "beyond": "𝄞 北京",
    "": [None, {"a": []}],
}
PREFERENCES = {"ui": {"theme": "dark", "sizes": [1, 2.0]}, "\ud800 \0": None, "long": "x" * 5_000, "": {}}
ODD = "thread \u2028 北京 '\"%s:x\x7f"


def checkpoint(thread_id: str, name: str, step: int, messages: list[Any], **about: Any) -> Checkpoint:
    return Checkpoint(CheckpointMetadata(thread_id, name, step=step, **about), messages, {"step": step}, {"r": [step]})


def said(count: int) -> list[UserMessage]:
    return [UserMessage(f"message {n}") for n in range(1, count + 1)]


async def fill(cp: Checkpointer) -> list[str]:
    """Threads of every kind; returns their ids."""
    await cp.append("plain", [UserMessage("hello \0 \ud800 𝄞"), AssistantMessage("hi"), from_value([1, {"a": "\0"}])])
    await cp.append("plain", [{"role": "röle\0\ud800", "content": "a note", "id": "x\0y\udfff", "n": float("inf")}])
    await cp.save_extra("plain", EXTRA)
    await cp.append(ODD, said(20))
    await cp.save_extra("empty", {})
    asking = agent_on(cp, [[delete("/a"), delete("/b")]], "asking", tools=[Deleting().tool])
    assert (await asking.prompt("Delete them.")).stop_reason == "waiting"
    await cp.answer("asking", "/a", "approve")
    await agent_on(cp, [[act(1), act(2)], "done"], "done", tools=[Acting().tool]).prompt("go")
    await interrupt(cp, Acting(hangs=2), act(1), act(2))
    await cp.steer("t", "not so fast")
    await cp.follow_up("t", "and then?")
    await with_users(cp, "alice")
    await cp.fork("t", new_id="fork of t", user_id="alice")
    for step in range(1, 10):
        await cp.put(checkpoint("o", f"c{step}", step, said(step), tags=["北京", "\ud800"], summary="\0"))
    await cp.fork("o", "c5", new_id="f", user_id="alice")
    await cp.append("f", [*said(2), {"role": "note", "x": 1.5}])
    await cp.put(checkpoint("f", "d6", 6, [*said(5), UserMessage("other")], parent_checkpoint_id="c5"))
    await cp.rewind("f", "c3")
    await cp.append("f", UserMessage("after the rewind"))
    await cp.put(checkpoint("f", "e7", 7, [*said(3), UserMessage("and another")]))
    await cp.delete_before("f", 2)
    await cp.set_ttl("f", 30, keep_tagged("x"))
    await cp.put(checkpoint("o", "c4", 4, said(4)))
    await cp.fork("f", new_id="g")
    await cp.fork("gone" if await cp.info("gone") else "o", 2, new_id="early")
    await fill_session(cp)
    await fill_marks(cp)
    return ["plain", ODD, "empty", "asking", "done", "t", "fork of t", "o", "f", "g", "early", "session"]


async def fill_marks(cp: Checkpointer) -> None:
    """Marks and summaries: of a plain thread, of one with gaps, and of one that was forked and rewound after that."""
    await mark(cp, "plain", [4, 1], "b", "a", "b", "北京 \u2028 '\"")
    await summarize(cp, "plain", "in short: \0 \ud800 𝄞 \u2028\n")
    await mark(cp, "session", [1, 4, 6], "old", "compressed")
    await summarize(cp, "session", "a session")
    await mark(cp, "o", [1, 3, 9], "of o")
    await mark(cp, "f", [1, 4], "of f", "twice", "twice")
    await summarize(cp, "f", "of f")
    await cp.rewind("f", "e7")
    await mark(cp, "f", [2], "later")
    await summarize(cp, "o", "of o alone")
    await mark(cp, "g", [1], "of g")


async def fill_session(cp: Checkpointer, name: str = "session", user: str = "alice") -> None:
    """A session with all that an application keeps in one."""
    await cp.create_session(user, "标题 \u2028 'x'", "a model", session_id=name, metadata={"k": [1.0, "\0", "\ud800"]})
    for n in range(3):
        await cp.save_message(name, "user", f"question {n} \0", token_count=7)
        usage = Usage(input=n, output=2, cost=0.1 * n)
        await cp.append(name, AssistantMessage(f"answer {n}", model=f"model {n} \ud800 {'x' * 300}", usage=usage))
    history = await cp.get_conversation_history(name)
    assert history is not None
    await cp.fork(name, new_id=f"fork of {name}")
    await cp.delete_message(name, history[1]["id"])  # which the fork reads: there is a gap now
    await cp.update_message(name, history[3]["id"], content="changed")
    await cp.delete_thread(f"fork of {name}")
    for n, input_data in enumerate([{"a": n} for n in range(3)] + [[], "text", None, [1, {"b": "\0"}]]):
        about = (n % 2 == 0, "no \0", history[0]["id"])
        await cp.log_tool_call(name, f"tool {n}", input_data, {"out": [n]}, 0.1 + n, *about)
    await cp.log_tool_call(name, "tool 1", {}, None, 1e9)
    made = [await cp.create_task(name, f"type {n}", {"n": n}, priority=-n) for n in range(4)]
    await cp.update_task_status(made[0]["id"], "running")
    await cp.update_task_status(made[1]["id"], "failed", {"why": "\ud800"})
    await cp.update_task_status(made[1]["id"], "completed", [None])
    await fill_tasks(cp, name, user)
    await cp.pause_session(name)


async def fill_tasks(cp: Checkpointer, name: str, user: str) -> None:
    """Tasks with all that a worker writes, of a session and of a user."""
    later: dict[str, Any] = {"run_at": "2999-01-01", "deadline": "2999-01-02", "parent_id": "another"}
    for session, owner in ((name, None), (None, user)):
        for n in range(3):
            key = f"{session or user} {n}"
            await cp.create_task(session, "t", {"n": n}, unique_key=key, user_id=owner, **(later if n == 0 else {}))
    await cp.store.write(_worked)


def _worked(tx: Tx) -> None:
    """What workers have left of some tasks: a lease, progress, an error, and steps."""
    until = "2026-01-01T00:00:00.000000Z"
    tx.run(
        "UPDATE tasks SET status = 'running', lease_until = :until, lease_epoch = 3,"
        " progress = 0.5, progress_note = 'half \u2028', asked = 'pause', schedule = 'nightly', error = :error"
        " WHERE unique_key LIKE '% 1'",
        until=until,
        error='{"type":"E","message":"\\ud800","trace":"..."}',
    )
    tx.run("UPDATE tasks SET waits_for = 'an event' WHERE unique_key LIKE '% 2'")
    without = "NOT EXISTS (SELECT 1 FROM task_steps s WHERE s.task = tasks.key)"
    for (key,) in tx.all(f"SELECT key FROM tasks WHERE unique_key IS NOT NULL AND {without} ORDER BY key"):
        for number, result in enumerate(("[1.0]", None, '"\\u0000"')):
            tx.run(
                "INSERT INTO task_steps (task, name, kind, status, recovery, attempts, result, until, started_at)"
                " VALUES (:task, :name, 'call', 'done', 'never', :number, :result, :until, :until)",
                task=key,
                name=f"step {number}",
                number=number,
                result=result,
                until=until,
            )


def sealed(lines: list[str]) -> list[str]:
    """The lines with an end that fits to them, as somebody would make it who means no good."""
    rows = [json.loads(line).get("row") for line in lines[1:-1]]
    counts = {name: rows.count(kind) for kind, name in COUNTED.items()}
    digest = hashlib.sha256("".join(f"{line}\n" for line in lines[:-1]).encode()).hexdigest()
    return [*lines[:-1], dumps({"end": counts, "sha256": digest})]
