"""The commands: what each reads, asks of the api and shows."""
