"""How a process of a job starts: its rank, and where it finds the other ranks.

Works without the rest of Perseus, which stands on it: perseus.basics asks here in init().
"""
