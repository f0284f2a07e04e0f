"""Other trainers, such as verl: import of configurations, plans within their settings, export."""
