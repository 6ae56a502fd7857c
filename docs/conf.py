"""Settings of the documentation site; `make docs` builds it, and a warning is an error."""

import hashlib
import importlib.metadata
import os
import sys
from pathlib import Path

HERE = Path(__file__).parent
sys.path.insert(0, str(HERE / "_site"))

project = "fedcb2o"
author = "The fedcb2o authors"
copyright = f"2026, {author}. Apache-2.0"
release = version = importlib.metadata.version("fedcb2o")

extensions = ["myst_nb", "sphinx.ext.autodoc", "sphinx.ext.napoleon", "sphinx.ext.viewcode"]
# In _site:
extensions += [
    "commands",
    "docstrings",
    "explorer",
    "folders",
    "keys",
    "mathml",
    "verdicts",
    "wide",
]
exclude_patterns = ["README.md", "_site", "gallery", "benchmark", "reproduction", "figures"]
nitpicky = True
# Only names of this project must exist; a build needs no pages of other projects, and no network.
nitpick_ignore_regex = [("py:.*", r"(?!fedcb2o\.).*")]
# Rare types of arguments have no entry in the reference.
rarely = (
    r"plugins\.F",
    r".*\.DatasetNames",
    r"nn\.low_rank\.FactorPair",
    r"data\.sets\._text\.Passage",
    r"federated\.sections\..*",
    r"federated\.(algorithms|attacks)\.section\..*",
    r"(experiments|peer)\..*",
    r"report\._\w+\..*",
    r"records\.metrics\.Metric",
    r"simulation\.traces\.ClockSection",
    r".*\._\w+",
)
nitpick_ignore_regex += [("py:class", rf"fedcb2o\.{name}") for name in rarely]

# Pages: the files that a forge shows, with its anchors, and notebooks.
myst_enable_extensions = ["dollarmath"]
myst_heading_anchors = 4

# Notebooks run during the build, in a folder of their own, if they or the package changed.
source = hashlib.sha256()
for path in sorted((HERE.parent / "src").rglob("*.*")):
    if path.suffix in {".py", ".toml"}:
        source.update(path.read_bytes())
nb_execution_mode = "cache"
nb_execution_cache_path = str(
    HERE.parent / "build" / "docs" / "notebooks" / source.hexdigest()[:16]
)
nb_execution_in_temp = True
nb_execution_raise_on_error = True
nb_execution_timeout = 600
os.environ.setdefault("OMP_NUM_THREADS", "1")  # fastest for small runs
nb_merge_streams = True
nb_output_stderr = "remove"  # progress of runs

# The reference: docstrings in Google style with `name` as code.
default_role = "code"
autodoc_member_order = "bysource"
autodoc_typehints_format = "short"
autodoc_preserve_defaults = True
napoleon_numpy_docstring = False
napoleon_use_rtype = False
napoleon_attr_annotations = False  # shapes such as "*a m" are not markup
python_use_unqualified_type_names = True
python_maximum_signature_line_length = 88
add_module_names = False
toc_object_entries_show_parents = "hide"

html_theme = "furo"
html_title = "fedcb2o"
html_static_path = ["_site/static"]
html_css_files = ["site.css"]
html_extra_path = ["explorer.html"]
html_math_renderer = "mathml"
smartquotes = False  # --list is an option, not a dash
html_copy_source = False
html_show_sourcelink = False
html_theme_options = {
    "light_css_variables": {"color-brand-primary": "#00629b", "color-brand-content": "#00629b"},
    "dark_css_variables": {"color-brand-primary": "#56b4e9", "color-brand-content": "#56b4e9"},
}
pygments_style = "a11y-high-contrast-light"
pygments_dark_style = "github-dark"
