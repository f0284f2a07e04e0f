"""Training: losses, optimizers, weight synchronisation (refit), weight copies and versions, and checkpoints."""
