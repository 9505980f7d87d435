"""What the tests share: example models, captured once, and regions cut out of them."""

from __future__ import annotations

import functools
import sys
import tempfile
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT / "python"))

import torch  # noqa: E402

from autokernel.oracle import Oracle  # noqa: E402

torch.set_num_threads(1)
EXAMPLES = ("rms_norm", "new_activation", "llama_block")


@functools.cache
def captured(name: str) -> tuple[Oracle, dict[str, Any]]:
    """The oracle of an example and the reply to `capture`."""
    oracle = Oracle()
    oracle.load({"model": str(ROOT / "examples" / f"{name}.py"), "inputs": [], "seed": 0})
    return oracle, oracle.capture({})


def write_model(text: str) -> str:
    """A model file that lives as long as the process."""
    folder = _folder()
    path = Path(folder) / f"m{len(list(Path(folder).iterdir()))}.py"
    path.write_text(text)
    return str(path)


@functools.cache
def _folder() -> str:
    holder = tempfile.TemporaryDirectory()
    _kept.append(holder)
    return holder.name


_kept: list[Any] = []


def cut(graph: dict[str, Any], members: list[str]) -> tuple[dict[str, Any], dict[str, Any]]:
    """A region of the named nodes in graph order, and where it stands (the engine does this in Rust)."""
    nodes = {node["name"]: node for node in graph["nodes"]}
    order = [node["name"] for node in graph["nodes"] if node["name"] in members]
    inputs: list[str] = []

    def rename(arg: Any) -> Any:
        if isinstance(arg, dict) and "ref" in arg:
            name = arg["ref"]
            if name in order:
                return {"ref": {"node": order.index(name)}}
            if name not in inputs:
                inputs.append(name)
            return {"ref": {"input": inputs.index(name)}}
        if isinstance(arg, dict) and "list" in arg:
            return {"list": [rename(item) for item in arg["list"]]}
        return arg

    calls = [
        {
            "op": nodes[name]["target"],
            "args": [rename(arg) for arg in nodes[name]["args"]],
            "kwargs": [[key, rename(arg)] for key, arg in nodes[name]["kwargs"]],
            "value": nodes[name]["value"],
        }
        for name in order
    ]
    read_outside = {ref for node in graph["nodes"] if node["name"] not in order for ref in refs(node)}
    region = {
        "schema": "autokernel.region/1",
        "id": "0" * 12,
        "inputs": [{"meta": nodes[name]["value"]["tensor"], "constant": nodes[name].get("constant", False)} for name in inputs],
        "nodes": calls,
        "outputs": [i for i, name in enumerate(order) if name in read_outside],
    }
    return region, {"graph": 0, "nodes": order, "inputs": inputs}


def refs(node: dict[str, Any]) -> list[str]:
    """The names that a node reads."""

    def inside(arg: Any) -> list[str]:
        if not isinstance(arg, dict):
            return []
        return [arg["ref"]] if "ref" in arg else [name for item in arg.get("list", []) for name in inside(item)]

    return [name for arg in [*node["args"], *(arg for _, arg in node["kwargs"])] for name in inside(arg)]


def all_calls(graph: dict[str, Any]) -> list[str]:
    return [node["name"] for node in graph["nodes"] if node["kind"] == "call"]
