"""perseusrun: starts the ranks of a job on this and other hosts."""
