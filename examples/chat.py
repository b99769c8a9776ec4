"""A chat that remembers: run it twice with the same thread id.

ANTHROPIC_API_KEY=... python examples/chat.py my-thread
"""

import sys

from byssus import Agent, Model
from byssus.checkpointer import SQLiteCheckpointer
from byssus.events import Event
from byssus.providers.anthropic import AnthropicProvider


def show(event: Event) -> None:
    if event.type == "message_update" and event.stream_event.type == "text_delta":
        print(event.stream_event.delta, end="", flush=True)


def main(thread_id: str) -> None:
    with SQLiteCheckpointer("chat.db") as cp:
        agent = Agent(
            provider=AnthropicProvider(),
            model=Model(id="claude-sonnet-5-5", provider="anthropic"),
            system_prompt="You are concise.",
            checkpointer=cp,
            thread_id=thread_id,
            raise_errors=True,
        )
        agent.subscribe(show)
        while True:
            if text := input("> ").strip():
                agent.run_sync(text)
                print()


if __name__ == "__main__":
    try:
        main(sys.argv[1] if len(sys.argv) > 1 else "main")
    except (EOFError, KeyboardInterrupt):  # Ctrl-D and Ctrl-C
        print()
