"""Queries on threads and their messages: the log, branches, leases, marks, inbox, ledger, memories."""
