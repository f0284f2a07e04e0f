"""What changes weights: losses, optimizers, refits, copies, checkpoints, and the versions of all of them."""
