"""What a story of killed processes must have left behind, told from its files alone.

Evidence is what the processes said before they died, what each next one found when it opened the database, the diary of
the tools, and the rows at the end. Each check is one promise and yields what speaks against it.
"""

from __future__ import annotations

import itertools
import json
import traceback
from collections import Counter, defaultdict
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, TypeAlias

from byssus.messages import AssistantMessage, decode
from byssus.providers.history import UNKNOWN_OUTCOME, valid_history
from tests.crash.boundaries import Life, Story, read
from tests.crash.boundary_scene import BY_HAND, NEVER_AGAIN, STAGES, THREAD, effect, entries
from tests.crash.place import Place
from tests.support.histories import flaws

Row: TypeAlias = dict[str, Any]
_OPEN = ("waiting", "answered", "started")


class Finding:
    """What a process found, or left, in the database."""

    def __init__(self, said: Row, before: Life | None) -> None:
        self.at: int = said["looked_at"]
        self.unfinished: list[str] = said["unfinished"]
        self.before = before  # who was at work last
        self.tables: dict[str, list[Row]] = said["tables"]
        self.messages = self.tables["messages"]
        self.calls = self.tables["tool_calls"]
        self.partial: str | None = next((row["body"] for row in self.tables["partials"]), None)
        self.thread: Row | None = next(iter(self.tables["threads"]), None)
        self.extra: Row = json.loads(self.thread["extra"]) if self.thread else {}
        self.ids = [row["id"] for row in self.messages]


class Evidence:
    def __init__(self, directory: Path) -> None:
        self.story: Story = read(directory)
        self.variation = self.story.plan.variation
        self.lives = self.story.lives
        self.diary = entries(Place(str(directory)).diary)
        self.said = sorted(
            (
                line | {"pid": life.pid}
                for main in self.lives
                for life in (main, *main.neighbours)
                for line in life.said
            ),
            key=lambda line: int(line["at"]),
        )
        self.findings = [
            Finding(line, life if line["what"] == "left" else before)
            for before, life in zip([None, *self.lives], self.lives, strict=False)
            for line in life.said
            if line["what"] in ("found", "left")
        ]
        self.damage = self.story.damage
        self.end = Finding({"looked_at": 2**62, "unfinished": [], "tables": self.story.tables}, None)
        self.keys = {row["reply"] + 1 + row["place"]: row["idempotency_key"] for row in self.end.calls}

    def heard(self, what: str) -> list[Row]:
        return [line for line in self.said if line["what"] == what]

    def noted(self, what: str) -> dict[str, list[Row]]:
        """Entries of the diary by the key of their call."""
        found: dict[str, list[Row]] = defaultdict(list)
        for entry in self.diary:
            if entry["what"] == what:
                found[entry["key"]].append(entry)
        return found


Check: TypeAlias = Callable[[Evidence], Iterator[str]]
CHECKS: list[Check] = []


def promise(check: Check) -> Check:
    CHECKS.append(check)
    return check


def violations(directory: Path) -> list[str]:
    """Everything that is wrong with a story, each with the name of the promise."""
    evidence = Evidence(directory)
    return [f"{check.__name__}: {what}" for check in CHECKS for what in _against(check, evidence)]


def _against(check: Check, evidence: Evidence) -> list[str]:
    try:
        return list(check(evidence))
    except Exception:  # evidence that cannot even be read speaks against it too
        return [traceback.format_exc()]


# --- processes and files ----------------------------------------------------------------------------------------------


@promise
def every_process_dies_by_its_kill_or_comes_to_its_end(e: Evidence) -> Iterator[str]:
    for number, life in enumerate(e.lives):
        if life.stood_still:
            yield f"process {number} stood still after {[line['what'] for line in life.said[-3:]]}"
        elif life.exit != 0 and not (life.was_killed and life.kill is not None):
            yield f"process {number} ended with {life.exit}"
        for neighbour in life.neighbours:
            if neighbour.exit != 0 and not (neighbour.was_killed and e.story.plan.neighbour_dies_at):
                yield f"a neighbour of process {number} ended with {neighbour.exit}"
    for line in [*e.heard("failed"), *e.heard("odd")]:
        yield f"{line['pid']}: {line.get('problem') or line['trace']}"
    if e.lives[-1].exit != 0:
        yield "nobody came to the end"


