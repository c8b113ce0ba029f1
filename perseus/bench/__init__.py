"""perseus-bench: measures Perseus, its peers and the machine's limits in the same processes."""
