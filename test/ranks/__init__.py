"""Runs checks under pytest on every rank of one launch, and shows each as a test of its own.

`launch` starts the ranks, `lockstep` keeps them together, `on_rank` is the program of each of them,
and `fixtures` is what tests ask for.
"""