@promise
def the_database_is_sound(e: Evidence) -> Iterator[str]:
    yield from e.damage
    for finding in [*e.findings, e.end]:
        if finding.thread is not None:
            count, head = finding.thread["message_count"], finding.thread["head"]
            if count != len(finding.messages):
                yield f"the thread counts {count} messages and has {len(finding.messages)}"
            if finding.messages and head < finding.messages[-1]["seq"]:
                yield f"the head is {head}, the last message {finding.messages[-1]['seq']}"


@promise
def a_checkpoint_holds_what_was_said_up_to_it_and_each_follows_the_one_before(e: Evidence) -> Iterator[str]:
    for finding in [*e.findings, e.end]:
        before: Row = {"id": None, "step": 0, "seq": 0}
        for row in finding.tables["checkpoints"]:
            held = sum(message["seq"] <= row["seq"] for message in finding.messages)
            if held != row["message_count"]:
                yield f"checkpoint {row['step']} counts {row['message_count']} messages up to {row['seq']}, not {held}"
            if (row["parent"], row["step"]) != (before["id"], before["step"] + 1) or row["seq"] <= before["seq"]:
                yield f"checkpoint {row} does not follow {before}"
            before = row


@promise
def a_turn_that_has_ended_has_its_checkpoint(e: Evidence) -> Iterator[str]:
    if e.variation.checkpoint_every != "turn":
        return
    for finding in [*e.findings, e.end]:
        marked = {row["seq"] for row in finding.tables["checkpoints"]}
        for row in finding.messages:
            message = decode(row["body"])
            plain = isinstance(message, AssistantMessage) and not message.failed and not message.tool_calls
            if plain and row["seq"] not in marked:
                yield f"the reply at {row['seq']} was stored without its checkpoint"


@promise
def at_the_end_nothing_is_left_open(e: Evidence) -> Iterator[str]:
    thread = e.end.thread
    if thread is None:
        yield "there is no thread"
        return
    for column in ("run", "lease_owner", "lease_until"):
        if thread[column] is not None:
            yield f"{column} is {thread[column]!r}"
    for table in ("inbox", "partials"):
        if e.end.tables[table]:
            yield f"{table} holds {e.end.tables[table]}"
    for row in e.end.calls:
        if row["status"] in _OPEN:
            yield f"{row['name']} is {row['status']}"
    if e.findings[-1].unfinished:
        yield "the thread is listed as unfinished"


@promise
def a_run_is_one_row_with_one_attempt_for_each_process_that_drove_it(e: Evidence) -> Iterator[str]:
    for finding in [*e.findings, e.end]:
        unended = [row["id"] for row in finding.tables["runs"] if row["ended_at"] is None]
        expected = [] if finding.thread is None or finding.thread["run"] is None else [finding.thread["run"]]
        if unended != expected:
            yield f"the runs without an end are {unended}, and the thread's is {expected}"
        epochs = [row["epoch"] for row in finding.tables["run_attempts"]]
        if epochs != sorted(set(epochs)):
            yield f"the leases of the attempts are {epochs}"
        for run in finding.tables["runs"]:
            attempts = [row for row in finding.tables["run_attempts"] if row["run"] == run["key"]]
            if [row["number"] for row in attempts] != list(range(1, run["attempts"] + 1)):
                yield f"run {run} has the attempts {attempts}"
            if any(row["ended_at"] is None for row in attempts[:-1]):
                yield f"an attempt of run {run} has no end, and others follow it: {attempts}"
            if run["ended_at"] is not None and (run["stop_reason"] is None or attempts[-1]["ended_at"] is None):
                yield f"run {run} has ended without a reason, or its last attempt has not: {attempts}"
    outcomes = [row["outcome"] for row in e.end.tables["run_attempts"]]
    if not set(outcomes) <= {"ended", "waiting", "lost", "interrupted"}:
        yield f"the attempts ended as {outcomes}"


