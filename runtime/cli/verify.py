"""The command that checks a plan, and a proof of its bound."""

from __future__ import annotations

import json

import typer

from meshwright.planner.plan.plan import Plan, read_plan
from meshwright.planner.proof.document import Proof, read_proof
from meshwright.profiles.errors import BadInput
from meshwright.runtime.api.verification import names_table, unchecked
from meshwright.runtime.api.verification import verify as find_violations
from meshwright.runtime.cli.call import read_profile
from meshwright.runtime.cli.options import AsJson, PlanPath, Profile, ProofIn

EXAMPLES = """Example: meshwright verify plan.json

meshwright verify plan.json --profile table.json --proof proof.json
"""


def verify(
    plan: PlanPath,
    profile: Profile = None,
    proof: ProofIn = None,
    as_json: AsJson = False,
) -> None:
    """Check the rules, the costs and optionally a proof of a plan, without the solver."""
    document, proof_document = read_plan(plan), read_proof(proof) if proof else None
    sentences = find_violations(document, read_profile(profile), proof_document)
    costs_checked = profile is not None or not names_table(document)
    open_questions = () if sentences else unchecked(document, read_profile(profile), proof_document)
    if as_json:
        certified_seconds = proof_document.bound_seconds if proof_document and not sentences else None
        answer = {
            "violations": sentences,
            "costs_checked": costs_checked,
            "not_checked": open_questions,
            "certified_seconds": certified_seconds,
            "engine": document.facts.engine,
        }
        typer.echo(json.dumps(answer, indent=2))
    elif sentences:
        typer.echo("\n".join(sentences), err=True)
    elif proof_document:
        typer.echo("\n".join((_certified(document, proof_document), *open_questions)))
    elif open_questions:
        verdict = "it breaks no rule, and its costs are right." if costs_checked else "it breaks no rule."
        typer.echo("\n".join((verdict, *open_questions)))
    if sentences:
        raise typer.Exit(BadInput.exit_code)


def _certified(plan: Plan, proof: Proof) -> str:
    gap = (plan.period_seconds - proof.bound_seconds) / plan.period_seconds
    return (
        f"certified: no plan is faster than {proof.bound_seconds:.6g} s (this plan is within {gap:.2%}); "
        f"the solver claims {plan.solver.bound_seconds:.6g} s"
    )
