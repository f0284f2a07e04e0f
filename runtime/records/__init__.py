"""What a run leaves behind, and the paths that it may write to."""
