"""Messages between ranks other than the collectives of a model: experience, chunks of responses, reports, barriers."""
