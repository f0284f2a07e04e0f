"""Advantages of your own: a response is worth its reward beyond what the critic expects, and what two teachers think.

    algorithm:
      stages:
        - {name: actor_train, kind: training, role: actor, advantages: "taught_and_paid:advantages", reads: [...]}

    PYTHONPATH=examples/functions meshwright run plan.json job.yaml --allow-module taught_and_paid --out run

The function is called with a whole batch, right-padded: B rows of S tokens. It returns a number for each token, [B, S].
`inputs` has `rewards` [B], `truncated` [B], `mask` [B, S], `group_size` and `fields`, [B, S] each: what the stage
reads, and `old_logprobs`, those of the policy before the update.
"""

TEACHERS_WEIGHT = 0.1
"""Weight of the teachers' log-probabilities beside the reward."""


def advantages(inputs):
    """The reward less the critic's value, and a part of log p(teachers) - log p(student)."""
    fields = inputs.fields
    teachers = (fields["teacher_logprobs"] + fields["teacher_2_logprobs"]) / 2
    beyond = inputs.rewards[:, None] - fields["values"]
    return beyond + TEACHERS_WEIGHT * (teachers - fields["old_logprobs"])
