"""Finds the places of a graph where a region stands, and puts one call there.

A region is plain data (`autokernel.region/1`). A place matches when every call has the same
operator, the same literal arguments and inputs of the same element type, shape and strides, and
when nothing outside reads what the region keeps to itself. Nothing is guessed from names.
"""

from __future__ import annotations

import heapq
import operator
from collections import defaultdict
from dataclasses import dataclass, field

import torch
from torch import fx

from . import tensors
from .graph import encode
from .region import operator_name

# How many tentative bindings one anchor may cost. Regions with several outputs choose among the
# users of a node; equal siblings are rare, so a bound that is never met in practice is enough.
SEARCH_LIMIT = 20_000


@dataclass
class Match:
    """One place: for each node of the region the graph's node, and the same for its inputs."""

    region: dict
    nodes: list[fx.Node]
    inputs: list[fx.Node] = field(default_factory=list)

    @property
    def outputs(self) -> list[fx.Node]:
        return [self.nodes[index] for index in self.region["outputs"]]


class _Pattern:
    """A region, with the look-ups that matching needs."""

    def __init__(self, region: dict):
        self.region = region
        self.nodes = region["nodes"]
        self.input_metas = [item["meta"] for item in region["inputs"]]
        self.outputs = set(region["outputs"])
        self.kwargs = [dict((key, arg) for key, arg in node["kwargs"]) for node in self.nodes]
        self.operands = []
        self.users = defaultdict(list)
        for index, node in enumerate(self.nodes):
            refs: list[tuple[str, int]] = []
            for arg in node["args"]:
                _refs(arg, refs)
            for _, arg in node["kwargs"]:
                _refs(arg, refs)
            self.operands.append(refs)


def _refs(arg, into: list) -> None:
    if isinstance(arg, dict):
        if "ref" in arg:
            ((kind, index),) = arg["ref"].items()
            into.append((kind, index))
        elif "list" in arg:
            for item in arg["list"]:
                _refs(item, into)


class _Index:
    """What one graph looks like to the search: positions, nodes by operator, mutating nodes."""

    def __init__(self, gm: fx.GraphModule):
        self.by_op: dict[str, list[fx.Node]] = defaultdict(list)
        self.op: dict[fx.Node, str] = {}
        self.position: dict[fx.Node, int] = {}
        self.mutating: list[int] = []
        for place, node in enumerate(gm.graph.nodes):
            self.position[node] = place
            if node.op != "call_function":
                continue
            name = operator_name(node.target)
            self.op[node] = name
            self.by_op[name].append(node)
            schema = getattr(node.target, "_schema", None)
            if schema is not None and schema.is_mutable:
                self.mutating.append(place)


class _Search:
    """The attempt to lay a pattern over the graph, with an undo list."""

    def __init__(self, pattern: _Pattern, index: _Index, taken: set, exact: bool):
        self.pattern = pattern
        self.exact = exact
        self.index = index
        self.taken = taken
        self.bound: list[fx.Node | None] = [None] * len(pattern.nodes)
        self.inputs: list[fx.Node | None] = [None] * len(pattern.input_metas)
        self.inverse: dict[fx.Node, int] = {}
        self.trail: list[tuple[str, int]] = []
        self.budget = SEARCH_LIMIT

    def undo(self, mark: int) -> None:
        while len(self.trail) > mark:
            kind, which = self.trail.pop()
            if kind == "node":
                del self.inverse[self.bound[which]]
                self.bound[which] = None
            else:
                self.inputs[which] = None

    def bind(self, which: int, node: fx.Node) -> bool:
        """Binds a node and everything that it reads; nothing is chosen on the way down."""
        stack = [(which, node)]
        while stack:
            which, node = stack.pop()
            if self.bound[which] is not None:
                if self.bound[which] is not node:
                    return False
                continue
            self.budget -= 1
            if self.budget < 0 or node in self.inverse or node in self.taken:
                return False
            pairs = self.compare(which, node)
            if pairs is None:
                return False
            self.bound[which] = node
            self.inverse[node] = which
            self.trail.append(("node", which))
            for (kind, index), operand in pairs:
                if kind == "node":
                    stack.append((index, operand))
                elif not self.bind_input(index, operand):
                    return False
        return True

    def bind_input(self, index: int, node: fx.Node) -> bool:
        if self.inputs[index] is not None:
            return self.inputs[index] is node
        if not _same_meta(self.pattern.input_metas[index], node.meta.get("val")):
            return False
        self.inputs[index] = node
        self.trail.append(("input", index))
        return True

    def compare(self, which: int, node: fx.Node) -> list | None:
        """The operands to bind next, or `None` when the two calls differ."""
        pattern = self.pattern.nodes[which]
        kwargs = self.pattern.kwargs[which]
        if self.index.op.get(node) != pattern["op"]:
            return None
        if len(node.args) != len(pattern["args"]) or node.kwargs.keys() != kwargs.keys():
            return None
        if not _same_value(pattern["value"], node.meta.get("val")):
            return None
        pairs: list = []
        for wanted, found in zip(pattern["args"], node.args):
            if not _same_arg(wanted, found, pairs):
                return None
        for key, found in node.kwargs.items():
            if not _same_arg(kwargs[key], found, pairs):
                return None
        return pairs

    def complete(self) -> bool:
        """Binds what the first output does not reach, through the users of what is bound."""
        best = None
        for which, bound in enumerate(self.bound):
            if bound is not None:
                continue
            candidates = self.candidates(which)
            if candidates is not None and (best is None or len(candidates) < len(best[1])):
                best = (which, candidates)
        if best is None:
            if None not in self.bound:
                return self.closed()
            # Nothing is shared with what is bound: any node with the operator may be the one.
            which = self.bound.index(None)
            best = (which, self.index.by_op.get(self.pattern.nodes[which]["op"], []))
        which, candidates = best
        for node in candidates:
            mark = len(self.trail)
            if self.bind(which, node) and self.complete():
                return True
            self.undo(mark)
            if self.budget < 0:
                return False
        return False

    def candidates(self, which: int) -> list[fx.Node] | None:
        op = self.pattern.nodes[which]["op"]
        best = None
        for kind, index in self.pattern.operands[which]:
            operand = self.bound[index] if kind == "node" else self.inputs[index]
            if operand is None:
                continue
            users = [node for node in operand.users if self.index.op.get(node) == op and node not in self.inverse]
            if best is None or len(users) < len(best):
                best = users
        if best is not None:
            best.sort(key=self.index.position.__getitem__)
        return best

    def closed(self) -> bool:
        """Whether nothing outside reads an inner node, no path leaves and returns, and nothing is changed in place between."""
        for which, node in enumerate(self.bound):
            read = any(user not in self.inverse for user in node.users)
            if which not in self.pattern.outputs and read:
                return False
            if which in self.pattern.outputs and self.exact and not read:
                return False
        position = self.index.position
        first = min(position[node] for node in self.bound)
        last = max(position[node] for node in self.bound)
        if any(first <= place <= last for place in self.index.mutating):
            return False
        return not _depends_on(self.inputs, self.inverse, lambda node: position[node] > first)


