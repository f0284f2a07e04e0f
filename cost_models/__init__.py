"""What a choice would cost: pure arithmetic in seconds and bytes, as named terms with their sources."""
