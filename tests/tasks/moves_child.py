"""A process that makes moves of tasks as it is told: each line is a call, and is answered with what it came to.

python -m tests.tasks.moves_child PLACE
"""

from __future__ import annotations

import asyncio
import base64
import pickle
import sys
from typing import Any

from byssus.checkpointer import Checkpointer, checkpointer_for
from byssus.errors import IllegalMove


def packed(value: object) -> str:
    return base64.b64encode(pickle.dumps(value)).decode()


def unpacked(text: str) -> Any:
    return pickle.loads(base64.b64decode(text))


async def done(cp: Checkpointer, call: Any, args: tuple[Any, ...], options: dict[str, Any]) -> Any:
    """The result of a method of the checkpointer, by its name, or of a write."""
    return await (getattr(cp, call)(*args, **options) if isinstance(call, str) else cp.store.write(call, *args))


async def main(place: str) -> None:
    async with checkpointer_for(place) as cp:
        for line in sys.stdin:
            answer: tuple[Any, str | None]
            try:
                answer = await done(cp, *unpacked(line)), None
            except IllegalMove as error:
                answer = None, str(error)
            print(packed(answer), flush=True)  # noqa: T201


if __name__ == "__main__":
    asyncio.run(main(sys.argv[1]))
