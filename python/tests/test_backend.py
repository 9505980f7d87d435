"""Compiling without running, the way back to the Dynamo graph, gradients."""

import os
import unittest

import support  # noqa: F401
import torch
from torch import nn

from autokernel import backend


def network():
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(8, 8), nn.GELU(), nn.LayerNorm(8)).eval()


class Backend(unittest.TestCase):
    def setUp(self):
        torch._dynamo.reset()

    def test_stops_before_the_first_kernel(self):
        ran = []
        seen = []
        model, x = network(), torch.randn(4, 8)
        given = backend.aot_backend(lambda g, i, c: seen.append(c) or g, "eager", lambda g, a: ran.append(a))
        compiled = backend.compile_model(model, given)
        threads = len(os.listdir("/proc/self/task"))
        self.assertTrue(backend.compile_ahead(compiled, (x,)))
        self.assertEqual(ran, [])
        self.assertEqual(len(os.listdir("/proc/self/task")), threads)
        self.assertEqual(len(seen), 1)
        with torch.no_grad():
            self.assertTrue(torch.equal(compiled(x), model(x)))
        self.assertEqual((len(ran), len(seen)), (1, 1), "nothing is compiled twice")

    def test_inductor_stops_and_runs(self):
        model, x = lambda t: torch.relu(t) * torch.tensor([2.0]) + t.mean(-1, keepdim=True), torch.randn(16, 64)
        with backend.codegen_threads(1):
            for given in (backend.stock_inductor(), backend.aot_backend(lambda g, i, c: g, "inductor", None, self.fail)):
                torch._dynamo.reset()
                compiled = backend.compile_model(model, given)
                self.assertTrue(backend.compile_ahead(compiled, (x,)))
                with torch.no_grad():
                    torch.testing.assert_close(compiled(x), model(x))

    def test_transform_changes_what_runs(self):
        def double(graph, _inputs, constant):
            self.assertEqual(constant, [True, True, False] if len(constant) == 3 else constant)
            for node in graph.graph.find_nodes(op="call_function", target=torch.ops.aten.relu.default):
                node.target = torch.ops.aten.neg.default
            graph.recompile()
            return graph

        compiled = backend.compile_model(nn.Sequential(nn.Linear(4, 4), nn.ReLU()), backend.aot_backend(double))
        with torch.no_grad():
            x = torch.randn(2, 4)
            self.assertTrue((compiled(x) == -compiled._orig_mod[0](x)).all())

    def test_gradients_are_eager_ones(self):
        model, x = network(), torch.randn(4, 8)
        compiled = backend.compile_model(model, backend.aot_backend(lambda g, i, c: g))
        compiled(x).square().sum().backward()
        ours = [p.grad.clone() for p in model.parameters()]
        model.zero_grad()
        model(x).square().sum().backward()
        for a, p in zip(ours, model.parameters()):
            torch.testing.assert_close(a, p.grad)

    def test_falls_back_to_the_dynamo_graph(self):
        def broken(graph, _inputs, _constant):
            for node in graph.graph.find_nodes(op="call_function", target=torch.ops.aten.relu.default):
                node.target = torch.ops.aten.bincount.default
            graph.recompile()
            return graph

        reasons = []
        compiled = backend.compile_model(torch.relu, backend.aot_backend(broken, on_fallback=reasons.append))
        with torch.no_grad(), self.assertLogs("autokernel", "WARNING"):
            x = torch.randn(2, 4)
            self.assertTrue(torch.equal(compiled(x), torch.relu(x)))
        self.assertEqual(len(reasons), 1)

    def test_a_buffer_that_is_written_is_no_constant(self):
        class Counting(nn.Module):
            def __init__(self):
                super().__init__()
                self.register_buffer("count", torch.zeros(1))
                self.register_buffer("scale", torch.ones(4))

            def forward(self, x):
                self.count.add_(1)
                return x * self.scale + self.count

        seen = []
        compiled = backend.compile_model(Counting(), backend.aot_backend(lambda g, i, c: seen.append(c) or g))
        with torch.no_grad():
            compiled(torch.randn(4))
        self.assertEqual(sum(seen[0]), 1)


if __name__ == "__main__":
    unittest.main()
