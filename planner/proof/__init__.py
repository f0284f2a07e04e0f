"""A proof of the bound that a stranger can check, and what makes one."""
