"""Describes this Python on one line of JSON, without importing torch unless told to.

Stands alone: the program runs it with ``-I -B -c`` in interpreters that it knows nothing about,
so it keeps to what Python 3.6 understands. With the argument ``full`` it imports torch as well.
"""

import json
import os
import re
import sys


def widen_path():
    """Adds what ``-I`` took away and the bridge will have again: PYTHONPATH and the user's packages."""
    entries = [e for e in os.environ.get("PYTHONPATH", "").split(os.pathsep) if e]
    sys.path[:0] = [e for e in entries if e not in sys.path]
    import site

    if sys.prefix == getattr(sys, "base_prefix", sys.prefix) and not os.environ.get("PYTHONNOUSERSITE"):
        user = site.getusersitepackages()
        if os.path.isdir(user):
            site.addsitedir(user)


def find_package(name):
    """The folder of an installed top-level package, found without importing it."""
    import importlib.util

    try:
        spec = importlib.util.find_spec(name)
    except (ImportError, ValueError):
        return None
    # A folder that merely happens to have the name has no file of its own.
    if spec is None or not spec.origin or not spec.submodule_search_locations:
        return None
    return os.path.abspath(os.path.dirname(spec.origin))


def read_version(folder, *files):
    """The version that a package states in one of its files."""
    for name in files:
        try:
            with open(os.path.join(folder, name), encoding="utf-8", errors="replace") as f:
                text = f.read(65536)
        except OSError:
            continue
        found = re.search(r"""^(?:__version__|version|full_version)\s*(?::\s*\w+\s*)?=\s*["']([^"']+)["']""", text, re.M)
        if found:
            return found.group(1)
    return None


def metadata_version(name):
    try:
        from importlib.metadata import version

        return version(name)
    except Exception:
        return None


def built_for_cuda(torch):
    try:
        with open(os.path.join(torch, "version.py"), encoding="utf-8", errors="replace") as f:
            text = f.read(65536)
    except OSError:
        return False
    return re.search(r"""^cuda\s*(?::[^=\n]*)?=\s*["']""", text, re.M) is not None


def find_openmp(torch):
    """The OpenMP library that torch brings or, in a conda environment, shares."""
    site = os.path.dirname(torch)
    folders = [os.path.join(torch, "lib"), os.path.join(site, "torch.libs"), os.path.join(sys.prefix, "lib")]
    for folder in folders:
        try:
            names = sorted(os.listdir(folder))
        except OSError:
            continue
        for name in names:
            if re.match(r"libgomp(-[0-9a-f]+)?\.so(\.\d+)*$", name):
                return os.path.realpath(os.path.join(folder, name))
    return None


def loaded_openmp():
    """The OpenMP library of this process, once torch is in it."""
    try:
        with open("/proc/self/maps", encoding="utf-8", errors="replace") as f:
            paths = [line.split(None, 5)[5].strip() for line in f if line.count("/")]
    except OSError:
        return None
    for name in ("libgomp", "libiomp5", "libomp"):
        for path in paths:
            if os.path.basename(path).startswith(name):
                return path
    return None


def describe(full):
    facts = {
        "probe": 1,
        "python": "%d.%d.%d" % tuple(sys.version_info[:3]),
        "implementation": sys.implementation.name,
        "executable": sys.executable,
        "prefix": sys.prefix,
        "base_prefix": getattr(sys, "base_prefix", sys.prefix),
        "torch": None,
        "torch_error": None,
        "torch_lib": None,
        "openmp": None,
        "numpy": None,
        "cuda": False,
    }
    numpy = find_package("numpy")
    if numpy:
        facts["numpy"] = read_version(numpy, "version.py") or metadata_version("numpy")
    torch = find_package("torch")
    if not torch:
        return facts
    facts["torch"] = read_version(torch, "version.py", "torch_version.py") or metadata_version("torch")
    facts["torch_lib"] = os.path.join(torch, "lib")
    facts["openmp"] = find_openmp(torch)
    facts["cuda"] = built_for_cuda(torch) and os.path.exists("/proc/driver/nvidia/version")
    if full:
        try:
            import torch as module

            facts["torch"] = str(module.__version__)
            facts["openmp"] = loaded_openmp() or facts["openmp"]
        except BaseException as error:
            facts["torch_error"] = "%s: %s" % (type(error).__name__, error)
    return facts


if __name__ == "__main__":
    widen_path()
    facts = describe("full" in sys.argv[1:])
    sys.stdout.flush()
    # A line of its own, whatever a site customisation printed before it.
    sys.stdout.write("\n" + json.dumps(facts) + "\n")
