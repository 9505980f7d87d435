"""A loaded model is the user's own in everything but its speed."""

import copy
import importlib
import io
import os
import pickle
import subprocess
import sys
import tempfile
import unittest
import warnings
from pathlib import Path
from unittest import mock

import support

import handmade as hm
import torch
from torch import nn

from autokernel.package import open_package

FORMS = ("ours+eager", "ours+inductor")


class Registering(nn.Module):
    """A class that keeps a list of its subclasses, as model hubs do."""

    known = []

    def __init_subclass__(cls, *, needed, **kwargs):
        super().__init_subclass__(**kwargs)
        cls.known.append(cls)


class Registered(Registering, hm.Model, needed=True):
    def twice(self, x):
        return self(self(x))


class Base(unittest.TestCase):
    def setUp(self):
        torch._dynamo.reset()
        torch.manual_seed(1)
        folder = tempfile.TemporaryDirectory(prefix="autokernel-test-")
        self.addCleanup(folder.cleanup)
        self.folder = Path(folder.name)
        self.model = hm.Model()
        self.x = torch.randn(hm.ROWS, hm.WIDTH)

    def package(self, form):
        torch._dynamo.reset()
        return open_package(hm.make_package(self.folder / f"p{len(list(self.folder.iterdir()))}", form))

    def same(self, ours, theirs):
        torch.testing.assert_close(ours, theirs, rtol=1e-5, atol=1e-5)

    def places(self, loaded):
        return sum(loaded.autokernel_report().places.values())


class OwnInstance(Base):
    def test_class_names_and_attributes_are_the_users(self):
        model = self.model
        loaded = self.package("ours+eager").load(model)
        self.assertIsInstance(loaded, hm.Model)
        self.assertEqual(list(loaded.state_dict()), list(model.state_dict()))
        self.assertEqual([n for n, _ in loaded.named_modules()], [n for n, _ in model.named_modules()])
        self.assertIs(loaded.linear, model.linear)
        self.assertEqual(repr(loaded), repr(model))
        loaded.note = 3
        self.assertEqual(model.note, 3)
        loaded.eval()
        self.assertFalse(model.training or model.linear.training)
        model.train()
        self.assertTrue(loaded.training)

    def test_state_goes_through_files_both_ways(self):
        loaded, fresh = self.package("ours+eager").load(self.model), hm.Model()
        file = io.BytesIO()
        torch.save(loaded.state_dict(), file)
        file.seek(0)
        fresh.load_state_dict(torch.load(file))
        with torch.no_grad():
            self.same(loaded(self.x), fresh(self.x))
            for assign in (False, True):
                other = hm.Model()
                loaded.load_state_dict(other.state_dict(), assign=assign)
                self.same(loaded(self.x), other(self.x))
        self.assertEqual(self.places(loaded), 3)

    def test_methods_that_call_the_model_run_the_kernels(self):
        model = Registered()
        known = list(Registering.known)
        loaded = self.package("ours+eager").load(model)
        self.assertEqual(Registering.known, known, "a subclass of the user's class was registered")
        with torch.no_grad():
            self.same(loaded.twice(self.x), model.twice(self.x))
        self.assertEqual(self.places(loaded), 3)

    def test_copies_and_pickles(self):
        loaded = self.package("ours+eager").load(self.model)
        with torch.no_grad():
            twin = copy.deepcopy(loaded)
            twin.first.mul_(3)
            self.same(loaded(self.x), self.model(self.x))
            self.assertFalse(torch.allclose(twin(self.x), loaded(self.x)))
            self.assertEqual(self.places(twin), 3)
            plain = pickle.loads(pickle.dumps(loaded))
            self.assertIs(type(plain), hm.Model)
            self.same(plain(self.x), loaded(self.x))

    def test_loading_again_takes_the_place_of_the_first(self):
        package = self.package("ours+eager")
        once = package.load(self.model)
        again = package.load(once)
        self.assertIs(type(again)._autokernel_original, self.model)
        add = lambda x: self.model(x) + 1  # noqa: E731
        self.assertIs(package.load(package.load(add))._autokernel_original, add)
        with torch.no_grad():
            self.same(again(self.x), self.model(self.x))

    def test_a_module_of_slots_or_under_its_own_compile(self):
        class Closed(hm.Model):
            def __init_subclass__(cls, **_):
                raise TypeError("sealed")

        package = self.package("ours+eager")
        with torch.no_grad():
            self.same(package.load(closed := Closed())(self.x), closed(self.x))
            compiled = hm.Model()
            compiled.compile(backend="eager")
            with self.assertWarnsRegex(UserWarning, "model.compile"):
                loaded = package.load(compiled)
            self.same(loaded(self.x), hm.Model.forward(compiled, self.x))
            self.assertEqual(self.places(loaded), 3)
            with self.assertWarnsRegex(UserWarning, "under torch.compile already"):
                loaded = package.load(torch.compile(self.model, backend="eager"))
            self.same(loaded(self.x), self.model(self.x))
            self.assertEqual(self.places(loaded), 3)

    def test_an_exported_program_and_a_script(self):
        package = self.package("ours+eager")
        with torch.no_grad():
            loaded = package.load(torch.export.export(self.model.eval(), (self.x,)))
            self.same(loaded(self.x), self.model(self.x))
            self.assertEqual(self.places(loaded), 3)
            with warnings.catch_warnings():
                warnings.simplefilter("ignore")  # PyTorch would rather have something newer
                scripted = torch.jit.trace(self.model, self.x)
            with self.assertWarnsRegex(UserWarning, "TorchScript"):
                self.assertIs(package.load(scripted), scripted)


