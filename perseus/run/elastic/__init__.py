"""Elastic jobs of perseusrun: hosts and ranks that come and go while training goes on."""
