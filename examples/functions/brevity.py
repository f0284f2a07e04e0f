"""A reward function of your own: correct answers are worth more the shorter they are.

    rewards:
      - {name: brevity, function: "brevity:short_and_right", batch_size: 64, failure_score: 0}

    PYTHONPATH=examples/functions meshwright run plan.json job.yaml --allow-module brevity --out run

A function takes a list of samples and returns a list of as many numbers. A sample has `id`, `prompt`, `response`,
`prompt_ids`, `response_ids`, where the prompt's line in the data has one, `answer` and, where it is a chat, `messages`.
"""

LONGEST = 512
"""Tokens from which on a correct response is worth no more than half."""


def short_and_right(samples):
    """1 for an immediate correct answer, down to 0.5 for a long one, and 0 for a wrong one."""
    return [score(sample.response, sample.answer or "", len(sample.response_ids)) for sample in samples]


def score(response, answer, num_tokens):
    """Of one response of so many tokens."""
    last_line = response.strip().splitlines()[-1:] or [""]
    if answer.strip() not in last_line[0]:
        return 0.0
    return 1.0 - 0.5 * min(num_tokens / LONGEST, 1.0)
