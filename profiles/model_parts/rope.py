"""The base and the type of rotary position embeddings (RoPE), read from a Hugging Face config."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, NamedTuple

from meshwright.profiles.errors import BadInput, suggestion
from meshwright.profiles.model_parts.completed_config import number, required_size
from meshwright.profiles.model_parts.family_keys import FAMILIES

_RUN = ("default", "llama3")
_PLANNED = ("dynamic", "linear", "longrope", "proportional", "yarn")
"""Types that can be planned, because no cost depends on them, but not run."""

_FORMS = ("rope_scaling", "rope_parameters")
_LLAMA3_KEYS = ("factor", "low_freq_factor", "high_freq_factor")
_ORIGINAL = "original_max_position_embeddings"


@dataclass(frozen=True, kw_only=True)
class RopeScaling:
    """Llama 3.1's scaling of the rotary frequencies (Llama 3 report, arXiv:2407.21783, section 3.4.2)."""

    factor: float
    low_freq_factor: float
    high_freq_factor: float
    original_max_positions: int


class Rope(NamedTuple):
    """The base `theta`, Llama 3.1's scaling if it applies, and the type if it can only be planned."""

    theta: float
    scaling: RopeScaling | None = None
    planned_type: str = ""


def rope_from_config(config: Mapping[str, Any], max_positions: int, family: str, name: str) -> Rope:
    """Return the rotary embedding described by the old keys (`rope_theta`, `rope_scaling`) or by `rope_parameters`.

    Raises BadInput if they contradict each other or the type is unknown.
    """
    forms = {key: _form(config, key, family, name) for key in _FORMS if config.get(key)}
    if len(forms) > 1 and len({str(sorted(form.items())) for form in forms.values()}) > 1:
        raise BadInput(
            f"model {name}: config keys 'rope_scaling' and 'rope_parameters' contradict each other, "
            f"{config['rope_scaling']} and {config['rope_parameters']}; keep the one that the model was trained with."
        )
    form = next(iter(forms.values()), None) or _completed({}, config, family)
    theta = number(form, "rope_theta", name)
    if not theta:
        raise BadInput(f"model {name}: config key 'rope_theta' is {theta}; it must be above 0.")
    kind = form["rope_type"]
    if kind in _PLANNED:
        return Rope(theta, planned_type=kind)
    more = {key: value for key, value in form.items() if value is not None}.keys() - {"rope_type", "rope_theta"}
    if unknown := sorted(more - ({*_LLAMA3_KEYS, _ORIGINAL} if kind == "llama3" else set())):
        raise BadInput(
            f"model {name}: its rotary embedding has {', '.join(unknown)}, which type {kind!r} does not know; give the "
            "rope_type that it belongs to, or remove it."
        )
    if kind == "default":
        return Rope(theta)
    factor, low, high = (number(form, key, name) for key in _LLAMA3_KEYS)
    if not factor or high <= low:
        raise BadInput(
            f"model {name}: rope type llama3 has factor={factor:g}, low_freq_factor={low:g} and high_freq_factor="
            f"{high:g}; the first must be above 0, and the last above the one before it."
        )
    original = required_size({_ORIGINAL: max_positions} | form, _ORIGINAL, name)
    return Rope(
        theta,
        RopeScaling(factor=factor, low_freq_factor=low, high_freq_factor=high, original_max_positions=original),
    )


def _form(config: Mapping[str, Any], key: str, family: str, name: str) -> dict[str, Any]:
    """The parameters under one of the keys, with base and type filled in. Raises BadInput for invalid ones."""
    form, top_theta = config[key], config.get("rope_theta")
    if not isinstance(form, dict):
        raise BadInput(f"model {name}: config key {key!r} is {form!r}; it must be an object.")
    if any(isinstance(value, dict) for value in form.values()):
        raise BadInput(f"model {name}: config key {key!r} has a rotary embedding for each kind of layer; give one.")
    theta = form.get("rope_theta", top_theta)
    if top_theta is not None and theta != top_theta:
        raise BadInput(
            f"model {name}: rope_theta is {top_theta} in the config and {theta} in its {key!r}; keep the one that the "
            "model was trained with."
        )
    kinds = {str(form[key]) for key in ("rope_type", "type") if form.get(key) is not None} or {"default"}
    if len(kinds) > 1:
        raise BadInput(f"model {name}: config key {key!r} has two types, {' and '.join(sorted(kinds))}; keep one.")
    [kind] = kinds
    if kind not in (*_RUN, *_PLANNED):
        raise BadInput(f"model {name}: rope type {kind!r} is not known; {suggestion(kind, (*_RUN, *_PLANNED))}")
    factor = form.get("partial_rotary_factor")
    if factor not in (None, 1):
        raise BadInput(f"model {name}: config key {key!r} has partial_rotary_factor={factor!r}; only 1 is supported.")
    return _completed(form, config, family)


def _completed(form: Mapping[str, Any], config: Mapping[str, Any], family: str) -> dict[str, Any]:
    theta = config.get("rope_theta", FAMILIES[family].rope_theta)
    kind = form.get("rope_type") or form.get("type") or "default"
    parameters = {"rope_theta": theta, **form, "rope_type": kind}
    return {key: value for key, value in parameters.items() if key not in ("type", "partial_rotary_factor")}
