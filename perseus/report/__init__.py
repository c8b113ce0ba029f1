"""perseus-report: makes one HTML page from the timelines of a job's ranks."""
