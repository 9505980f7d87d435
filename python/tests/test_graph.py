"""The graphs of the examples: well formed, the model itself, and cut into regions that compute the same."""

import json
import unittest

import support
import torch

from autokernel import region as regions
from autokernel import tensors

SIMPLE_KINDS = {"int": int, "float": (int, float, str), "bool": bool, "str": str, "opaque": str, "dtype": str}


class Graphs(unittest.TestCase):
    def check_arg(self, arg, before):
        if arg == "none":
            return
        self.assertEqual(len(arg), 1, arg)
        ((kind, value),) = arg.items()
        if kind == "ref":
            self.assertIn(value, before)
        elif kind == "list":
            for item in value:
                self.check_arg(item, before)
        else:
            self.assertIsInstance(value, SIMPLE_KINDS[kind])

    def check_value(self, value):
        if value == "other":
            return
        metas = [value["tensor"]] if "tensor" in value else [m for m in value["tuple"] if m]
        for meta in metas:
            self.assertEqual(set(meta), {"dtype", "shape", "stride"})
            self.assertIn(meta["dtype"], tensors.DTYPES)
            self.assertEqual(len(meta["shape"]), len(meta["stride"]))

    def test_examples_are_well_formed_and_equal(self):
        for name in support.EXAMPLES:
            with self.subTest(name):
                _, reply = support.captured(name)
                json.dumps(reply, allow_nan=False)
                self.assertEqual(reply["breaks"], [])
                self.assertTrue(reply["equal"]["ok"])
                (graph,) = reply["graphs"]
                self.assertEqual(graph["schema"], "autokernel.graph/1")
                before = set()
                for node in graph["nodes"]:
                    for arg in [*node["args"], *(arg for _, arg in node["kwargs"])]:
                        self.check_arg(arg, before)
                    self.check_value(node["value"])
                    self.assertNotIn(node["name"], before)
                    before.add(node["name"])
                self.assertEqual([n["kind"] for n in graph["nodes"]].count("output"), 1)
                self.assertEqual(graph["nodes"][-1]["kind"], "output")

    def test_parameters_and_buffers_are_constant(self):
        _, reply = support.captured("llama_block")
        flags = [n["constant"] for n in reply["graphs"][0]["nodes"] if n["kind"] == "placeholder"]
        self.assertEqual(flags.count(False), 1)
        self.assertEqual(len(flags), 12)

    def test_library_operators_stay_whole(self):
        _, reply = support.captured("llama_block")
        targets = [n["target"] for n in reply["graphs"][0]["nodes"]]
        self.assertEqual(targets.count("aten.linear.default"), 7)
        self.assertEqual(targets.count("aten.scaled_dot_product_attention.default"), 1)
        self.assertNotIn("aten.alias.default", targets)

    def test_a_whole_graph_as_a_region_is_the_model(self):
        for name in support.EXAMPLES:
            with self.subTest(name):
                oracle, reply = support.captured(name)
                graph = reply["graphs"][0]
                region, occurrence = support.cut(graph, support.all_calls(graph))
                values = oracle.graphs[0].values(0, occurrence["inputs"])
                given = [values[n] for n in occurrence["inputs"]]
                (expected,) = oracle.loaded.run()
                (result,) = regions.run(region, given)
                self.assertTrue(torch.equal(result, expected))
                with torch.no_grad():
                    (compiled,) = regions.to_graph_module(region)(*given)
                self.assertTrue(torch.equal(compiled, expected))

    def test_profile_covers_the_model(self):
        oracle, reply = support.captured("new_activation")
        profile = oracle.profile({"repeats": 3})
        names = {n["name"] for n in reply["graphs"][0]["nodes"] if n["kind"] == "call"}
        self.assertEqual(set(profile["graphs"][0]["nodes"]), names)
        self.assertGreater(profile["total_us"], 0)


class Names(unittest.TestCase):
    def test_operators_round_trip(self):
        for name in ("aten.mul.Tensor", "aten.linear.default", "getitem", "aten.pow.Tensor_Scalar", "prims.convert_element_type.default"):
            self.assertEqual(regions.operator_name(regions.operator(name)), name)

    def test_tensor_files_keep_strides(self):
        from pathlib import Path

        for tensor in (
            torch.randn(3, 4).t(),
            torch.randn(5, 1).expand(5, 7),
            torch.randn(6, 8)[1::2, 2:5],
            torch.randn(4).bfloat16(),
            torch.tensor(3),
            torch.empty(0, 3),
            torch.tensor([True, False]),
        ):
            file = tensors.write(tensor, Path(support._folder()) / "tensor")
            back = tensors.read(file)
            self.assertEqual(back.stride(), tensor.stride())
            self.assertTrue(torch.equal(back, tensor))


if __name__ == "__main__":
    unittest.main()
