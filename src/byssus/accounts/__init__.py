"""Operations on users, sessions, tasks, the tool log and usage. AgentStorage and the checkpointers offer them."""
