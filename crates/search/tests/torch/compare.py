"""Inputs, truth and comparison for `tests/torch.rs`: kernels of the search agent against PyTorch itself.

Runs in two halves. First it traces every case of `cases.py` and its companions to an ATen graph and says so; then it waits for a
line, loads what was compiled meanwhile, and compares. Non-finite values must stand where PyTorch has them;
everything else is measured in units in the last place of its type, against the same operator in fp64.
"""

from __future__ import annotations

import ctypes
import json
import math
import sys
from pathlib import Path

import torch
from torch.export.exported_program import _override_composite_implicit_decomp
from torch.fx.experimental.proxy_tensor import make_fx

from autokernel import graph, tensors

import cases
import cases_axes
import cases_places

# Digits of the fraction with the leading one, smallest exponent, largest number.
_TYPES = {
    torch.float64: (53, -1022),
    torch.float32: (24, -126),
    torch.bfloat16: (8, -126),
    torch.float16: (11, -14),
}


def trace(case: cases.Case) -> dict:
    """The case as a graph in wire form, as a capture gives it."""
    def function(*given):
        return case.function(*given)

    # As a capture without gradients, which leaves this operator whole.
    whole = {torch.ops.aten.linear.default: lambda *_, **__: NotImplemented}
    with _override_composite_implicit_decomp(whole), torch._C._AutoDispatchBelowAutograd():
        traced = make_fx(function, tracing_mode="fake")(*case.inputs)
    traced.graph.eliminate_dead_code()
    return graph.to_json(traced, [False] * len(case.inputs))


def as_list(result) -> list[torch.Tensor]:
    return list(result) if isinstance(result, (tuple, list)) else [result]


