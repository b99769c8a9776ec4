"""What a person types: keys, commands, completion, attachments, the history, and the editor."""
