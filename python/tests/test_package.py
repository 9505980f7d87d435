"""Matching, replacing, calling and loading."""

from __future__ import annotations

import copy
import importlib
import os
import subprocess
import sys
import tempfile
import unittest
import warnings
from pathlib import Path
from unittest import mock

import torch
from torch.fx.experimental.proxy_tensor import make_fx

sys.path[:0] = [str(Path(__file__).parents[1]), str(Path(__file__).parent)]

import handmade as hm
from autokernel import kernels, rewrite
from autokernel.package import open_package

torch.set_num_threads(2)


def kernel_of(region, plan, alignment=1):
    library, key = kernels.load_artefact(hm.artefact())
    return kernels.Kernel(region, plan, library, key, alignment)


class Rewrite(unittest.TestCase):
    def trace(self, function, *example):
        return make_fx(function)(*example)

    def test_finds_every_place_and_replaces(self):
        region = hm.rms_region()

        def layers(x, a, b):
            for _ in range(20):
                x = torch.tanh(hm.rms_norm(hm.rms_norm(x, a), b))
            return x

        example = (torch.randn(hm.ROWS, hm.WIDTH), torch.randn(hm.WIDTH), torch.randn(hm.WIDTH))
        gm = self.trace(layers, *example)
        self.assertEqual(len(rewrite.find(gm, region)), 40)
        kernel = kernel_of(region, hm.rms_plan())
        self.assertEqual(rewrite.apply(gm, [(region, kernel.call, ())]), [40])
        self.assertEqual(len(list(gm.graph.nodes)), 3 + 40 + 20 + 1)
        with torch.no_grad():
            torch.testing.assert_close(gm(*example), layers(*example))
        self.assertEqual(rewrite.find(gm, region), [])

    def test_literals_shapes_strides_and_dtypes_count(self):
        region = hm.rms_region()
        x, w = torch.randn(hm.ROWS, hm.WIDTH), torch.randn(hm.WIDTH)
        others = {
            "another eps": self.trace(lambda x, w: x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + 1e-5) * w, x, w),
            "a power of the other kind": self.trace(lambda x, w: x * torch.rsqrt(x.pow(2.0).mean(-1, keepdim=True) + hm.EPS) * w, x, w),
            "rows": self.trace(hm.rms_norm, torch.randn(hm.ROWS + 1, hm.WIDTH), w),
            "strides": self.trace(hm.rms_norm, torch.randn(hm.WIDTH, hm.ROWS).t(), w),
            "dtype": self.trace(hm.rms_norm, x.double(), w.double()),
        }
        for what, gm in others.items():
            self.assertEqual(rewrite.find(gm, region), [], what)

    def test_inner_results_used_outside(self):
        def leaks(x, w):
            scale = torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + hm.EPS)
            return x * scale * w, scale

        gm = self.trace(leaks, torch.randn(hm.ROWS, hm.WIDTH), torch.randn(hm.WIDTH))
        self.assertEqual(rewrite.find(gm, hm.rms_region()), [])

    def test_symbolic_sizes_do_not_match_and_are_not_guarded(self):
        gm = make_fx(hm.rms_norm, tracing_mode="symbolic")(torch.randn(hm.ROWS, hm.WIDTH), torch.randn(hm.WIDTH))
        value = next(iter(gm.graph.nodes)).meta["val"]
        before = len(value.fake_mode.shape_env.guards)
        self.assertEqual(rewrite.find(gm, hm.rms_region()), [])
        self.assertEqual(len(value.fake_mode.shape_env.guards), before)

    def test_two_outputs_with_an_early_user(self):
        # `total` is read before `other`, which the second result's neighbour needs, is computed.
        def work(a, b):
            total, gate = hm.sum_and_gate(a, b)
            return torch.relu(total), gate, gate * 2

        a, b = torch.randn(2, hm.ROWS, hm.WIDTH)
        gm = self.trace(work, a, b)
        kernel = kernel_of(hm.gate_region(), hm.gate_plan())
        self.assertEqual(rewrite.apply(gm, [(hm.gate_region(), kernel.call, ())]), [1])
        with torch.no_grad():
            torch.testing.assert_close(gm(a, b), work(a, b))

    def test_two_outputs_from_a_shared_input_choose_the_right_user(self):
        # Both results hang on `x` alone, and `x` has other users with the same operator.
        def pair(x, p, q):
            return torch.exp(x * p), torch.sin(x * q)

        example = [torch.randn(4, 4) for _ in range(3)]
        region = hm.make_region(pair, example)

        def work(x, p, q):
            return x * 3, x * q, torch.sin(x * p), torch.exp(x * q), x * p

        found = rewrite.find(self.trace(work, *example), region)
        self.assertEqual(len(found), 1)
        self.assertEqual([node.name for node in found[0].inputs], ["x_1", "q_1", "p_1"])

    def test_a_place_goes_to_the_region_that_fits_it_exactly(self):
        # The same work, once with the sum read by somebody else and once not: two regions.
        def read(a, b):
            total = torch.tanh(a * 2) + b
            return total, torch.exp(total * 3)

        def inner(a, b):
            return read(a, b)[1]

        a, b = torch.randn(2, 4, 4)
        regions = [hm.make_region(read, [a, b]), hm.make_region(inner, [a, b])]

        def work(a, b):
            total, first = read(a, b)
            return inner(first + total, b)

        stand_in = [lambda a, b: read(a, b), lambda a, b: inner(a, b)]
        for number, one in enumerate(stand_in):
            one.__module__, one.__name__, one.__qualname__ = "handmade", f"s{number}", f"s{number}"
        for order in ((0, 1), (1, 0)):
            gm = self.trace(work, a, b)
            counts = rewrite.apply(gm, [(regions[i], stand_in[i], ()) for i in order])
            self.assertEqual(counts, [1, 1], order)
            torch.testing.assert_close(gm(a, b), work(a, b))
        # Alone, the wider one serves both.
        gm = self.trace(work, a, b)
        self.assertEqual(rewrite.apply(gm, [(regions[0], stand_in[0], ())]), [2])
        torch.testing.assert_close(gm(a, b), work(a, b))

    def test_a_region_that_stands_inside_another(self):
        def inner(a):
            return torch.tanh(a * 2)

        def outer(a, b):
            return torch.exp(inner(a) + b)

        a, b = torch.randn(2, 4, 4)
        regions = [hm.make_region(inner, [a]), hm.make_region(outer, [a, b])]
        gm = self.trace(lambda a, b: inner(outer(a, b)), a, b)
        counts = rewrite.apply(gm, [(regions[0], torch.sin, ()), (regions[1], torch.add, ())])
        self.assertEqual(counts, [1, 1])
        torch.testing.assert_close(gm(a, b), torch.sin(torch.add(a, b)))

    def test_a_path_that_leaves_and_returns(self):
        def apart(a, b):
            return torch.exp(a), torch.sin(b)

        example = [torch.randn(4, 4) for _ in range(2)]
        region = hm.make_region(apart, example)
        self.assertEqual(rewrite.find(self.trace(lambda a: torch.sin(torch.exp(a) * 2), example[0]), region), [])
        self.assertEqual(len(rewrite.find(self.trace(lambda a, b: (torch.sin(b) * 2, torch.exp(a)), *example), region)), 1)

    def test_two_places_that_feed_each_other(self):
        # Each is convex alone; both together would be a cycle of two nodes.
        def apart(a, b):
            return torch.exp(a), torch.sin(b)

        example = [torch.randn(4, 4) for _ in range(2)]
        region = hm.make_region(apart, example)

        def crossed(a, b):
            e1 = torch.exp(a)
            s1 = torch.sin(b)
            return torch.sin(e1), torch.exp(s1)

        gm = self.trace(crossed, *example)
        fused = lambda a, b: (torch.exp(a), torch.sin(b))  # noqa: E731
        fused.__module__, fused.__name__, fused.__qualname__ = "handmade", "fused", "fused"
        counts = rewrite.apply(gm, [(region, fused, ())])
        self.assertGreaterEqual(counts[0], 1)
        torch.testing.assert_close(gm(*example), crossed(*example))

    def test_the_graph_is_put_in_order_again(self):
        def apart(a, b):
            return torch.exp(a), torch.sin(b)

        example = [torch.randn(4, 4) for _ in range(2)]
        region = hm.make_region(apart, example)

        def early(a, b):
            e = torch.exp(a)
            early_user = e + 1
            s = torch.sin(b * 2)
            return early_user, s

        gm = self.trace(early, *example)
        fused = lambda a, b: (torch.exp(a), torch.sin(b))  # noqa: E731
        fused.__module__, fused.__name__, fused.__qualname__ = "handmade", "fused", "fused"
        self.assertEqual(rewrite.apply(gm, [(region, fused, ())]), [1])
        torch.testing.assert_close(gm(*example), early(*example))

    def test_time_grows_with_the_nodes(self):
        import time

        def layers(x, a):
            for _ in range(700):
                x = torch.tanh(hm.rms_norm(x, a) + 1)
            return x

        gm = self.trace(layers, torch.randn(hm.ROWS, hm.WIDTH), torch.randn(hm.WIDTH))
        self.assertGreater(len(gm.graph.nodes), 5000)
        started = time.process_time()
        kernel = kernel_of(hm.rms_region(), hm.rms_plan())
        self.assertEqual(rewrite.apply(gm, [(hm.rms_region(), kernel.call, ())]), [700])
        self.assertLess(time.process_time() - started, 5)


