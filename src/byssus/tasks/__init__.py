"""Operations on tasks and schedules. AgentStorage and the checkpointers offer them."""
