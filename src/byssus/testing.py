"""For tests of your own agents: a provider that plays a script, and raises where program and script disagree.

provider = ScriptedProvider([[ToolCall("c1", "weather", {"city": "Oslo"})], "It rains."])
agent = Agent(provider=provider, model=Model("test"), tools=[weather])
assert (await agent.prompt("How is Oslo?")).text == "It rains."
provider.assert_done()
"""

from __future__ import annotations

from byssus.providers.scripted import Reply, ScriptedProvider, ScriptError, Step

__all__ = ["Reply", "ScriptError", "ScriptedProvider", "Step"]