class NeverStale(Base):
    def changes(self):
        def replaced(m):
            m.first = nn.Parameter(torch.rand(hm.WIDTH))

        def data(m):
            m.second.data = torch.rand(hm.WIDTH)

        def data_in_place(m):
            m.second.data.mul_(0.5)

        def module(m):
            m.linear = nn.Linear(hm.WIDTH, hm.WIDTH)

        def there_and_back(m):
            m.half().float()

        def step(m):
            optimizer = torch.optim.SGD(m.parameters(), lr=0.1)
            with torch.enable_grad():
                m(self.x).pow(2).mean().backward()
            optimizer.step()

        def parametrised(m):
            nn.utils.parametrizations.weight_norm(m.linear)

        def frozen(m):
            m.requires_grad_(False)

        return (replaced, data, data_in_place, module, there_and_back, step, parametrised, frozen)

    def test_weights(self):
        for form in FORMS:
            package = self.package(form)
            for on_loaded in (False, True):
                model = hm.Model()
                loaded = package.load(model)
                with torch.no_grad():
                    loaded(self.x)
                    for change in self.changes():
                        with self.subTest(form=form, change=change.__name__, on_loaded=on_loaded):
                            before = model(self.x)
                            change(loaded if on_loaded else model)
                            self.same(loaded(self.x), model(self.x))
                            if change.__name__ != "frozen" and change.__name__ != "parametrised":
                                self.assertFalse(torch.equal(before, model(self.x)))
                self.assertEqual(loaded.autokernel_report().fallbacks, [])

    def test_types_and_modes(self):
        for form in FORMS:
            loaded = self.package(form).load(self.model)
            with torch.no_grad():
                loaded(self.x)
                loaded.double()
                self.assertEqual(loaded(self.x.double()).dtype, torch.float64)
                torch.testing.assert_close(loaded(self.x.double()), self.model(self.x.double()))
                loaded.float()
                self.same(loaded(self.x), self.model(self.x))
            with torch.inference_mode():
                self.same(loaded(self.x), self.model(self.x))
            with torch.no_grad(), torch.autocast("cpu", torch.bfloat16):
                torch.testing.assert_close(loaded(self.x), self.model(self.x), rtol=2e-2, atol=2e-2)

    def test_dropout_follows_train_and_eval(self):
        class Dropping(hm.Model):
            def forward(self, x):
                return nn.functional.dropout(super().forward(x), 0.5, self.training)

        model = Dropping()
        loaded = self.package("ours+eager").load(model)
        with torch.no_grad():
            for change, zeros in ((model.eval, False), (model.train, True), (loaded.eval, False), (loaded.train, True)):
                change()
                self.assertEqual(bool((loaded(self.x) == 0).any()), zeros)


