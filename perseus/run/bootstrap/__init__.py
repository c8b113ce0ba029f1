"""How a process of a job starts: who it is, and where it meets the other ranks.

Works without the rest of Perseus, which stands on it: perseus.basics asks here in init().
"""
