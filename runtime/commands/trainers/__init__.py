"""What the command line says of other trainers: plans taken there, configurations brought from there."""
