"""Other sizes than the tuned ones: the right result, whatever runs."""

import sys
import unittest

import support
import torch

from autokernel import loaded
from autokernel.oracle import Oracle
from autokernel.put_back import PutBack

ZOO = support.ROOT / "fixtures" / "models"
sys.path.insert(0, str(ZOO))


def norms(graph):
    """Every normalisation by hand in a captured graph, as a region with its place."""
    nodes = {node["name"]: node for node in graph["nodes"]}
    users = {name: [n["name"] for n in graph["nodes"] if name in support.refs(n)] for name in nodes}
    found = []
    for name in (n for n in nodes if nodes[n]["target"] == "aten.pow.Tensor_Scalar"):
        chain = [name]
        while nodes[chain[-1]]["target"] != "aten.rsqrt.default" and users[chain[-1]]:
            chain.append(users[chain[-1]][0])
        chain += users[chain[-1]][:1]
        found.append(support.cut(graph, chain)[0])
    return found


def tuned(name):
    """A model of the zoo, its inputs, and the regions of its norms for just these inputs."""
    oracle = Oracle()
    oracle.load({"model": f"{ZOO / 'zoo.py'}:{name}", "inputs": [], "seed": 0})
    graphs = oracle.capture({})["graphs"]
    model = oracle.model()
    return model.module, model.fresh_inputs()[1], norms(graphs[0])


class Sizes(unittest.TestCase):
    def put_back(self, model, regions):
        attempt = PutBack(regions[:1])
        whole = loaded.wrap(model, attempt.compile(model), lambda: attempt, lambda copied: copied)
        return whole, attempt

    def test_another_batch_and_another_length(self):
        model, inputs, regions = tuned("llama")
        ours, attempt = self.put_back(model, regions)
        with torch.no_grad():
            torch.testing.assert_close(ours(**inputs).logits, model(**inputs).logits)
            places = attempt.places[0]
            self.assertGreaterEqual(places, 4)
            for shape in ((1, 32), (2, 7), (3, 1), (5, 40)):
                given = inputs | {"input_ids": torch.randint(3, 90, shape)}
                torch.testing.assert_close(ours(**given).logits, model(**given).logits)
            self.assertEqual(attempt.places[0], places, "a region stands only where its sizes are")
            torch.testing.assert_close(ours(**inputs).logits, model(**inputs).logits)

    def test_generate_gives_the_same_tokens(self):
        model, inputs, regions = tuned("llama_with_cache")
        model.generation_config.pad_token_id, model.generation_config.eos_token_id = 0, None
        ours, attempt = self.put_back(model, regions)
        for prompt in (inputs["input_ids"], torch.randint(3, 90, (1, 5)), torch.randint(3, 90, (2, 9))):
            options = {"max_new_tokens": 5, "do_sample": False, "attention_mask": torch.ones_like(prompt)}
            self.assertEqual(ours.generate(prompt, **options).tolist(), model.generate(prompt, **options).tolist())
        self.assertGreater(attempt.places[0], 0, "the prompt of the tuned size ran without its regions")

    def test_more_sizes_than_are_compiled_for(self):
        model = lambda x: torch.softmax(x * 2, -1) + 1  # noqa: E731
        ours, attempt = self.put_back(model, [])
        with torch.no_grad():
            for rows in range(1, 14):
                x = torch.randn(rows, 8)
                torch.testing.assert_close(ours(x), model(x))
        self.assertLess(len(attempt.replaced), 13)


if __name__ == "__main__":
    unittest.main()
