"""The bootstrap of a rank: finds out its identity and the store where it finds the other ranks.

perseus.basics calls it in init(). Of Perseus, it imports the native core only.
"""
