"""What scores responses on host workers: what a job says of it, and how long it is after the last response."""
