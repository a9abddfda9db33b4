"""How Sphinx builds the documentation: ``sphinx-build -W -b html docs build/docs``. Nothing is fetched."""

import asynctrt

project = "asynctrt"
copyright = "the authors of asynctrt"  # noqa: A001  (Sphinx reads it.)
release = version = asynctrt.__version__

extensions = ["myst_parser", "sphinx.ext.autodoc", "sphinx_copybutton"]
exclude_patterns = ["README.md"]
source_suffix = {".md": "markdown"}
myst_heading_anchors = 3
autodoc_mock_imports = ["onnxruntime", "ray"]  # They are large, and the pages need none of them.
autodoc_member_order = "bysource"
autodoc_preserve_defaults = True  # As they are written: a function has no value that can be read.
autodoc_typehints = "description"
autodoc_typehints_description_target = "documented"
suppress_warnings = ["myst.xref_missing"]  # Links to files of the source, which the site does not have.

html_theme = "furo"
html_title = f"asynctrt {release}"
html_static_path = ["static"]
html_css_files = ["pages.css"]
