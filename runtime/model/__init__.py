"""One rank's shard of a model: its modules, its weights and its passes, forward and cached."""
