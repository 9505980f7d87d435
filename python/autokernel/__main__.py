"""``python -m autokernel ROLE``: ``oracle`` and ``zygote`` talk to the parent; ``capture FILE`` is for a person."""

from __future__ import annotations

import argparse
import json
import os
import sys


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m autokernel", description="The bridge between AutoKernel and PyTorch.")
    roles = parser.add_subparsers(dest="role", required=True)
    roles.add_parser("oracle", help="serves the parent: capture, profile, inputs, truths")
    roles.add_parser("zygote", help="serves the parent: forks measured children")
    capture = roles.add_parser("capture", help="prints the graphs of a model as JSON")
    capture.add_argument("model")
    capture.add_argument("--input", action="append", default=[])
    capture.add_argument("--seed", type=int, default=0)
    capture.add_argument("--graphs-only", action="store_true", help="only the list of graphs")
    options = parser.parse_args()

    if options.role == "capture":
        return _capture(options)
    if options.role == "zygote":
        # numpy's OpenBLAS starts its threads when it is loaded; a zygote has none, or its children would hang.
        os.environ.setdefault("OPENBLAS_NUM_THREADS", "1")
    from . import wire

    # Taken before torch is imported: what native libraries print at start must not reach the parent's stdout.
    connection = wire.Connection.from_environment()
    if options.role == "oracle":
        from .oracle import Oracle

        wire.serve(connection, Oracle().handlers())
    else:
        from . import zygote

        zygote.main(connection)
    return 0


def _capture(options: argparse.Namespace) -> int:
    from .wire import RequestError, redirect_stdout

    out = os.fdopen(os.dup(1), "w")
    redirect_stdout()
    from .oracle import Oracle

    oracle = Oracle()
    try:
        summary = oracle.load({"model": options.model, "inputs": options.input, "seed": options.seed})
        result = oracle.capture({})
    except RequestError as error:
        print(f"{error.kind}: {error}", file=sys.stderr)
        return 1
    with out:
        json.dump(result["graphs"] if options.graphs_only else {"model": summary, **result}, out, indent=1, allow_nan=False)
        out.write("\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
