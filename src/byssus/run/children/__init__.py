"""Child threads: the tool that an agent is for another one, and the calls of it."""
