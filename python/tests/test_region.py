"""Widening, and the families of inputs."""

import tempfile
import unittest
from pathlib import Path

import support
import torch

from autokernel import domain, tensors
from autokernel import region as regions
from autokernel.oracle import Oracle


def capture(text, names=None):
    oracle = Oracle()
    oracle.load({"model": support.write_model(text), "inputs": [], "seed": 0})
    reply = oracle.capture({})
    graph = reply["graphs"][0]
    region, occurrence = support.cut(graph, names or support.all_calls(graph))
    values = oracle.graphs[0].values(0, occurrence["inputs"])
    return oracle, region, occurrence, [values[n] for n in occurrence["inputs"]]


HALF = """
import torch, torch.nn.functional as F
def build():
    def f(x, w):
        y = F.layer_norm(x.float(), (64,), w.float()).to(torch.bfloat16)
        m = torch.arange(64, device=x.device) < torch.full((), 32.0)
        z = F.softmax(y, -1, dtype=torch.float32) * m.to(x.dtype)
        return (z + torch.ones(64, dtype=torch.float16)).half(), (x > 0).to(torch.int64)
    return f, [torch.randn(8, 64).bfloat16(), torch.randn(64).bfloat16()]
"""


class Widening(unittest.TestCase):
    def test_every_float_becomes_f64(self):
        _, region, _, given = capture(HALF)
        before = str(region)
        wide = regions.widen(region)
        self.assertEqual(str(region), before, "the original is untouched")
        self.assertNotIn("'f32'", str(wide))
        self.assertNotIn("bf16", str(wide))
        truth = regions.run(wide, [t.double() for t in given])
        own = regions.run(region, given)
        self.assertEqual([t.dtype for t in truth], [torch.float64, torch.int64])
        self.assertTrue(torch.equal(truth[1], own[1]))
        self.assertLess((truth[0] - own[0].double()).abs().max().item(), 0.02)
        self.assertTrue(regions.jumps(region))

    def test_truth_is_more_exact_than_the_baseline(self):
        oracle, reply = support.captured("new_activation")
        graph = reply["graphs"][0]
        members = support.all_calls(graph)[:10]
        region, occurrence = support.cut(graph, members)
        values = oracle.graphs[0].values(0, occurrence["inputs"])
        given = [values[n] for n in occurrence["inputs"]]
        for own, truth in zip(regions.run(region, given), regions.run(regions.widen(region), [t.double() for t in given])):
            error = ((own.double() - truth).norm() / truth.norm()).item()
            self.assertGreater(error, 0)
            self.assertLess(error, 1e-6)

    def test_bits_read_as_another_type_are_refused(self):
        text = "import torch\ndef build():\n    return (lambda x: x.view(torch.int32) + 1), [torch.randn(4)]\n"
        _, region, _, _ = capture(text)
        with self.assertRaises(ValueError):
            regions.widen(region)