@promise
def an_interrupted_run_is_listed_and_no_other(e: Evidence) -> Iterator[str]:
    for number, finding in enumerate(e.findings):
        expected = _is_unfinished(finding, ends_apart=e.variation.has_hooks)
        if expected is not None and finding.unfinished != ([THREAD] if expected else []):
            yield f"look {number} lists {finding.unfinished}, with {_last(finding)} as the last message"


def _is_unfinished(finding: Finding, *, ends_apart: bool) -> bool | None:
    """Whether a run had begun and not ended, by what is in the log; None if the log does not tell.

    Without hooks, a run ends in the commit of its last reply, unless something waits in the inbox.
    """
    if not finding.messages or any(row["status"] == "waiting" for row in finding.calls):
        return False
    last = decode(finding.messages[-1]["body"])
    if isinstance(last, AssistantMessage) and not last.failed and not last.tool_calls:
        return None if finding.tables["inbox"] or ends_apart else False
    return True


def _last(finding: Finding) -> str:
    return str(finding.messages[-1]["body"]) if finding.messages else "nothing"


@promise
def a_rival_is_refused_while_the_thread_is_driven(e: Evidence) -> Iterator[str]:
    for life in e.lives:
        for neighbour in life.neighbours:
            for line in neighbour.said:
                if line["what"] == "refused" and f":{life.pid} " not in line["owner"]:
                    yield f"it was told that {line['owner']} drives, and {life.pid} did"


# --- messages ---------------------------------------------------------------------------------------------------------


@promise
def nothing_acknowledged_is_lost(e: Evidence) -> Iterator[str]:
    for line in [*e.heard("message_end"), *e.heard("tool_end")]:
        if not line["stored"]:
            yield f"a {line['what']} says that it was not stored"
        for finding in [*e.findings, e.end]:
            if finding.at > line["at"] and finding.ids.count(line["id"]) != 1:
                yield f"{line['what']} of {line['id']}, which is there {finding.ids.count(line['id'])} times"
    for life in e.lives:
        told = [x["id"] for x in life.said if x["what"] == "message_end" and x["role"] != "tool_result"]
        if told != [each for each in e.end.ids if each in set(told)]:
            yield f"{life.pid} told messages in an order that is not the log's"


@promise
def what_others_wrote_beside_the_run_is_kept(e: Evidence) -> Iterator[str]:
    for finding in [*e.findings, e.end]:
        ids = [row["id"] for row in finding.tables["noise"]]
        for line in e.heard("noise"):
            if line["error"] != "None":
                yield f"a write failed: {line['error']}"
            if line["at"] < finding.at and ids.count(line["id"]) != 1:
                yield f"a message was acknowledged, and is there {ids.count(line['id'])} times"


@promise
def every_look_sees_what_the_one_before_saw(e: Evidence) -> Iterator[str]:
    for before, after in zip(e.findings, [*e.findings[1:], e.end], strict=True):
        known = {row["seq"]: row for row in after.messages}
        for row in before.messages:
            if known.get(row["seq"]) != row:
                yield f"message {row['id']} at {row['seq']} has changed or is gone"


@promise
def every_history_is_valid(e: Evidence) -> Iterator[str]:
    for line in e.heard("request"):
        if line["flaws"]:
            yield f"a request had flaws: {line['flaws']}"
        if missing := [each for each in line["ids"] if each not in e.end.ids]:
            yield f"a model was sent what is not stored: {missing}"
    for finding in [*e.findings, e.end]:
        if found := flaws(valid_history([decode(row["body"]) for row in finding.messages])):
            yield f"the stored history has flaws: {found}"


