"""A tool of your own: what a model asks for between << and >> is looked up in a table.

    workload:
      turns: {number: {max: 3, fixed: 2}, result: {max: 16, fixed: 8}}
    tool: {function: "look_up:capital", call_end: ">>", failure_answer: "not known"}

    PYTHONPATH=examples/functions meshwright run plan.json job.yaml --allow-module look_up --out run

A function takes a list of calls and returns a list of as many texts, appended to the rollouts as tool tokens, which
carry no loss. A call is a sample with all of the rollout so far as its `response`, `turn`, its number, and `sampled`,
the text that this turn has generated.
"""

CAPITALS = {"france": "Paris", "japan": "Tokyo", "kenya": "Nairobi"}


def capital(calls):
    """The capital of the country that each call names last."""
    return [answer(call.sampled) for call in calls]


def answer(sampled):
    asked = sampled.rpartition("<<")[2].removesuffix(">>").strip().lower()
    return CAPITALS.get(asked, "not known")
