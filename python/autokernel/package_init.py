"""A model made faster by AutoKernel. Needs only torch.

    import this_folder
    model = this_folder.load(model)

`load(model, report=True)` says which regions it found; `AUTOKERNEL_DISABLE=1` in the environment
gives back the model as it is. The folder may be renamed and moved.
"""

from pathlib import Path as _Path

__all__ = ["load"]


def load(model, report=False):
    """The same model, with the tuned regions replaced. Weights stay those of `model`."""
    from ._runtime.package import open_package

    return open_package(_Path(__file__).resolve().parent).load(model, report=report)
