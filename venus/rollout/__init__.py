"""Questions -> trajectories."""
