"""The plan lowered to instructions, checked before anything follows them."""
