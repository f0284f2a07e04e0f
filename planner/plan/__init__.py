"""The decision: the job that is asked, the plan that answers, and the rules that hold between them."""