class Calls(unittest.TestCase):
    def setUp(self):
        self.x, self.w = torch.randn(hm.ROWS, hm.WIDTH), torch.randn(hm.WIDTH)

    def test_direct(self):
        kernel = kernel_of(hm.rms_region(), hm.rms_plan())
        result = kernel.call(self.x, self.w)
        torch.testing.assert_close(result, hm.rms_norm(self.x, self.w))
        self.assertEqual(result.stride(), (hm.WIDTH, 1))
        a, b = torch.randn(2, hm.ROWS, hm.WIDTH)
        torch.testing.assert_close(kernel_of(hm.gate_region(), hm.gate_plan()).call(a, b), hm.sum_and_gate(a, b))

    def test_other_inputs_run_the_original_with_one_warning(self):
        kernel = kernel_of(hm.rms_region(), hm.rms_plan())
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            for x in (torch.randn(5, hm.WIDTH), torch.randn(hm.WIDTH, hm.ROWS).t(), self.x.double()):
                torch.testing.assert_close(kernel.call(x, self.w), hm.rms_norm(x, self.w))
        self.assertEqual(len(caught), 1)

    def test_alignment(self):
        kernel = kernel_of(hm.rms_region(), hm.rms_plan(), alignment=64)
        shifted = torch.randn(hm.ROWS * hm.WIDTH + 1)[1:].view(hm.ROWS, hm.WIDTH)
        with mock.patch.object(kernels.warnings, "warn") as warn:
            torch.testing.assert_close(kernel.call(shifted, self.w), hm.rms_norm(shifted, self.w))
        warn.assert_called_once()
        with mock.patch.object(kernels.warnings, "warn") as warn:
            kernel_of(hm.rms_region(), hm.rms_plan()).call(shifted, self.w)
        warn.assert_not_called()

    def test_gradients_of_the_direct_call(self):
        kernel = kernel_of(hm.rms_region(), hm.rms_plan())
        x, w = self.x.clone().requires_grad_(), self.w.clone().requires_grad_()
        ours = torch.autograd.grad(kernel.call(x, w).sum(), (x, w))
        torch.testing.assert_close(ours, torch.autograd.grad(hm.rms_norm(x, w).sum(), (x, w)))

    def test_operator(self):
        kernel = kernel_of(hm.rms_region(), hm.rms_plan())
        op = kernel.operator()
        self.assertIs(op, kernel_of(hm.rms_region(), hm.rms_plan()).operator())
        self.assertIs(op, getattr(torch.ops.autokernel, f"r_{kernel.id}").default)
        x, w = self.x.clone().requires_grad_(), self.w.clone().requires_grad_()
        torch.library.opcheck(op, (self.x, self.w))
        torch.library.opcheck(op, (x, w))
        for needs in ((x, w), (x, self.w), (self.x, w)):
            wanted = [t for t in needs if t.requires_grad]
            seed = torch.randn(hm.ROWS, hm.WIDTH)
            ours = torch.autograd.grad(op(*needs), wanted, seed)
            torch.testing.assert_close(ours, torch.autograd.grad(hm.rms_norm(*needs), wanted, seed))
        # Other shapes run the original operators, also as fakes.
        small = torch.randn(3, hm.WIDTH)
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            torch.testing.assert_close(op(small, self.w), hm.rms_norm(small, self.w))

    def test_second_derivative(self):
        op = kernel_of(hm.rms_region(), hm.rms_plan()).operator()
        x, w = self.x.clone().requires_grad_(), self.w.clone().requires_grad_()

        def penalty(function):
            (gradient,) = torch.autograd.grad(function(x, w).pow(2).sum(), x, create_graph=True)
            return torch.autograd.grad(gradient.pow(2).sum(), (x, w))

        torch.testing.assert_close(penalty(op), penalty(hm.rms_norm), rtol=1e-4, atol=1e-4)

    def test_operator_with_two_outputs_of_which_one_is_used(self):
        op = kernel_of(hm.gate_region(), hm.gate_plan()).operator()
        a, b = torch.randn(2, hm.ROWS, hm.WIDTH, requires_grad=False)
        a.requires_grad_(), b.requires_grad_()
        for pick in (0, 1):
            ours = torch.autograd.grad(op(a, b)[pick].sum(), (a, b))
            torch.testing.assert_close(ours, torch.autograd.grad(hm.sum_and_gate(a, b)[pick].sum(), (a, b)))

    def test_prepared_buffers_follow_their_inputs(self):
        region = hm.make_region(hm.doubled, [self.x, self.w], constant=(1,))
        step = {"name": "d", "dtype": "f32", "numel": hm.WIDTH, "inputs": [1],
                "launch": hm.launch("double_weight", [{"input": 1}, {"prepared": 0}, {"int": hm.WIDTH}])}
        args = [{"input": 0}, {"prepared": 0}, {"output": 0}, {"int": hm.ROWS}, {"int": hm.WIDTH}]
        kernel = kernel_of(region, {"scratch": [], "prepare": [step], "launches": [hm.launch("scaled", args)]})
        self.assertEqual(kernel.constant_inputs, {1})
        for change in (lambda: None, lambda: self.w.mul_(3), lambda: self.w.set_(torch.randn(hm.WIDTH))):
            change()
            for _ in range(2):
                torch.testing.assert_close(kernel.call(self.x, self.w), hm.doubled(self.x, self.w))
        for _ in range(3):  # new tensors, perhaps at the same address and with the same id
            w = torch.randn(hm.WIDTH)
            torch.testing.assert_close(kernel.call(self.x, w), hm.doubled(self.x, w))
            del w
        with torch.inference_mode():
            w = torch.randn(hm.WIDTH)
            for _ in range(2):
                torch.testing.assert_close(kernel.call(self.x, w.mul_(2)), hm.doubled(self.x, w))
        # A place whose weight is no parameter is left alone.
        gm = make_fx(hm.doubled)(self.x, self.w)
        self.assertEqual(rewrite.apply(gm, [(region, kernel.call, kernel.constant_inputs)], [False, False]), [0])
        self.assertEqual(rewrite.apply(gm, [(region, kernel.call, kernel.constant_inputs)], [False, True]), [1])


