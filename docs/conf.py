"""The documentation as a site: `make docs` builds it into build/docs; no server is needed."""

from __future__ import annotations

import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))

from gtopk import __version__  # noqa: E402 - found by the line above

project = "gtopk"
html_title = f"gtopk {__version__}"
copyright = "the authors of gtopk, Apache License 2.0"
exclude_patterns = ["make"]  # how the pages are made is no page

extensions = [
    "docs.make.commands",
    "docs.make.docstrings",
    "docs.make.titles",
    "myst_parser",
    "sphinx.ext.autodoc",
    "sphinx.ext.viewcode",
]

# Markdown, as GitHub shows it; the last two go unseen there.
myst_enable_extensions = ["attrs_inline", "deflist"]
myst_heading_anchors = 4  # so that pages link to each other's headings as on GitHub

highlight_language = "text"

autodoc_member_order = "bysource"
autodoc_preserve_defaults = True
autodoc_typehints_format = "short"
maximum_signature_line_length = 80
python_use_unqualified_type_names = True

# Everything comes along: nothing is fetched from anywhere.
html_theme = "furo"
html_static_path = ["site.css"]
html_css_files = ["site.css"]
html_copy_source = False
html_show_sphinx = False
html_theme_options = {
    "light_css_variables": {"color-brand-primary": "#00695c", "color-brand-content": "#00695c"},
    "dark_css_variables": {"color-brand-primary": "#80cbc4", "color-brand-content": "#80cbc4"},
}
