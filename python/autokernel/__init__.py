"""The bridge between AutoKernel and PyTorch, and the runtime of its packages. Importing it loads nothing else."""

__version__ = "0.1.0"
