"""How positions turn queries and keys: the base and the type of a rotary embedding, read from a Hugging Face config."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, NamedTuple

from meshwright.profiles.errors import BadInput, suggestion
from meshwright.profiles.model_parts.completed_config import number, required_size
from meshwright.profiles.model_parts.family_keys import FAMILIES

_RUN = ("default", "llama3")
_PLANNED = ("dynamic", "linear", "longrope", "proportional", "yarn")
"""Types that no cost depends on, so that models with them are planned, and that the runtime does not compute."""

_FORMS = ("rope_scaling", "rope_parameters")
_OF_LLAMA3 = ("factor", "low_freq_factor", "high_freq_factor")
_ORIGINAL = "original_max_position_embeddings"


@dataclass(frozen=True, kw_only=True)
class RopeScaling:
    """Llama 3.1's stretching of the rotary frequencies (Llama 3 report, arXiv:2407.21783, section 3.4.2)."""

    factor: float
    low_freq_factor: float
    high_freq_factor: float
    original_max_positions: int


class Rope(NamedTuple):
    """The base, the stretching where it is Llama 3.1's, and the type where it is one that is planned only."""

    theta: float
    scaling: RopeScaling | None = None
    planned_type: str = ""


def rope_from_config(config: Mapping[str, Any], max_positions: int, family: str, name: str) -> Rope:
    """The rotary embedding that the old keys (`rope_theta`, `rope_scaling`) or the new `rope_parameters` describe.

    Raises BadInput where they say two things, and for a type that is not known.
    """
    forms = {key: _form(config, key, family, name) for key in _FORMS if config.get(key)}
    if len(forms) > 1 and len({str(sorted(form.items())) for form in forms.values()}) > 1:
        raise BadInput(
            f"model {name}: config keys 'rope_scaling' and 'rope_parameters' say two things, {config['rope_scaling']} "
            f"and {config['rope_parameters']}; keep the one that the model was trained with."
        )
    form = next(iter(forms.values()), None) or _completed({}, config, family)
    theta = number(form, "rope_theta", name)
    if not theta:
        raise BadInput(f"model {name}: config key 'rope_theta' is {theta}; it must be above 0.")
    kind = form["rope_type"]
    if kind in _PLANNED:
        return Rope(theta, planned_type=kind)
    more = {key: value for key, value in form.items() if value is not None}.keys() - {"rope_type", "rope_theta"}
    if strange := sorted(more - ({*_OF_LLAMA3, _ORIGINAL} if kind == "llama3" else set())):
        raise BadInput(
            f"model {name}: its rotary embedding has {', '.join(strange)}, which type {kind!r} does not know; give the "
            "rope_type that it belongs to, or remove it."
        )
    if kind == "default":
        return Rope(theta)
    factor, low, high = (number(form, key, name) for key in _OF_LLAMA3)
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
    """What one of the keys says, with its base and its type. Raises BadInput for what is no such description."""
    found, top = config[key], config.get("rope_theta")
    if not isinstance(found, dict):
        raise BadInput(f"model {name}: config key {key!r} is {found!r}; it must be an object.")
    if any(isinstance(value, dict) for value in found.values()):
        raise BadInput(f"model {name}: config key {key!r} has a rotary embedding for each kind of layer; give one.")
    own = found.get("rope_theta", top)
    if top is not None and own != top:
        raise BadInput(
            f"model {name}: rope_theta is {top} in the config and {own} in its {key!r}; keep the one that the model "
            "was trained with."
        )
    kinds = {str(found[key]) for key in ("rope_type", "type") if found.get(key) is not None} or {"default"}
    if len(kinds) > 1:
        raise BadInput(f"model {name}: config key {key!r} has two types, {' and '.join(sorted(kinds))}; keep one.")
    [kind] = kinds
    if kind not in (*_RUN, *_PLANNED):
        raise BadInput(f"model {name}: rope type {kind!r} is not known; {suggestion(kind, (*_RUN, *_PLANNED))}")
    factor = found.get("partial_rotary_factor")
    if factor not in (None, 1):
        raise BadInput(f"model {name}: config key {key!r} has partial_rotary_factor={factor!r}; only 1 is known.")
    return _completed(found, config, family)


def _completed(form: Mapping[str, Any], config: Mapping[str, Any], family: str) -> dict[str, Any]:
    theta = config.get("rope_theta", FAMILIES[family].rope_theta)
    kind = form.get("rope_type") or form.get("type") or "default"
    found = {"rope_theta": theta, **form, "rope_type": kind}
    return {key: value for key, value in found.items() if key not in ("type", "partial_rotary_factor")}
