"""A reward that any model can learn in a minute, to try a job with: the share of a response that is vowels.

rewards:
  - {name: vowels, function: "vowels:share"}

PYTHONPATH=examples/functions meshwright run plan.json job.yaml --allow-module vowels --out run
"""


def share(samples):
    """Between 0 and 1 for each sample; 0 for an empty response."""
    return [sum(letter in "aeiou" for letter in one.response.lower()) / max(len(one.response), 1) for one in samples]
