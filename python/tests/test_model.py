"""Ways to name a model, and what goes wrong with it."""

import contextlib
import io
import unittest

import support
import torch

from autokernel import model
from autokernel.oracle import Oracle
from autokernel.wire import RequestError

NETWORK = """
import torch
from torch import nn
class Model(nn.Module):
    def __init__(self, width=8, fail=False):
        super().__init__()
        self.inner = nn.Linear(width, width)
        self.drop = nn.Dropout(0.5)
    def forward(self, x, scale=None):
        y = self.drop(self.inner(x))
        return {"y": y if scale is None else y * scale, "more": [y.sum(), 3]}
def get_init_inputs():
    return [8]
def get_inputs():
    return [torch.randn(4, 8)]
def function(x, y):
    return x + y
def factory():
    return Model(), {"x": torch.randn(2, 8), "scale": torch.randn(8)}
"""


class Loading(unittest.TestCase):
    def test_forms(self):
        path = support.write_model(NETWORK)
        for spec, inputs, outputs in (
            (path, [], 2),
            (f"{path}:Model", ["3x8", "scale=8:float32"], 2),
            (f"{path}:function", ["3x8", "8:float64"], 1),
            (f"{path}:factory", [], 2),
        ):
            with self.subTest(spec):
                loaded = model.load(spec, inputs, 1)
                self.assertEqual(len(loaded.run()), outputs)
                again = model.load(spec, inputs, 1)
                for a, b in zip(loaded.run(), again.run()):
                    self.assertTrue(torch.equal(a, b), "the same seed gives the same model and inputs")
                first, second = loaded.draw(1), loaded.draw(2)
                a, b = model.flatten(first)[0], model.flatten(second)[0]
                self.assertEqual(a.shape, b.shape)
                self.assertFalse(torch.equal(a, b))
        self.assertIn("scale", model.load(f"{path}:factory").kwargs)

    def test_models_that_write_to_their_inputs(self):
        text = "import torch\ndef build():\n    def f(x):\n        x.add_(1)\n        return x * 2\n    return f, [torch.zeros(3)]\n"
        oracle = Oracle()
        oracle.load({"model": support.write_model(text)})
        reply = oracle.capture({})
        self.assertTrue(reply["equal"]["ok"])
        self.assertTrue(torch.equal(oracle.loaded.args[0], torch.zeros(3)))

    def test_half_precision_model_with_batch_norm(self):
        text = """
import torch
from torch import nn
def build():
    net = nn.Sequential(nn.Conv2d(3, 8, 3), nn.BatchNorm2d(8), nn.ReLU(), nn.Flatten(), nn.Linear(8 * 36, 5)).bfloat16()
    return net, [torch.randn(2, 3, 8, 8).bfloat16()]
"""
        oracle = Oracle()
        oracle.load({"model": support.write_model(text)})
        reply = oracle.capture({})
        self.assertTrue(reply["equal"]["ok"], reply["equal"])


class Errors(unittest.TestCase):
    def kind(self, text, spec="", **body):
        path = support.write_model(text) if text is not None else "/nowhere/model.py"
        with self.assertRaises(RequestError) as caught:
            oracle = Oracle()
            oracle.load({"model": path + spec, **body})
            oracle.capture({})
        return caught.exception

    def test_kinds(self):
        build = "import torch\ndef build():\n    return {}, [torch.randn(4)]\n"
        self.assertEqual(self.kind(None).kind, "file_not_found")
        missing = self.kind("import no_such_module_here\n")
        self.assertEqual((missing.kind, missing.facts["module"]), ("import_error", "no_such_module_here"))
        self.assertIn("interpreter", missing.facts)
        self.assertEqual(self.kind("x = = 1\n").kind, "import_error")
        self.assertEqual(self.kind("x = 1\n").kind, "no_model")
        self.assertEqual(self.kind("class Other: pass\n", ":Model").kind, "no_model")
        self.assertEqual(self.kind("1 / 0\n").kind, "model_raises")
        self.assertEqual(self.kind(build.format("(lambda x: x.nothing)")).kind, "model_raises")
        self.assertEqual(self.kind("import sys\ndef build():\n    sys.exit(3)\n").kind, "model_raises")
        self.assertEqual(self.kind(build.format("(lambda x: 3)")).kind, "not_tensor_output")
        self.assertEqual(self.kind(build.format("(lambda x: x / 0 * 0)")).kind, "non_finite")
        self.assertEqual(self.kind(build.format("(lambda x: x + torch.rand(4))")).kind, "not_deterministic")
        self.assertEqual(self.kind(NETWORK, ":Model", inputs=["3*8"]).kind, "no_model")

    def test_graph_breaks_are_named(self):
        text = """
import torch
def build():
    def f(x):
        y = x * 2
        if y.sum().item() > 1e9:
            y = y + 1
        return torch.relu(y) + 1
    return f, [torch.randn(4)]
"""
        oracle = Oracle()
        path = support.write_model(text)
        oracle.load({"model": path})
        reply = oracle.capture({})
        self.assertEqual(len(reply["graphs"]), 2)
        self.assertTrue(reply["equal"]["ok"])
        (found,) = [b for b in reply["breaks"] if b["file"]]
        self.assertEqual((found["file"], found["line"]), (path, 6))

    def test_a_function_that_is_left_out_is_named(self):
        text = """import torch
def build():
    def f(x):
        for _ in range(2):
            x = torch.relu(x) + 1
            print("hello")
        return x
    return f, [torch.randn(4)]
"""
        oracle = Oracle()
        path = support.write_model(text)
        with contextlib.redirect_stdout(io.StringIO()):
            oracle.load({"model": path})
            reply = oracle.capture({})
        self.assertEqual(reply["graphs"], [])
        self.assertEqual(reply["breaks"][0]["file"], path)


if __name__ == "__main__":
    unittest.main()
