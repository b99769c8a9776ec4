"""The chat that draws: a transcript in the scrollback of the terminal, and below it a few lines that change.

What is finished (a paragraph, a tool call, a prompt) is printed once and belongs to the terminal from then on: it can
be selected, copied and scrolled. Only what still changes is drawn again: the open end of a reply, the calls that run,
the messages that wait, the input and the status. `start.py` opens it, `session.py` is the conversation, `screen.py` the
terminal.
"""
