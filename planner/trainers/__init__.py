"""Other trainers (verl, OpenRLHF, NeMo-RL, slime): import of configurations, plans within their settings, export."""
