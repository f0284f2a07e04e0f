"""Parts of a model that have sizes of their own."""
