"""Sphinx: the reference, made from docstrings.  ``make docs`` builds it into build/docs."""

from smp._version import __version__

project = "smp"
author = "the authors of smp"
release = __version__

extensions = ["sphinx.ext.autodoc", "sphinx.ext.napoleon"]
default_role = "code"
add_module_names = False

# Types stand with the arguments; signatures stay short.
autodoc_typehints = "description"
autodoc_typehints_description_target = "documented_params"
autodoc_member_order = "bysource"
autodoc_preserve_defaults = True
napoleon_numpy_docstring = False
napoleon_use_ivar = True

html_theme = "alabaster"
html_theme_options = {"description": "Model parallelism for PyTorch", "page_width": "60em"}
html_show_sourcelink = False
