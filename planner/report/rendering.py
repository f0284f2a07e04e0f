"""The templates of the report, and the frame of every page: a single file that includes its styles and loads no other
resource. Jinja2 escapes every value that enters a template, except markup that a template has made.
"""

from __future__ import annotations

from jinja2 import Environment, PackageLoader, StrictUndefined
from markupsafe import Markup

from meshwright.planner.report import formatting


def _attribute_text(value: object) -> object:
    """Return a float as text of six digits, which place a shape to less than a pixel; other values are unchanged."""
    return f"{value:.6g}" if isinstance(value, float) else value


ENVIRONMENT = Environment(
    loader=PackageLoader("meshwright.planner.report"),
    autoescape=True,
    undefined=StrictUndefined,
    finalize=_attribute_text,
    trim_blocks=True,
    lstrip_blocks=True,
    keep_trailing_newline=True,
)
"""Jinja2 with the templates of this package; a name that is not given to a template is an error."""
ENVIRONMENT.globals["meaning_of_ranges"] = (
    "A range is from the 10th to the 90th percentile: 8 of 10 such predictions are met by a value in it."
)
ENVIRONMENT.globals["colours"] = (*formatting.COLOURS, "c-refit", "c-other")


def render(template: str, /, **values: object) -> Markup:
    """Return the markup that a file in `templates/` gives with these values."""
    return Markup(ENVIRONMENT.get_template(template).render(values))


def page(title: str, lead: str, *content: str) -> str:
    """Return the text of an HTML file with this title, a sentence below it, and this content."""
    return str(render("page.html", title=title, lead=lead, content=content))
