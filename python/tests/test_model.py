"""Ways to name a model, and what goes wrong with it."""

import contextlib
import io
import unittest
from pathlib import Path

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

    def test_positional_and_keyword_inputs_together(self):
        path = support.write_model(NETWORK + "def both():\n    return Model(), ((torch.randn(2, 8),), {'scale': torch.randn(8)})\n")
        loaded = model.load(f"{path}:both")
        self.assertEqual((len(loaded.args), list(loaded.kwargs)), (1, ["scale"]))
        # Two positional inputs of which one is a dict are no such pair.
        self.assertEqual(model._as_call([(1,), {"a": 2}]), (((1,), {"a": 2}), {}))

    def test_ranges_of_inputs(self):
        path = support.write_model(NETWORK)
        loaded = model.load(f"{path}:function", ["4000:int64:5..9", "4000:float32:-2.5..-1"])
        ids, values = loaded.args
        self.assertEqual(sorted(set(ids.tolist())), [5, 6, 7, 8])
        self.assertTrue(-2.5 <= values.min() < -2.4 and -1.1 < values.max() <= -1)
        for bad in ("4:int64:9..5", "4:int64:5", "4:int64:a..b"):
            with self.assertRaisesRegex(RequestError, "LOW..HIGH|holds nothing"):
                model.load(f"{path}:function", [bad])

    def program(self, *example, **kwargs):
        torch.manual_seed(0)
        net = torch.nn.Sequential(torch.nn.Linear(8, 8), torch.nn.BatchNorm1d(8), torch.nn.GELU()).eval()
        path = Path(support.write_model("")).with_suffix(".pt2")
        torch.export.save(torch.export.export(net, example, **kwargs), str(path))
        return net, str(path)

    def test_exported_programs(self):
        x = torch.randn(4, 8)
        net, path = self.program(x)
        oracle = Oracle()
        self.assertEqual(oracle.load({"model": path})["name"], Path(path).stem)
        self.assertTrue(torch.equal(oracle.loaded.args[0], x), "the first draw is the program's own example")
        self.assertTrue(oracle.capture({})["equal"]["ok"])
        torch.testing.assert_close(oracle.loaded.run()[0], net(x))
        (other,) = oracle.loaded.draw(1)[0]
        self.assertFalse(torch.equal(other, x))
        self.assertTrue(torch.equal(other.flatten().sort()[0], x.flatten().sort()[0]))
        # A program with a free batch takes inputs that the user names.
        _, path = self.program(x, dynamic_shapes=({0: torch.export.Dim("batch")},))
        self.assertEqual(model.load(path, ["7x8"]).run()[0].shape, (7, 8))

    def test_what_is_no_program(self):
        path = str(Path(support.write_model("not a zip")).with_suffix(".pt2"))
        for kind in ("file_not_found", "no_model"):
            with self.assertRaises(RequestError) as caught, self.assertNoLogs("autokernel"):
                model.load(path)
            self.assertEqual(caught.exception.kind, kind)
            Path(path).write_text("not a zip")

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

    def test_a_class_that_needs_arguments(self):
        text = "import torch\nclass Net(torch.nn.Module):\n    def __init__(self, width, *, depth):\n        super().__init__()\n"
        error = self.kind(text, ":Net", inputs=["3x8"])
        self.assertEqual(error.kind, "no_model")
        self.assertRegex(str(error), "`Net` needs width, depth.*get_init_inputs")

    def test_a_model_that_raises_on_its_second_call(self):
        text = """
import torch
class Once(torch.nn.Module):
    used = False
    def forward(self, x):
        if self.used:
            raise RuntimeError("only once")
        self.used = True
        return x * 2
def build():
    return Once(), [torch.randn(4)]
"""
        error = self.kind(text)
        self.assertEqual(error.kind, "model_raises")
        self.assertIn("only once", str(error))

    def test_a_model_whose_state_is_in_its_output(self):
        text = """
import torch
class Counting(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.register_buffer("calls", torch.zeros(()))
    def forward(self, x):
        self.calls += 1
        return x * self.calls
def build():
    return Counting(), [torch.randn(4)]
"""
        self.assertEqual(self.kind(text).kind, "not_deterministic")

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
