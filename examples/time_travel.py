"""Go back to an earlier point of a conversation, try another way from there, and keep both. No key is needed."""

import asyncio

from byssus import Agent, Model
from byssus.checkpointer import Checkpointer, SQLiteCheckpointer, keep_last
from byssus.testing import ScriptedProvider


def planner(cp: Checkpointer, replies: list[str], *, at: str | None = None) -> Agent:
    """An agent that makes a checkpoint after each turn. With `at`, it begins on a fork."""
    return Agent(
        provider=ScriptedProvider(replies),
        model=Model(id="scripted"),
        checkpointer=cp,
        thread_id="trip",
        checkpoint_every="turn",
        at=at,
    )


async def tell(cp: Checkpointer, title: str, thread_id: str) -> None:
    thread = await cp.load(thread_id)
    assert thread is not None
    print(f"\n{title}")
    for message in thread.messages:
        print(f"  {message.role}: {message.text}")


async def main() -> None:
    async with SQLiteCheckpointer("time_travel.db") as cp:
        await cp.erase_thread("trip", forks="erase")  # of an earlier time: the story begins anew
        agent = planner(cp, ["Lisbon, in May.", "The night train, 14 hours.", "Booked: two beds."])
        for question in ("Where shall we go?", "How do we get there?", "Book it."):
            await agent.prompt(question)
        await tell(cp, "The plan:", "trip")

        booked, by_train, lisbon = await cp.list_checkpoints("trip")
        other = planner(cp, ["By ship from Nantes, two days."], at=lisbon.checkpoint_id)
        await other.prompt("How do we get there without a train?")
        assert other.thread_id is not None
        await tell(cp, f"Another way, from {lisbon.summary!r} on:", other.thread_id)

        parted = await cp.diff("trip", other.thread_id)
        print(f"\nThey share {parted.shared} messages; then {parted.only_a} follow here, and {parted.only_b} there.")

        undo = await cp.rewind("trip", to=by_train.checkpoint_id)
        assert undo == booked.checkpoint_id  # where the thread stood: rewinding to it would undo this
        await planner(cp, ["Booked: two seats."]).prompt("Book seats, not beds.")
        await tell(cp, "The plan, after a change of mind:", "trip")
        print(f"\nAll that there is:\n{await cp.tree('trip')}")

        removed = await cp.prune("trip", keep=keep_last(1))
        print(f"\nPruned: {len(removed.checkpoints)} checkpoints and {removed.messages} messages went.")
        print(f"What is left:\n{await cp.tree('trip')}")
        await tell(cp, "The other way is whole:", other.thread_id)


if __name__ == "__main__":
    asyncio.run(main())
