"""The plan, its simulation and its runs drawn as one HTML file."""
