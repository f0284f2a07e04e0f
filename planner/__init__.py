"""Which choice: the plan, the search and its proof, what explains it, and the same program in virtual time."""
