"""The program in virtual time, with lengths that are drawn."""
