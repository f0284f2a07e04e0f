"""What passes from rank to rank beside the collectives of a model."""
