"""A conversation as a page to keep or to send: Markdown, or HTML in one file that loads nothing.

Whatever was said stays text. In HTML everything is escaped, and an image is shown only if its data is one; a policy in
the page forbids scripts and requests, should anything be missed. In Markdown the words of people and models stand as
they were written, which is Markdown more often than not; what tools were given and what they answered is fenced.
"""

from __future__ import annotations

import html
import re
from collections.abc import Callable, Iterable, Iterator, Sequence

from byssus.cli.screen import terminal
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
    image_type,
)

_FENCE = re.compile(r" {0,3}(`{3,}|~{3,})(.*)")
_POLICY = "default-src 'none'; style-src 'unsafe-inline'; img-src data:"
_STYLE = """\
:root { color-scheme: light dark; }
body { font: 16px/1.5 system-ui, sans-serif; max-width: 46rem; margin: 2rem auto; padding: 0 1rem; }
article { border-left: 3px solid #8888; padding-left: 1rem; margin: 1.5rem 0; }
article.user { border-color: #36c; }
article.assistant { border-color: #393; }
h2 { font-size: .85rem; font-weight: 600; opacity: .7; margin: 0; }
pre { font: inherit; white-space: pre-wrap; overflow-wrap: anywhere; margin: .3rem 0; }
pre.code { font: .85rem/1.4 ui-monospace, monospace; background: #8881; padding: .5rem; }
pre.thinking { opacity: .7; font-style: italic; }
img { max-width: 100%; }
"""

When = Callable[[str], str]  # how a stored time is shown


def headline(message: Message, when: When) -> str:
    """Who speaks, of which tool, when, and how it ended if not well."""
    words = [message.role]
    if isinstance(message, ToolResultMessage):
        words.append(message.tool_name + (" (failed)" if message.is_error else ""))
    if not isinstance(message, Note) and message.created_at:
        words.append(when(message.created_at))
    if isinstance(message, AssistantMessage) and message.stop_reason not in ("stop", "tool_use"):
        words.append(message.stop_reason + (f": {message.error.message}" if message.error else ""))
    return terminal.line(", ".join(words))


def _text(text: str) -> str:
    return terminal.clean(text.replace("\r\n", "\n"))


# --- Markdown ---------------------------------------------------------------------------------------------------------


def markdown(title: str, messages: Iterable[Message], when: When) -> Iterator[str]:
    """The page piece by piece."""
    yield f"# {_plain(title)}\n"
    for message in messages:
        parts = [f"\n## {_plain(headline(message, when))}", *_markdown_parts(message)]
        yield "\n\n".join(part for part in parts if part) + "\n"


def _markdown_parts(message: Message) -> list[str]:
    if isinstance(message, Note):
        return [_closed(_text(message.text))] if message.text else [_fenced(terminal.as_json(message.body), "json")]
    is_result = isinstance(message, ToolResultMessage)
    return [_markdown_block(block, is_result) for block in message.content]


def _markdown_block(block: Block, is_result: bool) -> str:
    match block:
        case TextContent():
            return _fenced(block.text) if is_result else _closed(_text(block.text))
        case ThinkingContent():
            return "\n".join(f"> {line}".rstrip() for line in _text(block.thinking or "(not readable)").split("\n"))
        case ImageContent():
            return f"*(image, {_plain(block.mime_type)})*"
        case ToolCall():
            arguments = block.malformed or terminal.as_json(block.arguments)
            return f"Calls {_plain(block.name)} with\n\n{_fenced(arguments, 'json')}"
        case _:
            return _fenced(terminal.as_json(block.data), "json")


def _plain(text: str) -> str:
    """Text on one line that Markdown takes for nothing else."""
    return re.sub(r"([\\`*_\[\]<>#|~&])", r"\\\1", terminal.line(text))


def _fenced(text: str, language: str = "") -> str:
    text = _text(text)
    longest = max((len(run) for run in re.findall("`+", text)), default=0)
    fence = "`" * max(3, longest + 1)
    return f"{fence}{language}\n{text}\n{fence}"


def _closed(text: str) -> str:
    """The text with the end of a code block that it leaves open, or the rest of the page would be code."""
    fence = ""
    for line in text.split("\n"):
        found = _FENCE.fullmatch(line)
        if found and not fence:
            fence = "" if found[1][0] == "`" and "`" in found[2] else found[1]
        elif found and found[1].startswith(fence) and not found[2].strip():
            fence = ""
    return f"{text}\n{fence}" if fence else text


# --- HTML -------------------------------------------------------------------------------------------------------------


def html_page(title: str, messages: Sequence[Message], when: When) -> Iterator[str]:
    """The page piece by piece."""
    name = html.escape(terminal.line(title))
    yield (
        f'<!doctype html>\n<html>\n<head>\n<meta charset="utf-8">\n'
        f'<meta http-equiv="Content-Security-Policy" content="{_POLICY}">\n'
        f'<meta name="viewport" content="width=device-width">\n'
        f"<title>{name}</title>\n<style>\n{_STYLE}</style>\n</head>\n<body>\n<h1>{name}</h1>\n"
    )
    for message in messages:
        kind = "note" if isinstance(message, Note) else message.role
        blocks = "\n".join(_html_parts(message))
        yield f'<article class="{kind}">\n<h2>{html.escape(headline(message, when))}</h2>\n{blocks}\n</article>\n'
    yield "</body>\n</html>\n"


def _html_parts(message: Message) -> list[str]:
    if isinstance(message, Note):
        return [_pre(message.text) if message.text else _pre(terminal.as_json(message.body), "code")]
    return [_html_block(block, isinstance(message, ToolResultMessage)) for block in message.content]


def _html_block(block: Block, is_result: bool) -> str:
    match block:
        case TextContent():
            return _pre(block.text, "code" if is_result else "")
        case ThinkingContent():
            return _pre(block.thinking or "(not readable)", "thinking")
        case ImageContent() if kind := image_type(block):
            data = re.sub(r"\s", "", block.data)
            return f'<img alt="" src="data:{kind};base64,{data}">'
        case ImageContent():
            return _pre(f"(image, {block.mime_type})")
        case ToolCall():
            return _pre(f"{block.name} {block.malformed or terminal.as_json(block.arguments)}", "code")
        case _:
            return _pre(terminal.as_json(block.data), "code")


def _pre(text: str, kind: str = "") -> str:
    style = f' class="{kind}"' if kind else ""
    return f'<pre{style} dir="auto">{html.escape(_text(text))}</pre>'
