"""All that leaves this machine."""
