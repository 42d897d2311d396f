"""Differentially private activation steering: the module behind the notebooks.

Data flows one way through the submodules: ``data, models -> activations -> mechanism (+ accounting) ->
steering -> evaluate -> stats -> plotting, tables``. Import the submodule you need; importing the package
itself costs nothing.
"""

__version__ = "0.1.0"
