"""The commands: what each reads, asks of the house and shows. The parts that load slowly are imported inside."""