@promise
def no_step_of_the_story_is_told_twice(e: Evidence) -> Iterator[str]:
    replies = [decode(row["body"]) for row in e.end.messages if row["role"] == "assistant"]
    calls = [reply.tool_calls for reply in replies if isinstance(reply, AssistantMessage) and reply.tool_calls]
    stages = [{call.arguments["stage"] for call in each} for each in calls]
    if stages != [{stage} for stage in range(len(STAGES))]:
        yield f"the stages were {stages}"


@promise
def what_was_said_is_heard_once_and_in_order(e: Evidence) -> Iterator[str]:
    sent = {line["id"]: line for line in e.heard("sending")}
    receipts = {line["id"]: line["at"] for line in e.heard("receipt")}
    places = {message_id: place for place, message_id in enumerate(e.end.ids)}
    for message_id, line in sent.items():
        times = e.end.ids.count(message_id)
        if times > 1 or (message_id in receipts and times == 0):
            yield f"a {line['kind']} was heard {times} times"
        for finding in e.findings:
            waits = [row["id"] for row in finding.tables["inbox"]].count(message_id)
            there = waits + finding.ids.count(message_id)
            if there > 1 or (there == 0 and receipts.get(message_id, 2**62) < finding.at):
                yield f"a {line['kind']} was there {there} times"
    for first, its_receipt in receipts.items():
        for second, line in sent.items():
            is_later = its_receipt < line["at"] and line["kind"] == sent[first]["kind"]
            if is_later and places.get(first, 0) > places.get(second, 2**62):
                yield f"two messages of the kind {line['kind']} were heard in the wrong order"


@promise
def steering_is_heard_before_the_next_turn(e: Evidence) -> Iterator[str]:
    steering = {line["id"] for line in e.heard("sending") if line["kind"] == "steer"}
    receipts = {line["id"]: line["at"] for line in e.heard("receipt") if line["id"] in steering}
    for life in e.lives:
        since = 0
        for line in life.said:
            if line["what"] == "request":
                late = [each for each, at in receipts.items() if at < since and each not in line["ids"]]
                if late and line["ids"][-1] not in steering:
                    yield f"a model was asked about {line['ids'][-1]} while {late} waited"
            # What was there by then, the run has had every chance to hear; but a new prompt is answered first.
            if line["what"] == "request" or (line["what"] == "found" and not e.variation.prompts_on):
                since = line["at"]


@promise
def the_part_of_a_reply_that_was_saved_is_kept_once(e: Evidence) -> Iterator[str]:
    saved = [json.loads(finding.partial) for finding in e.findings if finding.partial]
    stored = {row["id"]: json.loads(row["body"]) for row in e.end.messages}
    for partial in saved:
        kept = stored.get(partial["id"], {})
        if kept.get("stop_reason") != "aborted" or kept.get("content") != partial["content"]:
            yield f"{partial['content']} became {kept}"
    aborted = {each for each, body in stored.items() if body.get("stop_reason") == "aborted"}
    if aborted != {partial["id"] for partial in saved}:
        yield f"{len(aborted)} replies broke off, and {len(saved)} parts were found"
    for finding in e.findings:
        if finding.partial and json.loads(finding.partial)["id"] in finding.ids:
            yield "the part of a reply is there, and the reply too"
        words = [line for line in (finding.before.said if finding.before else []) if line["what"] == "saved"]
        if words and not any(words[-1]["words"] in body for body in [finding.partial or "", *_bodies(finding)]):
            yield f"{words[-1]['words']!r} was saved and is gone"


def _bodies(finding: Finding) -> list[str]:
    return [row["body"] for row in finding.messages]


