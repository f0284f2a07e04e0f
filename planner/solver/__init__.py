"""The best answer to a problem and its proof. It knows no stages and no seconds; OR-Tools is imported here alone."""
