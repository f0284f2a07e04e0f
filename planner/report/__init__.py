"""HTML reports: a plan, its simulation and its runs drawn in one file."""
