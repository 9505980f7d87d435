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
from .kernels import Kernel, Unsuitable, load_kernel

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
        form = form or self.form
        if os.environ.get("AUTOKERNEL_DISABLE", "") not in ("", "0"):
            return model
        record = Report([entry["region"]["id"] for entry in self.manifest["regions"]] if form.startswith("ours") else [])
        if form == "eager":
            if report:
                _say("autokernel: this package found nothing faster than the model as it is")
            return model
        if form == "compile":
            loaded = compile_model(model, stock_inductor())
            if report:
                _say("autokernel: the model under torch.compile")
        else:
            kernels, record.problems = self.kernels
            record.kernels = kernels
            if not kernels and form == "ours+eager":
                if report:
                    _say(record)
                return model
            rest = form.partition("+")[2]
            transform = _transform(kernels, rest, record, report)
            loaded = compile_model(model, aot_backend(transform, rest, on_fallback=record.fallbacks.append))
        _attach(loaded, record)
        return loaded


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


def _attach(loaded, record: Report) -> None:
    # Past nn.Module's own __setattr__: a compiled module hands attributes on to the user's module.
    object.__setattr__(loaded, "autokernel_report", lambda: record)


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