class Load(unittest.TestCase):
    def setUp(self):
        torch._dynamo.reset()
        torch.manual_seed(1)
        folder = tempfile.TemporaryDirectory(prefix="autokernel-test-")
        self.addCleanup(folder.cleanup)
        self.folder = Path(folder.name)
        self.model = hm.Model().eval()
        self.x = torch.randn(hm.ROWS, hm.WIDTH)
        with torch.no_grad():
            self.expected = self.model(self.x)

    def check(self, loaded, matched=None, places=None):
        with torch.no_grad():
            for _ in range(2):
                torch.testing.assert_close(loaded(self.x), self.expected, rtol=1e-5, atol=1e-5)
        self.assertEqual(loaded.autokernel_report().fallbacks, [])
        if matched is not None:
            self.assertEqual(loaded.autokernel_report().matched, matched)
            self.assertEqual(sum(loaded.autokernel_report().places.values()), places)

    def test_products_with_prepared_weights(self):
        # The small region comes first in the package, and must not break the larger one.
        entries = [(hm.linear_region(relu), hm.linear_plan(relu)) for relu in (False, True)]
        for form in ("ours+eager", "ours+inductor"):
            with self.subTest(form):
                torch._dynamo.reset()
                self.model = hm.Products().eval()
                loaded = open_package(hm.make_package(self.folder / form.replace("+", "_"), form, entries)).load(self.model)
                with torch.no_grad():
                    self.expected = self.model(self.x)
                self.check(loaded, matched=2, places=2)
                report = loaded.autokernel_report()
                self.assertEqual(set(report.places.values()), {1})
                # Three steps for each of two weights, made once whatever the number of calls.
                weight = hm.WIDTH * hm.WIDTH * 4
                self.assertEqual(report.prepared_bytes, 6 * weight)
                self.assertIn("of constants are kept", str(report))
                with torch.no_grad():
                    self.model.first.weight.mul_(-0.5)
                    self.model.second.weight = torch.nn.Parameter(torch.randn(hm.WIDTH, hm.WIDTH) / 10)
                    self.expected = self.model(self.x)
                self.check(loaded)
                self.assertEqual(report.prepared_bytes, 6 * weight)
                with torch.inference_mode():
                    torch.testing.assert_close(loaded(self.x), self.expected, rtol=1e-5, atol=1e-5)
                # With gradients the original operators run.
                ours, theirs = loaded(self.x), self.model(self.x)
                parameters = list(self.model.parameters())
                for a, b in zip(*(torch.autograd.grad(y.square().sum(), parameters) for y in (ours, theirs))):
                    torch.testing.assert_close(a, b, rtol=1e-4, atol=1e-4)

    def test_both_forms(self):
        for form in ("ours+eager", "ours+inductor"):
            with self.subTest(form):
                torch._dynamo.reset()
                folder = hm.make_package(self.folder / form.replace("+", "_"), form)
                loaded = open_package(folder).load(self.model)
                self.check(loaded, matched=2, places=3)
                self.assertIn("matched 2 of 2 regions", str(loaded.autokernel_report()))
                names = [name.removeprefix("_orig_mod.") for name in loaded.state_dict()]
                self.assertEqual(names, list(self.model.state_dict()))
                self.assertFalse(hasattr(self.model, "autokernel_report"))
                # A later change of a weight is seen.
                with torch.no_grad():
                    before = self.model.first.clone()
                    self.model.first.mul_(2)
                    torch.testing.assert_close(loaded(self.x), self.model(self.x), rtol=1e-5, atol=1e-5)
                    self.model.first.copy_(before)
                    # Other shapes find nothing and stay right.
                    other = torch.randn(7, hm.WIDTH)
                    torch.testing.assert_close(loaded(other), self.model(other), rtol=1e-5, atol=1e-5)
                self.assertEqual(sum(loaded.autokernel_report().places.values()), 3)
                self.check(loaded)

    def test_training(self):
        for form in ("ours+eager", "ours+inductor"):
            with self.subTest(form):
                torch._dynamo.reset()
                loaded = open_package(hm.make_package(self.folder / form.replace("+", "_"), form)).load(self.model)
                self.check(loaded)
                x = self.x.clone().requires_grad_()
                wanted = [x, *self.model.parameters()]
                ours = torch.autograd.grad(loaded(x).pow(2).sum(), wanted)
                eager = torch.autograd.grad(self.model(x).pow(2).sum(), wanted)
                torch.testing.assert_close(ours, eager, rtol=1e-4, atol=1e-4)
                self.assertEqual(loaded.autokernel_report().fallbacks, [])

    def test_functions_and_plain_forms(self):
        folder = hm.make_package(self.folder / "p", "ours+eager")
        loaded = open_package(folder).load(lambda x: self.model(x))
        self.check(loaded, matched=2, places=3)
        hm.edit_manifest(folder, lambda m: m.update(form="eager"))
        self.assertIs(open_package(folder).load(self.model), self.model)

    def test_disabled(self):
        package = open_package(hm.make_package(self.folder / "p", "ours+eager"))
        with mock.patch.dict(os.environ, AUTOKERNEL_DISABLE="1"):
            self.assertIs(package.load(self.model), self.model)

    def problem(self, spoil, says, matched=1, places=1):
        """Spoils the norm's entry; the gate's must go on, with exactly one warning."""
        folder = hm.make_package(self.folder / "p", "ours+eager")
        spoil(folder, folder / "artefacts" / f"{hm.rms_region()['id']}.so")
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            package = open_package(folder)
            self.check(package.load(self.model), matched, places)
            self.check(package.load(self.model))
        ours = [str(w.message) for w in caught if "autokernel" in str(w.message)]
        self.assertEqual(len(ours), 1, ours)
        self.assertIn(says, ours[0])

    def test_missing_artefact(self):
        self.problem(lambda folder, so: so.unlink(), "missing")

    def test_cut_artefact(self):
        self.problem(lambda folder, so: so.write_bytes(so.read_bytes()[:6000]), "cut short")

    def test_no_artefact_at_all(self):
        self.problem(lambda folder, so: so.write_text("hello"), "no 64-bit ELF")

    def test_changed_artefact(self):
        def spoil(folder, so):
            hm.edit_manifest(folder, lambda m: m["regions"][0].update(artefact_sha256="0" * 64))

        self.problem(spoil, "hash differs")

    def test_lacking_feature(self):
        def spoil(folder, so):
            hm.edit_manifest(folder, lambda m: m["regions"][0]["guards"].update(cpu_features=["avx1024"]))

        self.problem(spoil, "lacks avx1024")

    def test_lacking_entry(self):
        def spoil(folder, so):
            hm.edit_manifest(folder, lambda m: m["regions"][0]["plan"]["launches"][0].update(entry="nothing"))

        self.problem(spoil, "no entry `nothing`")

    def test_all_missing_gives_the_model(self):
        folder = hm.make_package(self.folder / "p", "ours+eager")
        for so in (folder / "artefacts").iterdir():
            so.unlink()
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            self.assertIs(open_package(folder).load(self.model), self.model)
        self.assertEqual(len(caught), 1)

    def test_moved_folder_alone(self):
        hm.make_package(self.folder / "first", "ours+eager").rename(self.folder / "second_name")
        torch.save(self.model.state_dict(), self.folder / "weights.pt")
        script = (
            "import sys, torch; sys.path[:0] = [sys.argv[1], sys.argv[2]]\n"
            "from autokernel_test_model import Model\n"
            "import second_name\n"
            "assert 'autokernel' not in sys.modules\n"
            "model = Model(); model.load_state_dict(torch.load(sys.argv[1] + '/weights.pt'))\n"
            "loaded = second_name.load(model, report=True)\n"
            "x = torch.randn(48, 96)\n"
            "with torch.no_grad(): torch.testing.assert_close(loaded(x), model(x), rtol=1e-5, atol=1e-5)\n"
            "assert 'autokernel' not in sys.modules\n"
        )
        source = Path(hm.__file__).read_text()
        functions = source[source.index("def rms_norm"):source.index("def doubled")]
        (self.folder / "autokernel_test_model.py").write_text(
            "import torch\nfrom torch import nn\nROWS, WIDTH, EPS = 48, 96, 1e-6\n" + functions + source[source.index("class Model"):]
        )
        done = subprocess.run([sys.executable, "-B", "-c", script, str(self.folder), str(self.folder)], capture_output=True, text=True, cwd="/")
        self.assertEqual(done.returncode, 0, done.stderr)
        self.assertIn("matched 2 of 2 regions", done.stderr)

    def test_two_packages_with_one_region(self):
        sys.path.insert(0, str(self.folder))
        self.addCleanup(sys.path.remove, str(self.folder))
        for name in ("twin_a", "twin_b"):
            hm.make_package(self.folder / name, "ours+inductor")
            torch._dynamo.reset()
            self.check(importlib.import_module(name).load(copy.deepcopy(self.model)), matched=2, places=3)


if __name__ == "__main__":
    unittest.main()
