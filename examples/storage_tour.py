"""A tour of AgentStorage: users, quotas, sessions, tools, tasks, usage, search, backup.

`python storage_tour.py [DATABASE]`. It needs no key: the model's replies are written down. DATABASE is a path or a
postgresql:// DSN (default: a new file).
"""

import asyncio
import sys
import tempfile
from pathlib import Path

from byssus import Agent, AssistantMessage, Model, ToolCall, Usage, tool
from byssus.checkpointer import checkpointer_for
from byssus.errors import InputError, ThreadInactive
from byssus.storage import AgentStorage
from byssus.testing import ScriptedProvider


@tool
def weather(city: str) -> str:
    """The weather in a city."""
    return f"{city}: 晴, 21 °C"


async def continue_as_agent(place: str, session_id: str, user_id: str) -> None:
    """A session is a thread: an agent goes on with it, and spends of its user's quota."""
    script = ScriptedProvider(
        [
            AssistantMessage([ToolCall("call-1", "weather", {"city": "上海"})], "tool_use", Usage(420, 30)),
            AssistantMessage("上海今天晴, 21 度。", usage=Usage(480, 25)),
        ]
    )
    async with checkpointer_for(place) as cp:
        agent = Agent(
            provider=script,
            model=Model(id="gpt-4o-mini"),
            tools=[weather],
            checkpointer=cp,
            thread_id=session_id,
            user_id=user_id,
        )
        result = await agent.prompt("那上海呢?")
        print(f"The agent says: {result.text}")
        await cp.pause_session(session_id)
        try:
            await agent.prompt("Hello?")
        except ThreadInactive as error:
            print(f"Paused: {error}")
        await cp.resume_session(session_id)


def main(place: str, folder: Path) -> None:
    with AgentStorage(place) as storage:
        user = storage.create_user("Ann", "ann@example.com", quota_total=2_000, preferences={"theme": "dark"})
        storage.set_price("gpt-4o-mini", input=0.15, output=0.60)  # for a million tokens
        session = storage.create_session(user["id"], "天气", model="gpt-4o-mini")
        print(f"{user['name']} may spend {user['quota_total']:,} tokens; the session is {session['status']}.")

        storage.save_message(session["id"], "user", "北京的天气怎么样?", token_count=12)
        call = {"name": "weather", "arguments": {"city": "北京"}}
        message = storage.save_message(session["id"], "assistant", "我查一下。", tool_calls=[call], token_count=80)
        storage.log_tool_call(
            session["id"], "weather", {"city": "北京"}, {"sky": "多云"}, elapsed_ms=350.5, message_id=message
        )
        storage.save_message(session["id"], "tool", "多云")  # what a model gets to know of it
        storage.save_message(session["id"], "assistant", "北京今天多云。", token_count=20)
        storage.consume_quota(user["id"], 112)

        asyncio.run(continue_as_agent(place, session["id"], user["id"]))

        print("\nWhat was said:")
        for row in storage.get_conversation_history(session["id"], max_messages=50) or []:
            print(f"  {row['role']:<9}  {row['content'] or row['tool_calls_json']}")

        print("\nWhat the tools did:")
        for logged in storage.list_tool_calls(session["id"]) or []:
            print(f"  {logged['tool_name']}({logged['input_data']}) -> {logged['output_data']}")

        left = storage.get_user(user["id"])
        assert left is not None
        print(f"\n{left['quota_used']:,} of {left['quota_total']:,} tokens are spent.")
        print(f"Enough for 500 more: {storage.check_quota(user['id'], 500)}; for 5,000: ", end="")
        print(f"{storage.consume_quota(user['id'], 5_000)} (and nothing was consumed).")

        task = storage.create_task(session["id"], "summarize", {"max_length": 200}, priority=1)
        storage.update_task_status(task["id"], "running")
        task = storage.update_task_status(task["id"], "completed", {"summary": "两座城市的天气"})
        print(f"\nThe task {task['type']!r} is {task['status']}: {task['result']['summary']}")

        stats = storage.get_usage_stats(user["id"], days=7)
        assert stats is not None
        print(
            f"\nIn {stats['period_days']} days: {stats['total_messages']} messages, {stats['total_tokens']:,} tokens,",
            end="",
        )
        print(f" {stats['total_cost']:.6f} in cost; tools: ", end="")
        print(", ".join(f"{each['tool_name']} {each['call_count']} x" for each in stats["tool_usage"]))

        print("\nWhere was 天气?")
        for hit in storage.search("天气", user_id=user["id"], limit=10):
            print(f"  {hit['role']}: {hit['snippet']}")
        print("And who called the tool 'weather'?")
        for row in storage.find_messages("weather", user_id=user["id"]):
            print(f"  {row['role']}: {row['tool_calls_json']}")
        dark = [found["name"] for found in storage.find_users(preferences={"theme": "dark"})]
        print(f"Users who like it dark: {', '.join(sorted(set(dark)))}")

        backup = folder / "backup.db"
        made = storage.backup(backup)
        print(f"\nThe backup is {'verified' if made['verified'] else 'NOT verified'}.", end=" ")
        try:
            storage.backup(backup)
        except InputError as error:
            print(f"A second one: {str(error).replace(str(folder), '.')}")
        with AgentStorage(folder / "restored.db") as other:
            other.restore(backup)
            rows = other.get_conversation_history(session["id"]) or []
            print(f"Restored elsewhere: {len(rows)} messages; check: {'ok' if other.check()['ok'] else 'broken'}.")


with tempfile.TemporaryDirectory() as scratch:
    main(sys.argv[1] if len(sys.argv) > 1 else str(Path(scratch) / "agent_store.db"), Path(scratch))
