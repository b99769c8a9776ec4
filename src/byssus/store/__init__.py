"""The store: a seam that runs queries in transactions, and the queries.

`database.py` is the seam, `sqlite.py` a database behind it, and the other files hold the queries of one group of tables
each: plain synchronous functions of a transaction that do nothing but SQL, so a runner may repeat them.
"""
