"""Conversations for property tests: whole exchanges, and messages in any order, as programs and crashes leave them."""

from __future__ import annotations

import itertools

from hypothesis import strategies as st

from byssus.messages import (
    AssistantMessage,
    Block,
    ImageContent,
    Message,
    Note,
    TextContent,
    ThinkingContent,
    ToolCall,
    ToolResultMessage,
    UnknownBlock,
    UserMessage,
)

SECRET = "sk-12345"

texts = st.sampled_from(["a", "b c", "语言", "\0", "\ud800", "x" * 300, "", " ", SECRET])
call_ids = st.sampled_from(["c1", "c2", "c3"])  # few, so that they are reused
blocks: st.SearchStrategy[Block] = st.one_of(
    st.builds(TextContent, texts),
    st.builds(ThinkingContent, st.sampled_from(["", "hm"]), st.none() | st.just("sig")),
    st.builds(ToolCall, call_ids, st.just("look"), st.dictionaries(st.just("at"), texts)),
    st.just(ImageContent("b64")),
    st.just(UnknownBlock({"type": "new"})),
)
spoken = blocks.filter(lambda block: not isinstance(block, ToolCall))
messages: st.SearchStrategy[Message] = st.one_of(
    st.builds(UserMessage, texts),
    st.builds(UserMessage, st.lists(spoken, max_size=2)),
    st.builds(
        AssistantMessage,
        st.lists(blocks, max_size=3),
        st.sampled_from(["stop", "tool_use", "length", "error", "aborted"]),
    ),
    st.builds(ToolResultMessage, call_ids, st.just("look"), texts),
    st.builds(Note, st.sampled_from([None, {"role": "system", "content": "be nice"}])),
)


@st.composite
def exchanges(draw: st.DrawFn) -> list[Message]:
    """A whole exchange: a user, some tool turns, perhaps an answer."""
    made: list[Message] = [UserMessage(draw(st.sampled_from(["go", "x" * 100])))]
    for _ in range(draw(st.integers(0, 4))):
        ids = draw(st.lists(call_ids, min_size=1, max_size=3, unique=True))
        made.append(AssistantMessage([ToolCall(each, "look", {"at": SECRET}) for each in ids], "tool_use"))
        made.extend(ToolResultMessage(each, "look", draw(texts)) for each in ids)
    if draw(st.booleans()):
        made.append(AssistantMessage(draw(texts), draw(st.sampled_from(["stop", "error"]))))
    return made


histories = st.lists(exchanges() | st.lists(messages, max_size=4), max_size=4).map(
    lambda parts: [*itertools.chain(*parts)]
)
