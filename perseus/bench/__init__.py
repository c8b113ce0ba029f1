"""perseus-bench: measurements against peers and physical limits in one run of one job."""