class Families(unittest.TestCase):
    def sets(self, oracle, region, occurrence, count=12, special=False):
        """Sets of special values, or all the others."""
        folder = tempfile.TemporaryDirectory()
        self.addCleanup(folder.cleanup)
        body = {"region": region, "occurrence": occurrence, "sets": count, "seed": 5, "dir": folder.name}
        reply = oracle.region_inputs(body)
        reply["sets"] = [made for made in reply["sets"] if made["family"].startswith("special") == special]
        return reply

    def test_families_of_a_norm(self):
        text = """
import torch
class Model(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.weight = torch.nn.Parameter(torch.ones(48))
    def forward(self, x):
        return x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + 1e-6) * self.weight
def get_inputs():
    return [torch.randn(96, 48)]
"""
        oracle, region, occurrence, given = capture(text)
        reply = self.sets(oracle, region, occurrence)
        names = [s["family"] for s in reply["sets"]]
        self.assertEqual(names[:3], ["captured", "captured2", "normal"])
        self.assertEqual(len(names), len(set(names)))
        self.assertGreaterEqual(len(names), 8)
        weight = [e["constant"] for e in region["inputs"]].index(True)
        for made in reply["sets"]:
            for described, entry in zip(made["inputs"], region["inputs"]):
                self.assertEqual({k: described[k] for k in ("dtype", "shape", "stride")}, entry["meta"])
            loaded = [tensors.read(f) for f in made["inputs"]]
            (truth,), (own,) = [tensors.read(made[k][0]) for k in ("truth",)], [tensors.read(made[k][0]) for k in ("baseline",)]
            self.assertEqual(truth.dtype, torch.float64)
            self.assertTrue(torch.isfinite(truth).all())
            self.assertTrue(torch.equal(own, regions.run(region, loaded)[0]))
            ones = bool((loaded[weight] == 1).all())
            self.assertEqual(ones, made["family"].startswith("captured"))
        first, second = (tensors.read(reply["sets"][i]["inputs"][1 - weight]) for i in (0, 1))
        self.assertTrue(torch.equal(first, given[1 - weight]))
        self.assertFalse(torch.equal(first, second))

    def test_domain_is_kept(self):
        text = """
import torch
def build():
    def f(x, table, index):
        return torch.log(x) + table[index], torch.sqrt(torch.relu(x) + 0.0)
    return f, [torch.rand(32, 16) + 0.1, torch.randn(7, 16), torch.randint(0, 7, (32,))]
"""
        oracle, region, occurrence, given = capture(text)
        reply = self.sets(oracle, region, occurrence)
        self.assertGreaterEqual(len(reply["sets"]), 6)
        for made in reply["sets"]:
            for described in made["truth"]:
                self.assertTrue(torch.isfinite(tensors.read(described)).all(), made["family"])

    def test_noise_is_what_roundings_do(self):
        text = """
import torch
def build():
    return (lambda x: x - x.mean(-1, keepdim=True)), [torch.randn(64, 256)]
"""
        reply = self.sets(*capture(text)[:3])
        seen = {}
        for made in reply["sets"]:
            described = made["noise"][0]
            self.assertEqual((described["dtype"], described["shape"]), ("f64", made["truth"][0]["shape"]))
            spread, truth, own = (tensors.read(made[k][0]) for k in ("noise", "truth", "baseline"))
            x = tensors.read(made["inputs"][0]).double()
            roundings = spread.norm() / x.norm() / 2.0**-24
            error = ((own.double() - truth).norm() / x.norm() / 2.0**-24).item()
            self.assertTrue(error / 4 < roundings < 200, (made["family"], roundings, error))
            seen[made["family"]] = spread
        # Each row of values far from zero has the noise of its mean, whatever the baseline's luck there.
        rows = seen["low_variance"].square().mean(-1).sqrt()
        self.assertLess((rows.max() / rows.min()).item(), 16)

    def test_the_plainest_sum_is_within_noise(self):
        text = "import torch\ndef build():\n    return (lambda x: x.mean(-1)), [torch.rand(64, 1024) + 1]\n"
        for made in self.sets(*capture(text)[:3])["sets"]:
            x, spread = tensors.read(made["inputs"][0]), tensors.read(made["noise"][0])
            total = torch.zeros(64)
            for column in x.t():
                total += column
            error = total.double() / 1024 - tensors.read(made["truth"][0])
            cheap = x.bfloat16().double().mean(-1) - tensors.read(made["truth"][0])
            self.assertLess(error.norm().item(), 4 * spread.norm().item(), made["family"])
            if made["family"] == "normal":
                self.assertGreater(cheap.norm().item(), 100 * spread.norm().item())

    def test_noise_of_whole_numbers_and_choices(self):
        text = """
import torch
def build():
    return (lambda x, i: (i + 1, torch.relu(x), x.to(torch.int64))), [torch.randn(8, 8).bfloat16(), torch.arange(64).view(8, 8)]
"""
        for made in self.sets(*capture(text)[:3])["sets"]:
            spreads = [(tensors.read(n), tensors.read(t)) for n, t in zip(made["noise"], made["truth"])]
            self.assertEqual(spreads[0][0].abs().max(), 0)
            # The digits of a bf16 input are given; what is known to one rounding is what sums are kept in.
            self.assertTrue((spreads[1][0] <= 2.0**-24 * spreads[1][1].abs()).all())

    def test_ill_conditioned_inputs_are_noise(self):
        # Equal numbers cancel exactly in the baseline; after any rounding they would not.
        text = "import torch\ndef build():\n    return (lambda x: (x - x[:, :1]) * 1e12), [torch.randn(64, 64)]\n"
        made = {m["family"]: m for m in self.sets(*capture(text)[:3], count=20)["sets"]}["constant_rows"]
        self.assertGreater(tensors.read(made["noise"][0]).norm(), tensors.read(made["truth"][0]).norm())

    def test_what_the_graph_knows(self):
        graph = torch.fx.Graph()
        x = graph.placeholder("x")
        aten = torch.ops.aten
        soft = graph.call_function(aten._softmax.default, (x, -1, False))
        seen = graph.call_function(aten.view.default, (soft, [4]))
        square = graph.call_function(aten.pow.Tensor_Scalar, (x, 2))
        shifted = graph.call_function(aten.add.Tensor, (square, 1e-5))
        difference = graph.call_function(aten.sub.Tensor, (square, soft))
        self.assertEqual(domain.known_range(x), domain.Range())
        self.assertEqual(domain.known_range(seen), domain.Range(0.0, 1.0))
        self.assertEqual(domain.known_range(shifted), domain.Range(0.0))
        self.assertEqual(domain.known_range(difference), domain.Range())

    def test_model_truth(self):
        oracle, _ = support.captured("new_activation")
        with tempfile.TemporaryDirectory() as folder:
            reply = oracle.model_truth({"draws": [3, 4], "dir": folder})
            self.assertTrue(reply["widened"])
            self.assertEqual(len(reply["draws"]), 2)
            for draw in reply["draws"]:
                truth, own = tensors.read(draw["truth"][0]), tensors.read(draw["baseline"][0])
                error = ((truth - own.double()).norm() / truth.norm()).item()
                self.assertTrue(0 < error < 1e-5)
                spread = (tensors.read(draw["noise"][0]).norm() / truth.norm()).item()
                self.assertTrue(error / 4 < spread < 1e-5, (error, spread))
            self.assertTrue(all(Path(f["file"]).is_file() for d in reply["draws"] for f in d["truth"]))

    def test_model_truth_in_own_types(self):
        text = """
import torch
class Model(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.down = torch.nn.Linear(64, 64)
    def forward(self, x):
        return torch.from_numpy(self.down(x).numpy().astype("float32") * 2)
def get_init_inputs(): return []
def get_inputs(): return [torch.randn(32, 64)]
"""
        oracle = Oracle()
        oracle.load({"model": support.write_model(text), "inputs": [], "seed": 0})
        weight = oracle.model().module.down.weight.detach().clone()
        with tempfile.TemporaryDirectory() as folder:
            reply = oracle.model_truth({"draws": [3, 4], "dir": folder})
            self.assertFalse(reply["widened"])
            for draw in reply["draws"]:
                self.assertTrue(draw["own_types"])
                truth, own, spread = (tensors.read(draw[k][0]) for k in ("truth", "baseline", "noise"))
                self.assertTrue(torch.equal(truth, own.double()))
                self.assertTrue(2.0**-25 < spread.norm() / truth.norm() < 2.0**-20)
        self.assertTrue(torch.equal(oracle.model().module.down.weight, weight))


if __name__ == "__main__":
    unittest.main()
