"""Facts of models, hardware and workloads, measured tables and traces, and the reading and writing of documents."""