class Training(Base):
    def run_steps(self, call, model):
        optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
        losses = []
        for number in range(3):
            x = torch.randn(hm.ROWS, hm.WIDTH, generator=torch.Generator().manual_seed(number))
            optimizer.zero_grad()
            loss = call(x).pow(2).mean()
            loss.backward()
            optimizer.step()
            losses.append(loss.item())
        return losses

    def test_three_steps_match_eager(self):
        for form in FORMS:
            with self.subTest(form):
                eager, ours = copy.deepcopy(self.model), copy.deepcopy(self.model)
                loaded = self.package(form).load(ours)
                with torch.no_grad():
                    loaded(self.x)  # the kernels' graph is there before the training one
                expected, found = self.run_steps(eager, eager), self.run_steps(loaded, loaded)
                torch.testing.assert_close(torch.tensor(found), torch.tensor(expected), rtol=1e-4, atol=1e-5)
                for a, b in zip(ours.parameters(), eager.parameters(), strict=True):
                    torch.testing.assert_close(a, b, rtol=1e-3, atol=1e-4)
                with torch.no_grad():
                    self.same(loaded(self.x), ours(self.x))
                self.assertEqual(loaded.autokernel_report().fallbacks, [])


class Composing(Base):
    def test_an_outer_compile_is_told(self):
        loaded = self.package("ours+eager").load(self.model)
        for outer in (loaded, lambda x: loaded(x) * 1, self.package("ours+eager").load(lambda x: self.model(x))):
            torch._dynamo.reset()
            with torch.no_grad(), self.assertWarnsRegex(UserWarning, "outer torch.compile.*backend"):
                self.same(torch.compile(outer, backend="eager", fullgraph=True)(self.x), self.model(self.x))

    def test_as_a_backend(self):
        for form in (*FORMS, "compile", "eager"):
            with self.subTest(form), torch.no_grad():
                package = self.package(form)
                backend = package.backend()
                compiled = torch.compile(self.model, backend=backend, fullgraph=True)
                self.same(compiled(self.x), self.model(self.x))
                if form in FORMS:
                    self.assertIn("matched 2 of 2", str(backend.autokernel_report()))
                for rows in (5, 7, hm.ROWS):  # dynamic sizes are the user's choice here
                    x = torch.randn(rows, hm.WIDTH)
                    self.same(compiled(x), self.model(x))
        with mock.patch.dict(os.environ, AUTOKERNEL_DISABLE="1"), torch.no_grad():
            torch._dynamo.reset()
            off = self.package("ours+eager").backend()
            self.same(torch.compile(self.model, backend=off)(self.x), self.model(self.x))
            self.assertEqual(off.autokernel_report().graphs, 0)

    def test_by_name_once_a_package_is_imported(self):
        for name in ("named_one", "named_two"):
            hm.make_package(self.folder / name, "ours+eager")
        script = (
            "import sys, torch; sys.path[:0] = sys.argv[1:3]\n"
            "import handmade as hm\n"
            "import named_one, named_two\n"
            "torch.manual_seed(0); model, x = hm.Model(), torch.randn(hm.ROWS, hm.WIDTH)\n"
            "compiled = torch.compile(model, backend='autokernel')\n"
            "from torch.profiler import profile\n"
            "with torch.no_grad():\n"
            "    torch.testing.assert_close(compiled(x), model(x), rtol=1e-5, atol=1e-5)\n"
            "    with profile() as ours: compiled(x)\n"
            "    with profile() as eager: model(x)\n"
            "count = lambda p: sum(e.name == 'aten::rsqrt' for e in p.events())\n"
            "print(count(ours), count(eager))\n"
        )
        tests = str(Path(__file__).parent)
        paths = os.pathsep.join([tests, str(support.ROOT / "python")])
        done = subprocess.run(
            [sys.executable, "-B", "-c", script, str(self.folder), tests],
            capture_output=True, text=True, cwd="/", env={**os.environ, "PYTHONPATH": paths},
        )
        self.assertEqual(done.returncode, 0, done.stderr)
        self.assertEqual(done.stdout.split(), ["0", "2"], "the norms' own operators ran although kernels stand for them")

    def test_another_process_needs_no_more_than_the_folder(self):
        hm.make_package(self.folder / "sent", "ours+eager")
        sys.path.insert(0, str(self.folder))
        self.addCleanup(sys.path.remove, str(self.folder))
        sent = importlib.import_module("sent")
        with torch.no_grad(), warnings.catch_warnings():
            warnings.simplefilter("error")
            self.same(sent.load(self.model)(self.x), self.model(self.x))
            torch._dynamo.reset()
            self.same(torch.compile(self.model, backend=sent.backend())(self.x), self.model(self.x))


if __name__ == "__main__":
    unittest.main()
