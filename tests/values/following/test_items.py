"""The items of a thread that is followed, as JSON."""

from __future__ import annotations

from typing import Any, get_args

import pytest

from byssus import AssistantMessage, UserMessage
from byssus.errors import InputError
from byssus.messages import Note
from byssus.values.following import items as following
from byssus.values.following.items import FollowItem, item_from_json

ITEMS: list[FollowItem] = [
    following.MessageAdded("c", AssistantMessage("汉字 \ud800\0"), 3),
    following.MessageAdded("c", Note({"any": [1]}), 4),
    following.ReplyDelta("c", "r", 1, "arguments", 7, '{"a', "c1", "look"),
    following.ReplyReset("c"),
    following.ThreadRewound("c", 2),
    following.ThreadDeleted("c"),
    following.CallStarted("c", "c1", "look", {"a": [None, 1.5]}, 3, 2),
    following.CallWaiting("c", "c1", "look", {}, 3, "approval", "Sure?", "2026-01-01T00:00:00.000000Z"),
    following.CallAnswered("c", "c1", "look", 3, {"kind": "approve"}, "ann", "mail"),
    following.CallEnded("c", "c1", "look", 3, "done"),
    following.InboxPut("c", "m", "steer", UserMessage("hi", id="m"), "2026-01-01T00:00:00.000000Z"),
    following.InboxHeard("c", "m"),
    following.InboxWithdrawn("c", "m"),
    following.CheckpointAdded("c", "k", 1, 3, ["a"], "so far"),
    following.TitleChanged("c", "a trip"),
    following.RunBegan("c", "r1", "resume", 2),
    following.RunEnded("c", "r1", "error", "Overloaded: later"),
    following.CaughtUp("c", "r1", ["m"], ["c1"]),
    following.Lagged("c"),
]


@pytest.mark.parametrize("item", ITEMS, ids=lambda item: item.type)
def test_an_item_is_read_back_as_it_was_written(item: FollowItem) -> None:
    text = item.to_json()
    assert "\n" not in text
    assert item_from_json(text) == item
    assert item_from_json(text.encode()) == item


def test_every_kind_of_item_is_tried() -> None:
    assert {type(item) for item in ITEMS} == set(get_args(FollowItem))


def test_what_a_later_version_adds_is_ignored() -> None:
    assert item_from_json('{"type":"title","cursor":"c","title":"x","colour":"red"}') == following.TitleChanged(
        "c", "x"
    )


@pytest.mark.parametrize("text", ["", "7", "{}", '{"type":"moon"}', '{"type":"title"}', '{"type":"title","cursor":1}'])
def test_what_is_no_item_is_refused(text: Any) -> None:
    with pytest.raises(InputError):
        item_from_json(text)
