"""Takes many models through capture, partition and put-back, each in a process of its own; prints one JSON object.

    python survey.py --partition PROGRAM [--gradients] FILE[:NAME] ...

The program reads graphs on stdin and answers with regions, as `autokernel-testbed partition` does.
Nothing is timed against anything and no kernel is written: this asks whether a model goes in whole
and comes back whole, which takes seconds. `cargo xtask zoo` runs it on `fixtures/models`.
"""

from __future__ import annotations

import argparse
import contextlib
import io
import json
import os
import re
import signal
import subprocess
import sys
import tempfile
import time
import traceback
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT / "python"))

SCHEMA = "autokernel.zoo/1"
#: Seconds that one model may take; far above what any needs, so that what hangs is found.
LIMIT = 300


def names(file: str) -> list[str]:
    """The models of a file: its public functions without arguments, in order."""
    found = re.findall(r"^def ([a-z]\w*)\(\):", Path(file).read_text(), re.MULTILINE)
    return [f"{file}:{name}" for name in found]


def survey(spec: str, partition: str) -> dict[str, Any]:
    """One model, in this process."""
    from autokernel.oracle import Oracle

    oracle = Oracle()
    oracle.load({"model": spec, "inputs": [], "seed": 0})
    captured = oracle.capture({})
    done = subprocess.run([partition, "partition"], input=json.dumps(captured["graphs"]), capture_output=True, text=True, check=False)
    if done.returncode:
        raise RuntimeError(f"the partition failed: {done.stderr[-500:]}")
    cut = json.loads(done.stdout)
    regions, occurrences = ([entry[key] for entry in cut["regions"]] for key in ("region", "occurrences"))
    back = oracle.put_back({"regions": regions, "occurrences": occurrences})
    missed = back["missed"]
    fell_back = any(found["reason"].startswith("no usable ATen graph") for found in captured["breaks"])
    same = captured["equal"]["ok"] and back["equal"]["ok"] and (back["gradients"] or {"ok": True})["ok"]
    return {
        "ok": same and not missed and not back["fallbacks"],
        "captured": "dynamo" if fell_back else "aten" if captured["graphs"] else "nothing",
        "graphs": len(captured["graphs"]),
        "breaks": captured["breaks"],
        "regions": len(cut["regions"]),
        "places": sum(len(entry["occurrences"]) for entry in cut["regions"]),
        "missed": missed,
        "fallbacks": back["fallbacks"],
        "same": captured["equal"]["ok"] and back["equal"]["ok"],
        "max_relative_error": max(captured["equal"]["max_relative_error"], back["equal"]["max_relative_error"]),
        "same_gradients": back["gradients"] and back["gradients"]["ok"],
        "left": left(oracle, captured["graphs"], cut),
    }


def left(oracle: Any, graphs: list[dict[str, Any]], cut: dict[str, Any]) -> list[dict[str, Any]]:
    """Operators outside all regions with their share of the nodes' time (one rough measurement), largest first."""
    reasons = {op: reason for op, reason in cut["left"]}
    inside = {(o["graph"], node) for entry in cut["regions"] for o in entry["occurrences"] for node in o["nodes"]}
    profile = oracle.profile({"repeats": 1})["graphs"]
    total = sum(sum(graph["nodes"].values()) for graph in profile) or 1.0
    shares: dict[str, float] = {}
    for number, (graph, times) in enumerate(zip(graphs, profile)):
        for node in graph["nodes"]:
            if node["kind"] == "call" and (number, node["name"]) not in inside:
                shares[node["target"]] = shares.get(node["target"], 0.0) + times["nodes"].get(node["name"], 0.0) / total
    ranked = sorted(shares.items(), key=lambda pair: -pair[1])[:8]
    return [{"op": op, "share": round(share, 4), "reason": reasons.get(op)} for op, share in ranked]


def apart(spec: str, partition: str) -> dict[str, Any]:
    """The same in a forked process, so that nothing that one model does reaches the next."""
    started = time.monotonic()
    with tempfile.TemporaryFile("w+") as answer:
        child = os.fork()
        if child == 0:
            # Whatever happens, this process ends here and says why.
            with contextlib.suppress(BaseException):
                signal.alarm(LIMIT)
                with contextlib.redirect_stdout(io.StringIO()):
                    result = attempt(spec, partition)
                json.dump(result, answer)
                answer.flush()
            os._exit(0)
        _, status = os.waitpid(child, 0)
        answer.seek(0)
        text = answer.read()
    if not text:
        signalled = os.WTERMSIG(status) if os.WIFSIGNALED(status) else 0
        died = f"no end after {LIMIT} s" if signalled == signal.SIGALRM else f"the process died (signal {signalled})"
        result = {"ok": False, "error": {"kind": "died", "message": died}}
    else:
        result = json.loads(text)
    return {"model": spec.rpartition("/")[2], "seconds": round(time.monotonic() - started, 1), **result}


def why(result: dict[str, Any]) -> str:
    """What did not hold, in a line."""
    if "error" in result:
        return result["error"]["message"].splitlines()[0]
    wrong = [] if result["same"] else [f"outputs differ by {result['max_relative_error']:.1e}"]
    wrong += [] if result["same_gradients"] is not False else ["gradients differ"]
    wrong += [f"not found again: {', '.join(result['missed'])}"] if result["missed"] else []
    return "; ".join(wrong + result["fallbacks"])


def attempt(spec: str, partition: str) -> dict[str, Any]:
    from autokernel.wire import RequestError

    try:
        return survey(spec, partition)
    except RequestError as error:
        return {"ok": False, "error": {"kind": error.kind, "message": str(error)[:500]}}
    except Exception as error:  # noqa: BLE001: the table says what went wrong
        where = traceback.format_exc(limit=-3)
        return {"ok": False, "error": {"kind": "internal", "message": f"{type(error).__name__}: {error}"[:500], "traceback": where[-1500:]}}


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--partition", required=True)
    parser.add_argument("models", nargs="+", metavar="FILE[:NAME]")
    options = parser.parse_args()
    # Forked processes can't use a pool of threads that another process has.
    os.environ["OMP_NUM_THREADS"] = os.environ["OPENBLAS_NUM_THREADS"] = "1"
    import torch

    torch.set_num_threads(1)
    with contextlib.suppress(ImportError):
        import transformers  # noqa: F401: once for all

    import torch._dynamo  # noqa: F401
    import autokernel.oracle  # noqa: F401

    specs = [spec for given in options.models for spec in (names(given) if given.endswith(".py") else [given])]
    results = []
    for spec in specs:
        results.append(apart(spec, options.partition))
        last = results[-1]
        state = "ok" if last["ok"] else why(last)
        print(f"{last['seconds']:6.1f} s  {last['model']:40} {last.get('regions', '-'):>3} regions  {state}", file=sys.stderr, flush=True)
    held = sum(result["ok"] for result in results)
    print(json.dumps({"schema": SCHEMA, "models": results, "ok": held, "of": len(results)}, indent=1))
    return 0 if held == len(results) else 1


if __name__ == "__main__":
    sys.exit(main())
