"""Operations on threads: reading and appending, inbox, approvals, checkpoints, forks, retention and erasure."""
