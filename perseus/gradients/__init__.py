"""What the gradients of every framework go through before and after the core reduces them."""
