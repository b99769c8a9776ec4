"""Operations on users, sessions, tasks, the tool log and usage, as AgentStorage and checkpointers offer them."""