@promise
def what_tools_wrote_to_extra_is_stored_when_a_run_ends(e: Evidence) -> Iterator[str]:
    jotted = {key for name in ("jot", "approve") for key in _ended(e, name)}
    for finding in [*e.findings, e.end]:
        for line in e.heard("ended"):
            if line["at"] < finding.at and not line["extra"].items() <= finding.extra.items():
                yield f"a run had ended with {line['extra']}, and the file has {finding.extra}"
        before, thread = finding.before, finding.thread
        if before is not None and thread is not None and thread["run"] is None:
            own = {key for key in jotted if any(entry["pid"] == before.pid for entry in e.noted("end")[key])}
            if own - set(finding.extra):
                yield f"a run of {before.pid} has ended without what its tools wrote: {own - set(finding.extra)}"
    unknown = set(e.end.extra) - {entry["key"] for entry in e.diary}
    if unknown and not e.variation.has_hooks:
        yield f"nobody wrote {unknown}"


def _ended(e: Evidence, name: str) -> list[str]:
    return [key for key, noted in e.noted("end").items() if noted[0]["name"] == name]


# --- tools ------------------------------------------------------------------------------------------------------------


@promise
def the_ledger_agrees_with_the_history(e: Evidence) -> Iterator[str]:
    for finding in [*e.findings, e.end]:
        results = {row["seq"]: decode(row["body"]) for row in finding.messages if row["role"] == "tool_result"}
        ended = {row["reply"] + 1 + row["place"]: row for row in finding.calls if row["status"] not in _OPEN}
        if set(results) != set(ended):
            yield f"results stand at {sorted(results)}, and the calls of {sorted(ended)} have ended"
        for seq in set(results) & set(ended):
            if results[seq].tool_call_id != ended[seq]["call_id"]:  # type: ignore[union-attr]
                yield f"the result at {seq} belongs to another call"
            if ended[seq]["ended_at"] is None:
                yield f"the call at {seq} has ended at no time"
    expected = Counter(name for stage in STAGES for name in stage * (e.variation.copies if "step" not in stage else 1))
    if (found := Counter(row["name"] for row in e.end.calls)) != expected:
        yield f"the ledger has {found}"


@promise
def a_call_has_one_key_and_a_key_one_call(e: Evidence) -> Iterator[str]:
    keys: dict[tuple[int, int], set[str]] = defaultdict(set)
    calls: dict[str, set[tuple[int, int]]] = defaultdict(set)
    for entry in e.diary:
        call = (entry["stage"], entry["place"])
        keys[call].add(entry["key"])
        calls[entry["key"]].add(call)
    yield from (f"call {call} ran with the keys {found}" for call, found in keys.items() if len(found) > 1)
    yield from (f"key {key} was given to {found}" for key, found in calls.items() if len(found) > 1)
    if unknown := set(calls) - {row["idempotency_key"] for row in e.end.calls}:
        yield f"the ledger does not know the keys {unknown}"


@promise
def a_finished_tool_never_runs_again(e: Evidence) -> Iterator[str]:
    seqs = {row["id"]: row["seq"] for row in e.end.messages}
    finished: dict[str, int] = {}
    told = [(e.keys.get(seqs.get(line["id"], 0), ""), line["at"]) for line in e.heard("tool_end")]
    stored = [(row["idempotency_key"], look.at) for look in e.findings for row in look.calls if row["ended_at"]]
    for key, at in [*told, *stored]:
        finished[key] = min(at, finished.get(key, at))
    for entry in e.diary:
        if entry["what"] in ("begin", "checked") and entry["at"] > finished.get(entry["key"], 2**62):
            yield f"{entry['name']} had its result and {entry['what']} again"