def _depends_on(starts, members, may) -> bool:
    """Whether any of `starts` is a member or is computed from one; `may` prunes what is too early."""
    stack = [node for node in starts if node is not None]
    seen = set()
    while stack:
        node = stack.pop()
        if node in members:
            return True
        if node in seen or not may(node):
            continue
        seen.add(node)
        stack.extend(node.all_input_nodes)
    return False


def _same_meta(meta: dict, value) -> bool:
    # Symbolic sizes never match: comparing one with a number would add a guard to the user's graph.
    if not isinstance(value, torch.Tensor) or value.layout is not torch.strided or value.device.type != "cpu":
        return False
    if tensors.NAMES.get(value.dtype) != meta["dtype"] or value.dim() != len(meta["shape"]):
        return False
    for size, wanted in zip(value.shape, meta["shape"]):
        if type(size) is not int or size != wanted:
            return False
    for stride, wanted, size in zip(value.stride(), meta["stride"], meta["shape"]):
        # The stride of a dimension of size one is never used to find an element.
        if size != 1 and (type(stride) is not int or stride != wanted):
            return False
    return True


def _same_value(wanted, value) -> bool:
    if isinstance(wanted, dict) and "tensor" in wanted:
        return _same_meta(wanted["tensor"], value)
    if isinstance(wanted, dict) and "tuple" in wanted:
        metas = wanted["tuple"]
        return (
            isinstance(value, (tuple, list))
            and len(value) == len(metas)
            and all(
                _same_meta(meta, item) if meta is not None else not isinstance(item, torch.Tensor)
                for meta, item in zip(metas, value)
            )
        )
    return True


def _same_arg(wanted, found, pairs: list) -> bool:
    if isinstance(wanted, dict):
        if "ref" in wanted:
            if not isinstance(found, fx.Node):
                return False
            ((kind, index),) = wanted["ref"].items()
            pairs.append(((kind, index), found))
            return True
        if "list" in wanted:
            items = wanted["list"]
            return (
                isinstance(found, (list, tuple))
                and len(found) == len(items)
                and all(_same_arg(item, other, pairs) for item, other in zip(items, found))
            )
    if isinstance(found, fx.Node) or (isinstance(found, (list, tuple)) and not isinstance(found, torch.Size)):
        return False
    return _literal(wanted) == _literal(encode(found, _no_reference))


def _no_reference(node: fx.Node):
    raise AssertionError(f"{node} stands inside a literal")


def _literal(arg):
    """A literal in a form in which equal means equal: 1, 1.0 and True differ."""
    if isinstance(arg, dict):
        ((kind, value),) = arg.items()
        return (kind, str(float(value))) if kind == "float" else (kind, str(value))
    return (str(arg), "")


