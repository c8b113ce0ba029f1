"""Lets scripts written for other libraries find Perseus under those libraries' names."""
