"""The commands: each reads its inputs, calls the API and prints the result."""