def widened(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.double() if tensor.dtype.is_floating_point else tensor


def ulp(truth: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    digits, smallest = _TYPES[dtype]
    _, exponent = torch.frexp(truth.abs())
    exponent = (exponent - 1).clamp_min(smallest).double()
    exponent = torch.where(truth == 0, float(smallest), exponent)
    return torch.exp2(exponent - digits + 1)


class Difference:
    """The worst element of one output, and whether it is too far off."""

    def __init__(self, case: cases.Case, number: int, ours: torch.Tensor, eager: torch.Tensor, wide: torch.Tensor):
        self.error, self.eager_error, self.zeros, self.failure = 0.0, 0.0, 0, ""
        if ours.dtype != eager.dtype or ours.shape != eager.shape:
            self.failure = f"is {ours.dtype} {tuple(ours.shape)}, not {eager.dtype} {tuple(eager.shape)}"
        elif not ours.dtype.is_floating_point:
            self._equal(ours, eager)
        else:
            self._close(case, number, ours, eager, wide)

    def _fail(self, where: torch.Tensor, what: str, *values: torch.Tensor) -> None:
        place = tuple(where.nonzero()[0].tolist())
        shown = " / ".join(f"{value[place].item():.9g}" for value in values)
        self.failure = f"{what} at {place} ({int(where.sum())} in all): ours / eager / fp64 {shown}"

    def _equal(self, ours: torch.Tensor, eager: torch.Tensor) -> None:
        wrong = ours != eager
        if wrong.any():
            self._fail(wrong, "differs", ours.double(), eager.double())

    def _close(self, case: cases.Case, number: int, ours: torch.Tensor, eager: torch.Tensor, wide: torch.Tensor) -> None:
        dtype, most = ours.dtype, torch.finfo(ours.dtype).max
        self.zeros = int(((ours == 0) & (eager == 0) & (torch.signbit(ours) != torch.signbit(eager))).sum())
        ours, eager = ours.double(), eager.double()
        truth = eager if dtype == torch.float64 or case.own else wide.double()
        both = ours.isfinite() & eager.isfinite()
        same = (ours == eager) | (ours.isnan() & eager.isnan())
        # Where PyTorch's own kernel runs out of range on the way, its result in fp64 is as good.
        ideal = truth.to(dtype).double()
        same |= (ours == ideal) | (ours.isnan() & ideal.isnan()) | (ours.isfinite() & ideal.isfinite())
        # At the end of a type's range one rounding more or less decides.
        nearly = (ours.sign() == eager.sign()) & (torch.minimum(ours.abs(), eager.abs()) > 0.99 * most)
        apart = ~both & ~same & ~nearly
        if apart.any():
            self._fail(apart, "is not finite where it should be, or the reverse", ours, eager, truth)
            return
        both &= truth.isfinite()
        unit = ulp(truth, dtype)
        zero = torch.zeros_like(unit)
        error = torch.where(both, (ours - truth).abs() / unit, zero)
        eager_error = torch.where(both, (eager - truth).abs() / unit, zero)
        if error.numel():
            self.error, self.eager_error = error.max().item(), eager_error.max().item()
        limit = case.ulps if dtype in (torch.float32, torch.float64) else 1.0 + case.ulps / 64
        room = limit + 1.5 * eager_error
        if case.scale is not None:
            # Where terms cancel, an error is one of the terms, not of their sum.
            size = case.scale(*[widened(tensor) for tensor in case.inputs])
            # Further results are statistics of the rows of the first.
            size = size.expand_as(truth) if number == 0 else size.max().expand_as(truth)
            size = torch.where(size.isfinite(), size, zero)
            room = room + limit * ulp(size, torch.float32 if dtype != torch.float64 else dtype) / unit
        wrong = error > room
        if wrong.any():
            self._fail(wrong, f"is off by up to {error[wrong].max().item():.3g} ulp", ours, eager, truth)


def call(library: ctypes.CDLL, job: dict, case: cases.Case, traced: dict) -> list[torch.Tensor]:
    """Runs a kernel; results in the order of the traced function's own."""
    placeholders = [node["name"] for node in traced["nodes"] if node["kind"] == "placeholder"]
    given = dict(zip(placeholders, case.inputs, strict=True))
    made = {}
    for output in job["outputs"]:
        meta = output["meta"]
        empty = torch.empty_strided(meta["shape"], meta["stride"], dtype=tensors.DTYPES[meta["dtype"]])
        made[output["name"]] = empty.fill_(True if empty.dtype == torch.bool else 77)
    plan = job["plan"]
    places = {
        "input": [given[name] for name in job["inputs"]],
        "output": [made[output["name"]] for output in job["outputs"]],
        "scratch": [torch.empty(buffer["numel"], dtype=tensors.DTYPES[buffer["dtype"]]) for buffer in plan["scratch"]],
    }

    def argument(arg):
        if arg == "threads":
            return ctypes.c_int64(2)
        ((kind, which),) = arg.items()
        return ctypes.c_void_p(places[kind][which].data_ptr())

    for launch in plan["launches"]:
        getattr(library, job["prefix"] + launch["entry"])(*map(argument, launch["args"]))
    results = traced["nodes"][-1]["args"]
    return [made[result["ref"]] for result in results]


def main(folder: Path) -> int:
    torch.manual_seed(0)
    torch.set_num_threads(1)
    listed = {case.name: case for part in (cases, cases_axes, cases_places) for case in part.all_cases()}
    traced = {name: trace(case) for name, case in listed.items()}
    wanted = [{"name": name, "refused": listed[name].refused, "graph": traced[name]} for name in listed]
    (folder / "graphs.json").write_text(json.dumps(wanted))
    print("ready", flush=True)
    sys.stdin.readline()

    libgomp = next(Path(torch.__file__).parent.parent.glob("torch*/**/libgomp*.so*"))
    ctypes.CDLL(str(libgomp), mode=ctypes.RTLD_GLOBAL)
    libraries = [ctypes.CDLL(str(folder / name)) for name in sorted(p.name for p in folder.glob("*.so"))]
    failures = 0
    print(f"{'case':44} {'ours':>9} {'eager':>9}  worst error in ulp; zeros of the other sign")
    for job in json.loads((folder / "jobs.json").read_text()):
        case = listed[job["name"]]
        library = next(one for one in libraries if hasattr(one, job["prefix"] + job["plan"]["launches"][0]["entry"]))
        ours = call(library, job, case, traced[case.name])
        eager = as_list(case.function(*case.inputs))
        wide = eager if case.own else as_list(case.function(*map(widened, case.inputs)))
        for number, parts in enumerate(zip(ours, eager, wide, strict=True)):
            found = Difference(case, number, *parts)
            name = case.name if len(ours) == 1 else f"{case.name} #{number}"
            shown = [f"{e:9.2f}" if math.isfinite(e) else f"{e:>9}" for e in (found.error, found.eager_error)]
            print(f"{name:44} {shown[0]} {shown[1]}  {found.zeros or ''}")
            if found.failure:
                failures += 1
                print(f"FAIL {name}: {found.failure}")
    print(f"{failures} failures")
    return 1 if failures else 0


if __name__ == "__main__":
    sys.exit(main(Path(sys.argv[1])))
