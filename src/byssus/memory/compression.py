"""Compressing a memory: old messages are marked, and a summary written by a model replaces them."""

from __future__ import annotations

import asyncio
import importlib
import inspect
from collections.abc import Awaitable, Callable, Sequence
from typing import Any, TypeAlias

from byssus.errors import ByssusError, InputError, ProviderError
from byssus.memory.arguments import mark_to_add
from byssus.memory.base import MemoryBase
from byssus.memory.msg import values_of
from byssus.messages import Message, from_value
from byssus.middleware.windows import INSTRUCTION, by_parts, summarized, transcript
from byssus.providers.base import Model, Provider
from byssus.signals import Signal

Writer: TypeAlias = Callable[[str], str | Awaitable[str]]  # a model as a function from text to text

_ATTEMPTS = 3
_PROVIDERS = {"anthropic": "AnthropicProvider", "openai": "OpenAIProvider", "local": "LocalProvider"}


async def compress(
    memory: MemoryBase,
    model: Model | Provider | Writer,
    *,
    provider: Provider | None = None,
    keep: int = 10,
    mark: str = "compressed",
    instruction: str = INSTRUCTION,
) -> str | None:
    """Let a model summarize all unmarked messages except the last `keep`, and mark them.

    Returns the new summary, which includes the current one; None if there was nothing to compress. A tool call and its
    result are compressed together or kept together. The marks and the summary are stored together; if the model fails,
    nothing is stored.

    `model` is called through `provider`, or through the provider that `model.provider` names. It can also be a provider
    that knows its model, or a function, plain or async, that gets a text and returns one.
    """
    if isinstance(keep, bool) or not isinstance(keep, int) or keep < 0:
        raise InputError(f"keep must be a number of messages from 0 up, got {keep!r:.80}")
    if not hasattr(memory, "mark_compressed"):
        raise InputError(f"compress needs a memory of byssus.memory or byssus.adapters, got {memory!r:.80}")
    mark_to_add(mark)
    write = _writer(model, provider, instruction)
    for _ in range(_ATTEMPTS):
        before = await memory.compressed_summary()  # read first: another compression after this point changes it
        messages = await memory.get_memory(exclude_mark=mark, prepend_summary=False)
        start = _cut(messages, keep)
        old = messages[:start]
        if not old:
            return None
        summary = await by_parts(write, before, [from_value(values_of(message)) for message in old])
        if not summary:
            raise ProviderError("the model wrote no summary; the memory is as it was")
        kept = {message.id for message in messages[start:]}
        ids = {message.id for message in old} - kept  # an id can occur twice
        if await memory.mark_compressed(ids, summary, mark, expected=before) is not None:
            return summary
    raise ByssusError(f"another process compressed the memory at the same time, {_ATTEMPTS} times; try again later")


def _writer(
    model: Model | Provider | Writer, provider: Provider | None, instruction: str
) -> Callable[[str, Sequence[Message]], Awaitable[str]]:
    if isinstance(model, type):
        raise InputError(f"compress needs an object, got the class; write {model.__name__}(...)")
    if isinstance(model, Model) or hasattr(model, "stream"):
        speaker, asked = _speaker(model, provider)
        return lambda before, old: summarized(
            speaker, asked, transcript(before, old), Signal(), instruction=instruction
        )
    if not callable(model):
        raise InputError(f"compress needs a Model, or a function that gets a text and returns one; got {model!r:.80}")
    function: Any = model
    waits = inspect.iscoroutinefunction(function) or inspect.iscoroutinefunction(type(function).__call__)

    async def ask(before: str, old: Sequence[Message]) -> str:
        prompt = f"{instruction}\n\n{transcript(before, old)}"
        answer = function(prompt) if waits else await asyncio.to_thread(function, prompt)  # it may block
        text = await answer if inspect.isawaitable(answer) else answer
        if not isinstance(text, str):
            raise InputError(f"the function that writes the summary must return a text, got {text!r:.80}")
        return text.strip()

    return ask


def _speaker(model: Any, provider: Provider | None) -> tuple[Provider, Model]:
    if isinstance(model, Model):
        return provider or _provider_of(model), model
    return model, Model(id=model.name, provider=model.name)


def _provider_of(model: Model) -> Provider:
    if model.provider not in _PROVIDERS:
        raise InputError(
            f"there is no provider {model.provider!r} for model {model.id!r}; pass provider=..., or use "
            f"one of {', '.join(_PROVIDERS)}"
        )
    module = importlib.import_module(f"byssus.providers.{model.provider}")
    made: Provider = getattr(module, _PROVIDERS[model.provider])()
    return made


def _cut(messages: Sequence[Any], keep: int) -> int:
    """Return how many messages can be compressed so that no tool call is separated from its result,
    even a later one.
    """
    asked: dict[str, int] = {}  # index of each call
    reach = list(range(len(messages)))  # the earliest message that each message must stay together with
    for position, message in enumerate(messages):
        for block in message.content if isinstance(message.content, list) else ():
            kind = block.get("type") if isinstance(block, dict) else None
            if kind == "tool_use":
                asked[str(block.get("id"))] = position
            elif kind == "tool_result":
                reach[position] = min(reach[position], asked.pop(str(block.get("id")), position))
    start = max(0, len(messages) - keep)
    last = max(asked.values(), default=-1)
    if last >= 0 and all(reach[position] < position for position in range(last + 1, len(messages))):
        start = min(start, last)  # some of its results are missing
    while (first := min(reach[start:], default=start)) < start:
        start = first
    return start
