"""Horovod's own names that belong to no framework, and the command under which they are found.

Adapters and the launcher import these; the import alias in perseus.compat stands above them all.
"""
