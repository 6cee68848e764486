"""Settings of the docs site, for Sphinx: `make docs` builds it, with every warning an error.

The source folder is the repository: links between pages, README.md and files work in the site as they do on a
repository viewer. Only the pages below are read. docs/index.md is the navigation, see pages.py.
"""

import sys
from pathlib import Path

HERE = Path(__file__).resolve().parent
ROOT = HERE.parents[1]
sys.path[:0] = [str(ROOT), str(HERE)]

project = "megalowbit"
author = "the megalowbit authors"
copyright = author  # Sphinx's name for it
html_title = "megalowbit"

extensions = ["myst_parser", "sphinx.ext.autodoc", "sphinx.ext.napoleon", "pages"]
root_doc = "docs/index"
include_patterns = ["docs/**.md", "*.md"]
exclude_patterns = [".*", "runs", "build", "megalowbit", "tests", "configs", "benchmarks", "docs/site"]

# Strict: a missing file, a missing anchor, a page that no list of docs/index.md names.
nitpicky = True
# Docstrings name types of torch and others, whose pages are not part of this site; prose has no such roles.
nitpick_ignore_regex = [("py:.*", ".*")]
myst_heading_anchors = 6
myst_enable_extensions = ["deflist"]
suppress_warnings = ["myst.header"]  # a page may go from # to ###

# Signatures come from the sources. DeepSpeed is not imported, because it takes long and prints.
autodoc_mock_imports = ["deepspeed"]
autodoc_typehints = "signature"
autodoc_member_order = "bysource"
autodoc_default_options = {"members": True, "inherited-members": False}
autodoc_preserve_defaults = True
napoleon_google_docstring = True
napoleon_numpy_docstring = False
napoleon_use_ivar = True
python_maximum_signature_line_length = 90
add_module_names = False

html_theme = "furo"
html_copy_source = False
html_show_sphinx = False
html_static_path = ["static"]
html_css_files = ["site.css"]
highlight_language = "none"
