"""From facts to a problem and back: legal choices, their frontier, the problem, the plan assembled."""
