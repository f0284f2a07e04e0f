"""Export of plans to other trainers: what each can express, the best plan within that, and the configuration files."""
