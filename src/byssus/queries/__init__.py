"""All SQL. A query is a plain function of a transaction and does nothing but SQL, so a runner may repeat it."""
