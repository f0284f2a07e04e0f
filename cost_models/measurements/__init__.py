"""Times and memory from a measured table, interpolated between its points and extrapolated beyond them."""
