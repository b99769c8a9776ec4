"""Models named by a string, and which provider serves which model.

    provider, model = provider_of("anthropic:claude-sonnet-5-5")
    provider, model = provider_of("openai:gpt-5.5")
    provider, model = provider_of("local")                # the embedded model; "local:FILE" is a GGUF file

- A provider is made once per service, options and environment (`OPENAI_API_KEY`, `OPENAI_BASE_URL`, ...) of a process,
  so agents that come and go share its connections.
- It needs no closing: connections belong to an event loop, and are closed with it.
- Only the module of the named service is imported, and a missing extra is an error here, not in the first run.
"""

from __future__ import annotations

import functools
import importlib.util
import os
import re
from collections.abc import Sequence
from typing import Any, TypeAlias

from byssus.errors import InputError, MissingExtra
from byssus.providers.base import Model, Provider
from byssus.providers.model_call import Route

ModelName: TypeAlias = str | Model  # a model as callers name it

SERVICES = ("anthropic", "openai", "local")
_FORMS = "'anthropic:<model id>', 'openai:<model id>', 'local' or 'local:<GGUF file>'"
_KNOWN_IDS = {"anthropic": re.compile(r"claude"), "openai": re.compile(r"gpt-|o\d|chatgpt")}


def provider_of(name: str, **options: Any) -> tuple[Provider, Model]:
    """The provider and the model that a string such as "openai:gpt-5.5" names.

    `options` are those of the provider: `api_key` and `base_url` of a service, `n_ctx` of the local one.
    """
    service, model_id = _parsed(name)
    if service == "local":
        return _local(name, model_id or None, options)
    return _service(name, service, options), Model(id=model_id, provider=service)


def routes(provider: object, model: object) -> list[Route]:
    """Which provider serves which model, in the order in which they are asked. Without a provider, models name it."""
    providers: list[Any] = [] if provider is None else list(provider) if isinstance(provider, Sequence) else [provider]
    models: list[Any] = list(model) if isinstance(model, Sequence) and not isinstance(model, str) else [model]
    if isinstance(provider, str) or (provider is not None and not providers):
        providers = [provider]  # refused below, with the value as it was given
    for item in providers:
        _check_provider(item)
    if len(names := {getattr(item, "name", None) for item in providers}) < len(providers):
        raise InputError(f"two providers share one of the names {names}, so that a model could only mean the first")
    return [_route(providers, item) for item in models or [model]]


def _route(providers: list[Provider], model: object) -> Route:
    if isinstance(model, str):
        return _named_route(providers, model)
    if not isinstance(model, Model):
        raise InputError(f"model must be a Model(id='...') or one of {_FORMS}; got {model!r:.80}")
    if len(providers) == 1:
        return Route(providers[0], model)
    for provider in providers:
        if provider.name == model.provider:
            return Route(provider, model)
    if not providers and model.provider in SERVICES:
        text = model.provider if model.provider == "local" else f"{model.provider}:{model.id}"
        return Route(provider_of(text)[0], model)
    if not providers:
        raise InputError(
            f"model {model.id!r} names the provider {model.provider!r}; pass provider=..., or "
            f"Model(..., provider='openai') with one of {', '.join(map(repr, SERVICES))}"
        )
    names = ", ".join(repr(provider.name) for provider in providers)
    raise InputError(f"model {model.id!r} names the provider {model.provider!r}, but there are only {names}")


def _named_route(providers: list[Provider], name: str) -> Route:
    """With explicit providers, "openai:..." means the one of that name; any other text is an id for the only one."""
    service, colon, model_id = name.partition(":")
    for provider in providers:
        if colon and model_id.strip() and service == provider.name:
            return Route(provider, Model(id=model_id.strip(), provider=service))
    if len(providers) == 1 and service not in SERVICES:
        return Route(providers[0], Model(id=name, provider=providers[0].name))
    return Route(*provider_of(name))


def _check_provider(item: object) -> None:
    if isinstance(item, type):
        raise InputError(f"provider must be an object, and got the class; write {item.__name__}(...)")
    if isinstance(item, str):
        raise InputError(
            f"provider={item!r:.80} is a string, and provider must have a stream() method; pass an object such as "
            f"OpenAIProvider(), or leave provider out and name the service in model: {_FORMS}"
        )
    if not callable(getattr(item, "stream", None)):
        raise InputError(f"provider must have a stream() method, as AnthropicProvider() does; got {item!r:.200}")


def _parsed(name: object) -> tuple[str, str]:
    if not isinstance(name, str):
        raise InputError(f"model must be one of {_FORMS}; got {name!r:.80}")
    service, colon, model_id = (part.strip() for part in name.partition(":"))
    if service not in SERVICES:
        guess = next((known for known, ids in _KNOWN_IDS.items() if ids.match(name) and not colon), None)
        meant = f"did you mean '{guess}:{name}'?" if guess else f"write {_FORMS}"
        other = "; any other server of OpenAI's protocol: provider=OpenAIProvider(base_url=...)" if not guess else ""
        raise InputError(f"model {name!r:.80} names no service that is known here; {meant}{other}")
    if not model_id and (colon or service != "local"):
        raise InputError(f"model {name!r:.80} has no model id; write '{service}:<model id>'")
    return service, model_id


def _service(name: str, service: str, options: dict[str, Any]) -> Provider:
    if importlib.util.find_spec(service) is None:  # their SDKs have the names of the services
        raise MissingExtra(f"model {name!r:.80}", service)
    prefix = f"{service.upper()}_"
    environment = tuple(sorted(item for item in os.environ.items() if item[0].startswith(prefix)))
    return _made(service, environment, tuple(sorted(options.items())))


@functools.lru_cache(maxsize=32)
def _made(service: str, environment: tuple[tuple[str, str], ...], options: tuple[tuple[str, Any], ...]) -> Provider:  # noqa: ARG001
    """`environment` is only a part of the key: the SDK reads it when it connects."""
    if service == "openai":
        from byssus.providers.openai import OpenAIProvider  # noqa: PLC0415 - only programs that name it pay for it

        return OpenAIProvider(**dict(options))
    from byssus.providers.anthropic import AnthropicProvider  # noqa: PLC0415 - likewise

    return AnthropicProvider(**dict(options))


def _local(name: str, file: str | None, options: dict[str, Any]) -> tuple[Provider, Model]:
    from byssus.providers.local import SMOLLM2, LocalProvider  # noqa: PLC0415 - likewise

    try:
        provider = LocalProvider(file, **options)  # not kept: what is expensive, the loaded file, is shared already
    except InputError as error:
        raise InputError(f"model {name!r:.200}: {error}") from error
    if file is None:
        return provider, SMOLLM2
    stem = os.path.splitext(os.path.basename(file))[0]  # noqa: PTH119, PTH122 - pathlib is slow to import
    return provider, Model(id=stem or file, provider="local")
