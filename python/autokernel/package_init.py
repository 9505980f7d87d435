"""A model made faster by AutoKernel. Needs only torch.

    import this_folder
    model = this_folder.load(model)                                 # or, under your own compile:
    model = torch.compile(model, backend=this_folder.backend())     # also: backend="autokernel"

`load(model, report=True)` says which regions it found; `AUTOKERNEL_DISABLE=1` in the environment
gives back the model as it is. The folder may be renamed and moved.
"""

from pathlib import Path as _Path

from ._runtime.package import open_package as _open_package, register as _register

__all__ = ["backend", "load"]

_FOLDER = _Path(__file__).resolve().parent
_register(_FOLDER)


def load(model, report=False):
    """The same model, with the tuned regions replaced. Weights stay those of `model`."""
    return _open_package(_FOLDER).load(model, report=report)


def backend(report=False):
    """A backend for `torch.compile` with this package's kernels."""
    return _open_package(_FOLDER).backend(report=report)
