"""Another trainer's configuration as a job and as a plan: what it says, what that costs, what would be faster."""
