"""Ready-made tools: files below a folder, shell commands, and the time.

    agent = Agent(provider=provider, model=model, tools=[*files("project"), *shell("project"), *clock()])

None of them needs the network. What changes something asks a person first.
"""

from byssus.tools.ready.clock import clock as clock
from byssus.tools.ready.files import files as files
from byssus.tools.ready.shell import shell as shell

__all__ = ["clock", "files", "shell"]
