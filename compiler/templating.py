"""Templates of texts that the compiler writes: pictures, pages, job scripts."""

from __future__ import annotations

from typing import Callable

import jinja2


def environment(autoescape: bool = True, **filters: Callable) -> jinja2.Environment:
    """Of `compiler/templates`. autoescape: for XML and HTML; a name that a template does not get is an error."""
    made = jinja2.Environment(
        loader=jinja2.PackageLoader("compiler", "templates"), autoescape=autoescape, trim_blocks=True, lstrip_blocks=True,
        keep_trailing_newline=True, undefined=jinja2.StrictUndefined)
    made.filters.update(filters)
    return made
