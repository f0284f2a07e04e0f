"""One rank's shard of a model: process groups, layers, attention and its cache, and loading and saving of weights."""
