"""Wrong forms of a region, special values, and the ranges of inputs."""

import math
import tempfile
import unittest
from pathlib import Path

import support  # noqa: F401: finds the bridge
import torch

from autokernel import controls, domain, families, mutants, precision, tensors
from autokernel import region as regions
from test_region import capture

LAYERS = """
import torch, torch.nn.functional as F
def build():
    def f(x, y, w, b):
        h = F.layer_norm(x, (40,), w, b)
        return F.softmax(h - y, -1) + F.gelu(h) * 0.5, (x - x.mean(-1, keepdim=True)).pow(2).sum(-1)
    return f, [torch.randn(24, 40), torch.randn(24, 40), torch.randn(40), torch.randn(40)]
"""


class Mutants(unittest.TestCase):
    def setUp(self):
        _, self.region, _, self.given = capture(LAYERS)
        self.right = regions.run(self.region, self.given)

    def outputs(self, wanted, wide=False, others=None):
        folder = tempfile.TemporaryDirectory()
        self.addCleanup(folder.cleanup)
        def written(kind, values):
            return [tensors.write(t.contiguous(), Path(folder.name) / f"{kind}{i}") for i, t in enumerate(values)]

        others = others or [written("other", [t + 1 for t in self.right])] * 2
        body = {"region": self.region, "most": 500, "seed": 3, "wanted": wanted, "wide": wide}
        body |= {"inputs": written("in", self.given), "others": others, "dir": folder.name}
        made = controls.outputs(body)["made"]
        return {m["mutant"]: m["outputs"] and [tensors.read(t) for t in m["outputs"]] for m in made}

    def test_there_are_many_of_every_kind(self):
        planned = mutants.plan(self.region, 500, 3)
        kinds = {m.kind for m in planned}
        self.assertGreaterEqual(len(planned), 100)
        expected = "drop operand swap constant cut accumulation precision approximation shortcut output stale tail index input special copy"
        self.assertEqual(kinds, set(expected.split()))
        self.assertEqual(len({m.name for m in planned}), len(planned), "each has a name of its own")
        self.assertEqual([m.name for m in planned], [m.name for m in mutants.plan(self.region, 500, 3)])
        few = mutants.plan(self.region, 32, 3)
        self.assertEqual(len(few), 32)
        self.assertGreaterEqual(len({m.kind for m in few}), len(kinds) - 1, "a part is a fair sample")

    def test_each_differs_from_the_right_form_and_only_as_said(self):
        planned = mutants.plan(self.region, 500, 3)
        made = self.outputs(list(range(len(planned))))
        self.assertEqual(set(made), set(range(len(planned))))
        same = []
        for number, outputs in made.items():
            if outputs is None:
                continue
            self.assertEqual([(t.shape, t.dtype) for t in outputs], [(t.shape, t.dtype) for t in self.right], planned[number].name)
            if all(torch.equal(a, b) for a, b in zip(outputs, self.right)):
                same.append(planned[number])
        # Not on these inputs, at least: no special values, nothing below 1e-3 or beyond a range.
        self.assertLessEqual({m.kind for m in same}, {"special", "approximation", "shortcut", "constant"}, [m.name for m in same])
        unsuited = [planned[n].name for n, outputs in made.items() if outputs is None]
        self.assertLess(len(unsuited), len(planned) // 5, unsuited)

    def test_wide_forms_say_what_is_another_function(self):
        planned = mutants.plan(self.region, 500, 3)
        wide = regions.run(regions.widen(self.region), [t.double() for t in self.given])
        shortcut = [i for i, m in enumerate(planned) if m.kind == "shortcut"]
        cut = [i for i, m in enumerate(planned) if m.kind == "cut" and "last element" in m.name]
        self.assertTrue(shortcut and cut)
        for number, outputs in self.outputs(shortcut + cut, wide=True).items():
            self.assertEqual(outputs[0].dtype, torch.float64)
            moved = max((a - b).abs().max().item() for a, b in zip(outputs, wide))
            self.assertEqual(moved < 1e-10, number in shortcut, planned[number].name)

    def test_sharing_what_runs_before_changes_nothing(self):
        planned = mutants.plan(self.region, 500, 3)
        late = [i for i, m in enumerate(planned) if m.node is not None and m.node > 2]
        together = self.outputs(late)
        for number in late[::7]:
            (alone,) = self.outputs([number]).values()
            for a, b in zip(alone or [], together[number] or []):
                self.assertTrue(torch.equal(a, b) or (a != a).any(), planned[number].name)


class Values(unittest.TestCase):
    def test_rounding_keeps_digits_and_range(self):
        g = torch.Generator().manual_seed(1)
        x = torch.randn(4096, generator=g) * torch.randn(4096, generator=g).mul(20).exp()
        self.assertTrue(torch.equal(precision.rounded(x, 8), x.bfloat16().float()))
        y = torch.randn(4096, generator=g)
        self.assertTrue(torch.equal(precision.rounded(y, 11)[y.abs() > 1e-3], y.half().float()[y.abs() > 1e-3]))
        self.assertTrue(torch.equal(precision.rounded(y, 24), y))
        special = torch.tensor([math.inf, -math.inf, 0.0, math.nan])
        self.assertTrue(torch.equal(precision.rounded(special, 8)[:3], special[:3]))
        self.assertTrue(precision.rounded(special, 8)[3].isnan())

    def test_special_values_stand_in_some_rows(self):
        for dtype in (torch.float64, torch.float32, torch.float16, torch.bfloat16):
            for name, values in families.specials(dtype).items():
                g = torch.Generator().manual_seed(2)
                base = torch.ones(64, 96, dtype=dtype)
                made = families.sprinkled(base, values, g)
                changed = (made != base).any(-1)
                self.assertTrue(8 <= changed.sum() <= 16, (dtype, name, changed.sum()))
                self.assertEqual(made.dtype, dtype)
                wanted = torch.tensor(values, dtype=torch.float64).to(dtype)
                for value in wanted:
                    same = made.isnan() if value.isnan() else (made == value) & (made.signbit() == value.signbit())
                    self.assertTrue(same.any(), (dtype, name, value))
                self.assertEqual(name == "special", not bool(torch.isfinite(wanted).all()))

    def test_sets_of_special_values_are_kept_and_kept_apart(self):
        text = "import torch\ndef build():\n    return (lambda x, w: torch.log(x.abs()) * w), [torch.randn(64, 32), torch.randn(32)]\n"
        oracle, region, occurrence, _ = capture(text)
        with tempfile.TemporaryDirectory() as folder:
            body = {"region": region, "occurrence": occurrence, "sets": 4, "seed": 9, "dir": folder}
            made = oracle.region_inputs(body)["sets"]
            names = [m["family"] for m in made]
            self.assertEqual(names[-3:], ["special", "special_large", "special_small"])
            self.assertEqual(len(names), 7)
            own = {m["family"]: tensors.read(m["baseline"][0]) for m in made}
            self.assertTrue(own["special"].isnan().any() and own["special"].isinf().any())
            self.assertTrue((own["special_small"] == -math.inf).any(), "the logarithm of zero")
            reply = oracle.region_inputs(body | {"other_than": names})
            more, dropped = reply["sets"], {d["family"] for d in reply["dropped"]}
            self.assertLessEqual(dropped, {"sparse", "zero_rows", "zero_one"}, "their logarithms are not finite")
            self.assertEqual({m["family"] for m in more} & set(names), set())
            self.assertEqual({m["family"] for m in more} | dropped | set(names), set(families.ALL) | set(names))
            files = [t["file"] for m in made + more for t in m["inputs"]]
            self.assertEqual(len(files), len(set(files)), "no set overwrites another")

    def test_ranges_are_kept_by_folding(self):
        x = torch.randn(10_000, generator=torch.Generator().manual_seed(4)) * 100
        for low, high in ((0, 1), (-1, 1), (-math.inf, 0), (0.1, 1.1), (0, math.inf), (-3, 5), (-2, -1), (2, math.inf), (-1, math.inf), (-math.inf, 3)):
            folded = domain.Range(low, high).fold(x.clone())
            self.assertTrue(((folded >= low) & (folded <= high)).all(), (low, high))
            self.assertGreater(folded.unique().numel(), 9000, "not clipped")
        self.assertTrue(torch.equal(domain.Range().fold(x), x))

    def test_domains_of_functions(self):
        graph = torch.fx.Graph()
        x = graph.placeholder("x")
        aten = torch.ops.aten

        def call(op, *args):
            return graph.call_function(op, args)

        tanh = call(aten.tanh.default, x)
        self.assertEqual(domain.known_range(tanh), domain.Range(-1, 1))
        self.assertEqual(domain.known_range(call(aten.clamp.default, x, -2, 3)), domain.Range(-2, 3))
        self.assertEqual(domain.known_range(call(aten.clamp_max.default, x, 3)), domain.Range(high=3))
        self.assertEqual(domain.known_range(call(aten.clamp.default, tanh, 0)), domain.Range(0, 1))
        both = call(aten.cat.default, [call(aten.sigmoid.default, x), tanh])
        self.assertEqual(domain.known_range(both), domain.Range(-1, 1))

    def test_operands_of_narrow_domain_get_sets(self):
        text = "import torch\ndef build():\n    return (lambda x, y: torch.acos(x) + torch.log(y)), [torch.rand(64, 64) * 2 - 1, torch.rand(64, 64) + 0.5]\n"
        oracle, region, occurrence, _ = capture(text)
        with tempfile.TemporaryDirectory() as folder:
            body = {"region": region, "occurrence": occurrence, "sets": 17, "seed": 1, "dir": folder}
            reply = oracle.region_inputs(body)
        families_made = [m["family"] for m in reply["sets"]]
        self.assertGreaterEqual(len(families_made), 14, reply["dropped"])


if __name__ == "__main__":
    unittest.main()
