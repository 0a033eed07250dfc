"""Raw trajectories -> SFT rows."""
