"""perseus-report: the timelines of all ranks become one HTML page."""
