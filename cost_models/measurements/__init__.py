"""What a measured table says of a shard, kernel or body, between and beyond its points."""
