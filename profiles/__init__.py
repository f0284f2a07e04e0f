"""What is known: facts of models and hardware, measured tables and traces, and how documents are read."""
