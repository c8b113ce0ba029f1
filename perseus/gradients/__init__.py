"""The handling of gradients, before and after the core reduces them, that all frameworks share."""
