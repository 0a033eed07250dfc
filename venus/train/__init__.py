"""Documents -> gradients -> checkpoints."""
