"""Was it right, how often, how sure."""
