"""What a rollout meets outside of the model: how long a call takes, and what several turns add up to."""
