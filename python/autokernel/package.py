"""Loads a package: the user's model, with its costly regions done by the package's kernels."""

from __future__ import annotations

import functools
import json
import os
import sys
import warnings
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch

from . import rewrite
from .backend import aot_backend, compile_model, stock_inductor
from .kernels import Kernel, Unsuitable, load_kernel, process_wide
from .loaded import compilable, original, wrap

SCHEMA = "autokernel.package/1"
FORMS = ("eager", "compile", "ours+eager", "ours+inductor")


@dataclass
class Report:
    """What became of the package's regions in one loaded model; grows with every graph that is compiled."""

    regions: list[str]
    problems: dict[str, str] = field(default_factory=dict)
    places: dict[str, int] = field(default_factory=dict)
    graphs: int = 0
    #: Why a graph runs as Dynamo gave it, without our kernels.
    fallbacks: list[str] = field(default_factory=list)
    #: The kernels that are in use.
    kernels: list[Kernel] = field(default_factory=list, repr=False)

    @property
    def prepared_bytes(self) -> int:
        """Memory that kernels keep beside the model's own: constants in the order in which they read them."""
        return sum(kernel.prepared_bytes for kernel in self.kernels)

    @property
    def matched(self) -> int:
        return sum(1 for region in self.regions if self.places.get(region))

    def __str__(self) -> str:
        if not self.graphs and not self.problems:
            return f"autokernel: 0 of {len(self.regions)} regions matched (nothing was called yet)"
        lines = [f"autokernel: matched {self.matched} of {len(self.regions)} regions"]
        for region in self.regions:
            count = self.places.get(region, 0)
            reason = self.problems.get(region)
            lines.append(f"  {region}: {'original operators: ' + reason if reason else f'{count} place' + 's' * (count != 1)}")
        if self.prepared_bytes:
            lines.append(f"  {self.prepared_bytes / 2**20:.1f} MiB of constants are kept as kernels read them")
        lines += [f"  a graph runs without kernels: {reason}" for reason in self.fallbacks]
        return "\n".join(lines)

    __repr__ = __str__


class Package:
    """A package folder, read; kernels are loaded when a model is."""

    def __init__(self, folder: Path, manifest: dict[str, Any]):
        self.folder = folder
        self.manifest = manifest
        self.form: str = manifest["form"]

    @functools.cached_property
    def kernels(self) -> tuple[list[Kernel], dict[str, str]]:
        """The kernels that suit this machine, and why the others don't. Warns at most once."""
        kernels, problems = [], {}
        for entry in self.manifest["regions"]:
            try:
                kernels.append(load_kernel(entry, self.folder))
            except Unsuitable as reason:
                problems[entry["region"]["id"]] = str(reason)
            except Exception as error:  # noqa: BLE001: a package must never be worse than the model
                problems[entry["region"]["id"]] = f"{type(error).__name__}: {error}"
        if problems:
            listed = "; ".join(f"{region}: {reason}" for region, reason in problems.items())
            warnings.warn(f"autokernel: the original operators run for {len(problems)} of {len(self.manifest['regions'])} regions ({listed})", stacklevel=5)
        return kernels, problems

    def kernel(self, region: str) -> Kernel:
        """The kernel of one region, alone; raises `Unsuitable` with the reason."""
        for entry in self.manifest["regions"]:
            if entry["region"]["id"] == region:
                return load_kernel(entry, self.folder)
        raise Unsuitable(f"the package holds no region {region}")

    def load(self, model, report: bool = False, form: str | None = None):
        """The model in the package's form (or another one, for comparing)."""
        if _disabled():
            return model
        form = form or self.form
        model = original(model)
        if form == "eager":
            if report:
                _say("autokernel: this package found nothing faster than the model as it is")
            return model
        if isinstance(model, torch.jit.ScriptModule):
            warnings.warn("autokernel: a TorchScript model can't be traced again and runs as it is; load the module that it was made from", stacklevel=2)
            return model
        record = self._report(form)
        if form == "ours+eager" and not self.kernels[0]:
            record.problems = self.kernels[1]
            if report:
                _say(record)
            return model
        if form == "compile" and report:
            _say("autokernel: the model under torch.compile")
        compiled = compile_model(compilable(model), self._backend(form, record, report))
        return wrap(model, compiled, lambda: record, lambda copied: self.load(copied, report, form))

    def backend(self, report: bool = False, form: str | None = None):
        """For `torch.compile(model, backend=package.backend())`: the same kernels under the user's own compile."""
        form = form or self.form
        record = self._report(form)
        made = self._backend(form, record, report) if not _disabled() else None

        def autokernel(gm, example_inputs, **_):
            # As it is: what a package does that found nothing faster, and one that is switched off.
            return gm.forward if made is None else made(gm, example_inputs)

        autokernel.autokernel_report = lambda: record
        return autokernel

    def _report(self, form: str) -> Report:
        return Report([entry["region"]["id"] for entry in self.manifest["regions"]] if form.startswith("ours") else [])

    def _backend(self, form: str, record: Report, loud: bool):
        if form == "eager":
            return None
        if form == "compile":
            return stock_inductor()
        kernels, record.problems = self.kernels
        record.kernels = kernels
        rest = form.partition("+")[2]
        return aot_backend(_transform(kernels, rest, record, loud), rest, on_fallback=record.fallbacks.append)


