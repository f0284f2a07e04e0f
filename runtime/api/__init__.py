"""What the command line and Python callers ask for: documents in, documents out. torch loads when a function needs it.

`meshwright.api` is all of it under one name.
"""