def find(gm: fx.GraphModule, region: dict, exact: bool = False) -> list[Match]:
    """Every place where the region stands, in graph order; places do not overlap.

    `exact` leaves out places where nothing reads one of the region's outputs: a region without that
    output, if there is one, fits them better.
    """
    pattern = _Pattern(region)
    index = _Index(gm)
    wanted = {node["op"] for node in pattern.nodes}
    if not wanted <= index.by_op.keys() or not region["outputs"]:
        return []
    anchor = region["outputs"][0]
    matches: list[Match] = []
    taken: set[fx.Node] = set()
    for node in index.by_op[pattern.nodes[anchor]["op"]]:
        search = _Search(pattern, index, taken, exact)
        if search.bind(anchor, node) and search.complete() and None not in search.inputs:
            matches.append(Match(region, list(search.bound), list(search.inputs)))
            taken.update(search.bound)
    return matches


def _current_inputs(match: Match) -> list[fx.Node] | None:
    """The inputs as the graph has them now: another replacement may have put new nodes there."""
    inputs: list[fx.Node | None] = [None] * len(match.region["inputs"])
    for pattern, node in zip(match.region["nodes"], match.nodes):
        kwargs = dict((key, arg) for key, arg in pattern["kwargs"])
        pairs: list = []
        for wanted, found in zip(pattern["args"], node.args):
            if not _same_arg(wanted, found, pairs):
                return None
        for key, found in node.kwargs.items():
            if key not in kwargs or not _same_arg(kwargs[key], found, pairs):
                return None
        for (kind, index), operand in pairs:
            if kind == "input":
                inputs[index] = operand
    return None if None in inputs else inputs


def replace(gm: fx.GraphModule, match: Match, target) -> bool:
    """Puts one call of `target` in the place of the match; `False` when that would close a cycle.

    The caller recompiles the module once all its replacements are made.
    """
    graph = gm.graph
    inputs = _current_inputs(match)
    if inputs is None:
        return False
    members = set(match.nodes)
    first = min(match.nodes)
    # Each match is convex alone; two that feed each other are not, once one is a single node.
    if _depends_on(inputs, members, lambda node: first < node):
        return False
    outputs = match.outputs
    place = min(outputs)
    late = [node for node in inputs if place < node]
    with graph.inserting_after(max(late)) if late else graph.inserting_before(place):
        call = graph.call_function(target, tuple(inputs))
    vals = [node.meta.get("val") for node in outputs]
    call.meta = dict(outputs[0].meta)
    call.meta.pop("tensor_meta", None)
    call.meta["val"] = vals[0] if len(vals) == 1 else tuple(vals)
    # Inductor keeps the strides of these for operators that ask for exact ones.
    call.meta["eager_input_vals"] = (tuple(node.meta.get("val") for node in inputs), {})
    results = [call]
    if len(outputs) > 1:
        results, after = [], call
        for index, node in enumerate(outputs):
            with graph.inserting_after(after):
                after = graph.call_function(operator.getitem, (call, index))
            after.meta = dict(node.meta)
            results.append(after)
    for old, new in zip(outputs, results):
        old.replace_all_uses_with(new, delete_user_cb=lambda user: user not in members)
    for node in sorted(members, reverse=True):
        graph.erase_node(node)
    for new in results:
        if not new.users and new is not call:
            graph.erase_node(new)
    if any(user < new for new in results for user in new.users):
        _sort(graph)
    return True


def _sort(graph: fx.Graph) -> None:
    """Puts the nodes into an order in which each reads only earlier ones, as near to the old order as can be."""
    nodes = list(graph.nodes)
    place = {node: index for index, node in enumerate(nodes)}
    waits = {node: len(node.all_input_nodes) for node in nodes}
    ready = [place[node] for node in nodes if waits[node] == 0]
    heapq.heapify(ready)
    order = []
    while ready:
        node = nodes[heapq.heappop(ready)]
        order.append(node)
        for user in node.users:
            waits[user] -= 1
            if waits[user] == 0:
                heapq.heappush(ready, place[user])
    previous = order[0]
    for node in order[1:]:
        previous.append(node)
        previous = node


def apply(gm: fx.GraphModule, table, constant=None) -> list[int]:
    """Replaces every place of each `(region, target, constant_inputs)`; returns how many each got.

    Regions of more nodes come first: a small one may stand inside a larger one, and would break it.
    `constant[i]` says whether placeholder `i` is a parameter or buffer. A place where one of a
    region's `constant_inputs` is anything else is left alone.
    """
    fixed = set(gm.graph.find_nodes(op="get_attr"))
    fixed.update(node for node, flag in zip(gm.graph.find_nodes(op="placeholder"), constant or ()) if flag)
    counts = [0] * len(table)
    largest_first = sorted(range(len(table)), key=lambda which: -len(table[which][0]["nodes"]))
    for exact in (True, False):
        for which in largest_first:
            region, target, needs = table[which]
            places = [match for match in find(gm, region, exact) if all(match.inputs[index] in fixed for index in needs)]
            counts[which] += sum(replace(gm, match, target) for match in places)
    if any(counts):
        gm.graph.lint()
        gm.recompile()
    return counts
