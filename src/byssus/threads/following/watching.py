"""The messages of a thread as they come: a thin form of `follow`."""

from __future__ import annotations

from collections.abc import AsyncGenerator
from contextlib import aclosing

from byssus.messages import Message
from byssus.store.operations import Runner
from byssus.threads.following.follow import follow
from byssus.values.following.items import FollowItem, MessageAdded
from byssus.values.inputs import ThreadId


def watch(store: Runner, thread_id: ThreadId) -> AsyncGenerator[Message, None]:
    """Yield the messages of the thread, and then each new message shortly after its commit, from any process.

    It continues until you break out of the loop. If the thread does not exist yet, it waits for it. `follow` also
    yields replies as they arrive, tool calls and more, and can continue where it stopped.
    """
    return _messages(follow(store, thread_id))


async def _messages(items: AsyncGenerator[FollowItem, None]) -> AsyncGenerator[Message, None]:
    async with aclosing(items):
        async for item in items:
            if isinstance(item, MessageAdded):
                yield item.message