def _disabled() -> bool:
    return os.environ.get("AUTOKERNEL_DISABLE", "") not in ("", "0")


def _transform(kernels: list[Kernel], rest: str, record: Report, loud: bool):
    # Inductor's graphs hold operators; an interpreted graph may hold any callable, which is cheaper.
    targets = [kernel.call if rest == "eager" else kernel.inner_operator() for kernel in kernels]
    table = [(kernel.region, target, kernel.constant_inputs) for kernel, target in zip(kernels, targets)]

    def transform(gm, _inputs, constant):
        for kernel, count in zip(kernels, rewrite.apply(gm, table, constant)):
            record.places[kernel.id] = record.places.get(kernel.id, 0) + count
        record.graphs += 1
        if loud:
            _say(record)
        return gm

    return transform


def register(folder: str | os.PathLike) -> None:
    """Makes `torch.compile(model, backend="autokernel")` use the kernels of this folder, beside those of
    every other package that was imported in this process; where two know a region, the first one's stays.
    """
    known = process_wide("packages")
    known.setdefault(str(Path(folder).resolve()), None)
    if "backend" in process_wide("registered"):
        return
    process_wide("registered")["backend"] = _imported
    torch._dynamo.register_backend(_imported, name="autokernel")


def _imported(gm, example_inputs, **_):
    """The backend `"autokernel"`: all imported packages at the moment of the compilation."""
    if _disabled():
        return gm.forward
    folders = process_wide("packages")
    for folder in [folder for folder, package in folders.items() if package is None]:
        try:
            folders[folder] = open_package(folder)
        except (OSError, ValueError, KeyError) as error:
            warnings.warn(f"autokernel: the package {folder} is left out ({error})", stacklevel=2)
            del folders[folder]
    packages = list(folders.values())
    kernels = list({kernel.id: kernel for package in reversed(packages) for kernel in package.kernels[0]}.values())
    forms = {package.form for package in packages}
    if not kernels and forms <= {"eager"}:
        return gm.forward
    rest = "inductor" if forms & {"compile", "ours+inductor"} else "eager"
    record = Report([kernel.id for kernel in kernels])
    return aot_backend(_transform(kernels, rest, record, False), rest)(gm, example_inputs)


def _say(text: object) -> None:
    print(text, file=sys.stderr)


def open_package(folder: str | os.PathLike) -> Package:
    """Reads a package folder's manifest."""
    folder = Path(folder)
    manifest = json.loads((folder / "manifest.json").read_text())
    if manifest.get("schema") != SCHEMA:
        raise ValueError(f"{folder.name}/manifest.json: schema is {manifest.get('schema')!r}, this runtime reads {SCHEMA!r}")
    if manifest.get("form") not in FORMS:
        raise ValueError(f"{folder.name}/manifest.json: unknown form {manifest.get('form')!r}")
    return Package(folder, manifest)


def load(model, package: str | os.PathLike, report: bool = False):
    """`open_package(package).load(model)`."""
    return open_package(package).load(model, report=report)