@promise
def a_tool_runs_as_often_as_its_policy_allows(e: Evidence) -> Iterator[str]:
    rows = {row["idempotency_key"]: row for row in e.end.calls}
    ends = e.noted("end")
    for key, begun in e.noted("begin").items():
        name, times, attempts = begun[0]["name"], len(begun), rows.get(key, {}).get("attempts", 0)
        if times > attempts:
            yield f"{name} began {times} times, and the ledger has {attempts} attempts"
        if len({entry["pid"] for entry in begun}) < times:
            yield f"{name} began twice in one process"
        if name in NEVER_AGAIN and times > 1:
            yield f"{name} began {times} times"
        if name == "check" and len(ends[key]) > 1:
            yield f"check had its effect {len(ends[key])} times"
        for before, after in itertools.pairwise(begun):
            if not _may_begin_again(e, name, before, after):
                yield f"{name} began again, and nobody had said so"
        if _is_asked(e, name) and not any(_allows(line, begun[0]) for line in e.heard("answering")):
            yield f"{name} began before it was approved"
        if e.variation.has_hooks and name != "jot" and not all(entry.get("edited") for entry in begun):
            yield f"{name} began with arguments that had not passed the hooks"


def _is_asked(e: Evidence, name: str) -> bool:
    return name == "approve" or (name == "jot" and e.variation.has_hooks)


def _may_begin_again(e: Evidence, name: str, before: Row, after: Row) -> bool:
    if name == "check":
        checks = e.noted("checked")[before["key"]]
        return any(before["at"] < c["at"] < after["at"] and c["answer"] == "not done" for c in checks)
    if name == "ask":
        return any(line["at"] > before["at"] and _allows(line, after) for line in e.heard("answering"))
    return True


def _allows(answering: Row, begun: Row) -> bool:
    place = all(answering[each] == begun[each] for each in ("stage", "place"))
    return place and answering["said"] == "approve" and bool(answering["at"] < begun["at"])


@promise
def a_result_tells_the_truth(e: Evidence) -> Iterator[str]:
    ended = set(e.noted("end"))
    texts = {row["seq"]: decode(row["body"]).text for row in e.end.messages if row["role"] == "tool_result"}
    for row in e.end.calls:
        key, name, status = row["idempotency_key"], row["name"], row["status"]
        text = texts.get(row["reply"] + 1 + row["place"])
        interrupted = any(look.at for look in e.findings for r in look.calls if _is(r, key, "started"))
        by_hand = name == "ask" and e.variation.recovery == "result" and interrupted
        if status == "done" and not (text == effect(name, key) and key in ended) and not (text == BY_HAND and by_hand):
            yield f"{name} is done, with {text!r}, and the diary says {'that' if key in ended else 'nothing'}"
        if status == "unknown" and not (text == UNKNOWN_OUTCOME and interrupted and _gives_up(e, name)):
            yield f"the outcome of {name} is unknown, and it was{' ' if interrupted else ' not '}interrupted"
        if status == "denied" and not _may_be_denied(e, name, interrupted=interrupted):
            yield f"{name} was denied, and nobody did"
        if status not in ("done", "unknown", "denied"):
            yield f"{name} has {status}: {text!r}"


def _is(row: Row, key: str, status: str) -> bool:
    return bool(row["idempotency_key"] == key and row["status"] == status)


def _gives_up(e: Evidence, name: str) -> bool:
    return name in NEVER_AGAIN or (name == "check" and e.variation.half_done == "unknown")


def _may_be_denied(e: Evidence, name: str, *, interrupted: bool) -> bool:
    if _is_asked(e, name):
        return e.variation.approval == "deny"
    return name == "ask" and e.variation.recovery == "deny" and interrupted


@promise
def tools_of_a_sequential_reply_do_not_overlap(e: Evidence) -> Iterator[str]:
    running: dict[tuple[int, int], str] = {}
    for entry in sorted(e.diary, key=lambda entry: int(entry["at"])):
        if "step" not in STAGES[entry["stage"]] and e.variation.tool_mode == "parallel":
            continue
        here = (entry["pid"], entry["stage"])
        if entry["what"] == "begin" and here in running:
            yield f"{entry['name']} began while {running[here]} was running"
        if entry["what"] == "begin":
            running[here] = entry["name"]
        elif entry["what"] == "end":
            running.pop(here, None)
