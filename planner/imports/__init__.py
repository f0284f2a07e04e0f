"""Import of other trainers' configurations: as a job, as a plan with its cost, and what would be faster."""
