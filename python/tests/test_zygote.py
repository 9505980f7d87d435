"""The zygote over a real socket, its children read through /proc/PID/mem as the parent reads them."""

from __future__ import annotations

import json
import os
import signal
import socket
import subprocess
import sys
import tempfile
import time
import unittest
from pathlib import Path

import torch

sys.path[:0] = [str(Path(__file__).parents[1]), str(Path(__file__).parent)]

import handmade as hm
from autokernel import tensors
from wall import wall

BRIDGE = Path(__file__).parents[1]

MODEL = '''
import torch
from handmade import Model as _Model, ROWS, WIDTH

class Model(_Model):
    pass

def get_inputs():
    return [torch.randn(ROWS, WIDTH)]
'''

BREAKS = '''
import torch
from handmade import Model as _Model, ROWS, WIDTH

class Model(_Model):
    def forward(self, x):
        y = super().forward(x)
        torch._dynamo.graph_break()
        return super().forward(y) + torch.sin(y)

def get_inputs():
    return [torch.randn(ROWS, WIDTH)]
'''


class Peer:
    """The parent's end of a connection."""

    def __init__(self, sock: socket.socket):
        self.sock, self.buffer, self.count = sock, b"", 0
        sock.settimeout(120)

    def request(self, op, fds=(), **body):
        self.count += 1
        line = json.dumps({"id": self.count, "op": op, **body}).encode() + b"\n"
        socket.send_fds(self.sock, [line], list(fds)) if fds else self.sock.sendall(line)
        while b"\n" not in self.buffer:
            data = self.sock.recv(1 << 16)
            if not data:
                raise ConnectionError(f"the peer is gone during {op}")
            self.buffer += data
        line, _, self.buffer = self.buffer.partition(b"\n")
        reply = json.loads(line)
        if "error" in reply:
            raise RuntimeError(reply["error"]["kind"] + ": " + reply["error"]["message"] + reply["error"].get("traceback", ""))
        assert reply["id"] == self.count
        return reply["ok"]


class Zygote(unittest.TestCase):
    shared: "Peer | None" = None

    @classmethod
    def tearDownClass(cls):
        if cls.shared is not None:
            cls.shared.sock.close()
            cls.shared_process.wait(20)

    def one(self) -> "Peer":
        """One zygote for the tests that only prepare and fork: importing torch is most of its cost."""
        if Zygote.shared is None:
            Zygote.shared = self.start(keep=True)
            Zygote.shared_process = self.process
        return Zygote.shared

    def setUp(self):
        folder = tempfile.TemporaryDirectory(prefix="autokernel-test-")
        self.addCleanup(folder.cleanup)
        self.folder = Path(folder.name)

    def start(self, keep: bool = False) -> Peer:
        ours, theirs = socket.socketpair()
        environment = {**os.environ, "PYTHONPATH": f"{BRIDGE}:{Path(__file__).parent}", "AUTOKERNEL_FD": str(theirs.fileno())}
        process = subprocess.Popen([sys.executable, "-B", "-m", "autokernel", "zygote"], env=environment, pass_fds=[theirs.fileno()])
        theirs.close()
        if not keep:
            self.addCleanup(process.wait, 20)
            self.addCleanup(ours.close)
        self.process = process
        return Peer(ours)

    def child(self, zygote: Peer) -> tuple[Peer, int]:
        ours, theirs = socket.socketpair()
        pid = zygote.request("fork", fds=[theirs.fileno()])["pid"]
        theirs.close()
        self.addCleanup(ours.close)
        return Peer(ours), pid

    def refresh(self, child: Peer, slots, sets, constants=()) -> None:
        """Gives slots (and groups their constant inputs) these tensors, from a memory file as the parent does."""
        content, ends = os.memfd_create("content"), [0]

        def put(item: torch.Tensor) -> int:
            at = ends[-1]
            data = item.contiguous().view(torch.uint8).numpy().tobytes() if item.numel() else b""
            os.pwrite(content, data, at)
            ends.append(at + len(data) + 64)
            return at

        body = {"slots": slots, "offsets": [[put(item) for item in inputs] for inputs in sets]}
        if constants:
            body["constants"] = [[put(item) for item in inputs] for inputs in constants]
        os.pwrite(content, b"\0", ends[-1])
        before = len(os.listdir(f"/proc/{self.pid}/fd"))
        self.assertEqual(child.request("refresh", fds=[content], **body), {"refreshed": len(slots)})
        self.assertEqual(len(os.listdir(f"/proc/{self.pid}/fd")), before, "the content stays open")
        os.close(content)

    def stage_region(self, child: Peer, region, sets) -> None:
        """As many groups as sets, a slot each."""
        constant = [item["constant"] for item in region["inputs"]]
        reply = child.request("stage", inputs=region["inputs"], groups=len(sets), slots=len(sets))
        self.assertEqual(reply, {"staged": len(sets)})
        split = [[[item for item, c in zip(inputs, constant) if c is wanted] for inputs in sets] for wanted in (False, True)]
        self.refresh(child, list(range(len(sets))), split[0], split[1])

    def read(self, pid: int, described) -> torch.Tensor:
        with open(f"/proc/{pid}/mem", "rb", buffering=0) as memory:
            memory.seek(described["address"])
            data = memory.read(described["bytes"])
        storage = torch.frombuffer(bytearray(data), dtype=tensors.DTYPES[described["dtype"]])
        return storage.as_strided(described["shape"], described["stride"])

    def region(self, how: str, region, plan, function, openmp=False) -> None:
        package = hm.make_package(self.folder / "p", "ours+eager")
        zygote = self.one()
        ready = zygote.request("prepare", subject={"kind": "region", "region": region, "how": how, "package": str(package)}, threads=2)
        self.assertEqual(ready["threads_alive"], 1)
        sets = [[torch.randn(item["meta"]["shape"]) for item in region["inputs"]] for _ in range(2)]
        for _ in range(2):  # two children of one zygote
            child, pid = self.child(zygote)
            self.pid = pid
            self.stage_region(child, region, sets)
            self.assertEqual(os.getpgid(pid), pid)
            if how == "package":
                with self.assertRaisesRegex(RuntimeError, "not_confined"):
                    child.request("batch", calls=[0])
                child.request("confine", **wall())
            calls = [1, 0, 1]
            replies = child.request("batch", calls=calls)["outputs"]
            os.killpg(pid, signal.SIGSTOP)
            threads = len(os.listdir(f"/proc/{pid}/task"))
            for which, outputs in zip(calls, replies):
                wanted = function(*sets[which])
                wanted = wanted if isinstance(wanted, tuple) else (wanted,)
                self.assertEqual(len(outputs), len(wanted))
                for described, expected in zip(outputs, wanted):
                    torch.testing.assert_close(self.read(pid, described), expected, rtol=1e-5, atol=1e-5)
            os.killpg(pid, signal.SIGCONT)
            addresses = [item["address"] for outputs in replies for item in outputs]
            self.assertEqual(len(set(addresses)), len(addresses))
            if openmp:
                self.assertEqual(threads, 2)
            self.assertEqual(child.request("release"), {})
            self.assertEqual(child.request("batch", calls=[0], addresses=False), {"done": 1})
            self.assertEqual(len(child.request("outputs")["outputs"]), 1)
            child.request("quit")

    def outputs(self, child: Peer, pid: int, calls) -> list[torch.Tensor]:
        child.request("release")
        child.request("batch", calls=calls, addresses=False)
        return [self.read(pid, outputs[0]) for outputs in child.request("outputs")["outputs"]]

    def test_new_content_in_the_same_places(self):
        """What a package prepares from constant inputs is honest about their changing; slots keep their memory."""
        region, plan = hm.doubled_region(), hm.doubled_plan()
        package = hm.make_package(self.folder / "p", "ours+eager", [(region, plan)])
        zygote = self.one()
        zygote.request("prepare", subject={"kind": "region", "region": region, "how": "package", "package": str(package)}, threads=1)
        child, self.pid = self.child(zygote)
        draw = lambda: torch.randn(hm.ROWS, hm.WIDTH)  # noqa: E731
        first, second, weight = draw(), draw(), torch.randn(hm.WIDTH)
        self.stage_region(child, region, [[first, weight]])
        child.request("confine", **wall())
        torch.testing.assert_close(self.outputs(child, self.pid, [0])[0], first * (weight * 2))
        self.assertEqual(child.request("stage", inputs=region["inputs"], groups=1, slots=3), {"staged": 3})
        self.refresh(child, [2, 0], [[first], [second]])
        changed = self.outputs(child, self.pid, [0, 2])
        torch.testing.assert_close(changed[0], second * (weight * 2))
        torch.testing.assert_close(changed[1], first * (weight * 2))
        other = torch.randn(hm.WIDTH)
        self.refresh(child, [], [], [[other]])
        torch.testing.assert_close(self.outputs(child, self.pid, [0])[0], second * (other * 2))

    def drawn(self, body: str) -> tuple[Peer, int]:
        (self.folder / "drawn.py").write_text("import torch\n" + body)
        zygote = self.one()
        zygote.request("prepare", subject={"kind": "model", "model": str(self.folder / "drawn.py"), "form": "eager", "seed": 1}, threads=1)
        return self.child(zygote)

    def test_draws_come_in_the_same_places(self):
        child, pid = self.drawn("def build():\n    return (lambda x: x + 0), (torch.randn(6, 7),)\n")
        self.assertFalse(child.request("stage", draws=[1, 2, 3])["fixed"])
        before = self.outputs(child, pid, [0, 1, 2])
        child.request("refresh", slots=[1, 2], seeds=[3, 9], plain=[True, False])
        after = self.outputs(child, pid, [0, 1, 2])
        self.assertTrue(torch.equal(after[0], before[0]) and torch.equal(after[1], before[2]))
        self.assertFalse(torch.equal(after[2], before[2]))

    def test_inputs_that_are_always_the_same_are_edited(self):
        for made, same in (("torch.linspace(-2, 3, 60)", False), ("torch.arange(60)", True)):
            with self.subTest(made):
                child, pid = self.drawn(f"def build():\n    return (lambda x: x + 0), ({made},)\n")
                self.assertTrue(child.request("stage", draws=[1, 2])["fixed"])
                child.request("refresh", slots=[0, 1], seeds=[5, 6], plain=[True, False])
                plain, edited = self.outputs(child, pid, [0, 1])
                self.assertFalse(torch.equal(plain, edited))
                self.assertEqual(plain.dtype, edited.dtype)
                if same:
                    self.assertTrue(torch.equal(plain.sort().values, edited.sort().values))
                else:
                    ratio = (edited / plain)[plain != 0]
                    self.assertTrue(bool(((ratio > 0.93) & (ratio <= 1)).all()) and ratio.std() > 0.01)

    def test_region_eager(self):
        self.region("eager", hm.rms_region(), hm.rms_plan(), hm.rms_norm)

    def test_region_package(self):
        self.region("package", hm.rms_region(), hm.rms_plan(), hm.rms_norm, openmp=True)

    def test_region_package_two_outputs(self):
        self.region("package", hm.gate_region(), hm.gate_plan(), hm.sum_and_gate, openmp=True)

    def test_region_inductor_with_two_threads(self):
        # Large enough for Inductor to write a parallel loop.
        region = hm.make_region(hm.sum_and_gate, [torch.randn(512, 512), torch.randn(512, 512)])
        self.region("inductor", region, None, hm.sum_and_gate, openmp=True)

    def model(self, form: str, text: str = MODEL) -> None:
        package = hm.make_package(self.folder / "p", "ours+eager")
        (self.folder / "model_file.py").write_text(text)
        spec = str(self.folder / "model_file.py")
        zygote = self.one()
        subject = {"kind": "model", "model": spec, "form": form, "package": str(package), "seed": 3}
        ready = zygote.request("prepare", subject=subject, threads=2)
        self.assertEqual(ready["threads_alive"], 1)
        if form.startswith("ours") and text is MODEL:
            self.assertEqual((ready["matched"], sum(ready["places"].values())), (2, 3))
        child, pid = self.child(zygote)
        staged = child.request("stage", draws=[3, 4])
        self.assertEqual((staged["staged"], staged["bytes"], staged["fixed"]), (2, 4 * hm.ROWS * hm.WIDTH, False))
        self.assertGreater(staged["seconds"], 0)
        if form.startswith("ours"):
            child.request("confine", **wall())
        started = time.perf_counter()
        replies = child.request("batch", calls=[0, 1])["outputs"]
        self.assertLess(time.perf_counter() - started, 2, "the child compiled again")
        sys.path.insert(0, str(BRIDGE))
        from autokernel import model as models

        loaded = models.load(spec, seed=3)
        for seed, outputs in zip((3, 4), replies):
            args, kwargs = loaded.draw(seed)
            with torch.no_grad():
                expected = loaded.module(*args, **kwargs)
            torch.testing.assert_close(self.read(pid, outputs[0]), expected, rtol=1e-5, atol=1e-5)

    def test_model_eager(self):
        self.model("eager")

    def test_model_compile(self):
        self.model("compile")

    def test_model_ours_eager(self):
        self.model("ours+eager")

    def test_model_ours_inductor(self):
        self.model("ours+inductor")

    def test_models_with_breaks_are_compiled_before_the_wall(self):
        # What comes after the break can be compiled only once the first part has run, and behind the wall
        # there is no compiler.
        for form in ("ours+eager", "ours+inductor"):
            with self.subTest(form):
                self.folder = Path(tempfile.mkdtemp(dir=self.folder))
                self.model(form, BREAKS)

    def test_a_wall_with_a_gap_is_refused(self):
        package = hm.make_package(self.folder / "p", "ours+eager")
        zygote = self.one()
        subject = {"kind": "region", "region": hm.rms_region(), "how": "package", "package": str(package)}
        zygote.request("prepare", subject=subject, threads=2)
        for gap, found in [("setpgid", "leave its group"), ("memfd_create", "make a memory file"), ("kill", "send signals")]:
            child, self.pid = self.child(zygote)
            self.stage_region(child, hm.rms_region(), [[torch.randn(item["meta"]["shape"]) for item in hm.rms_region()["inputs"]]])
            with self.assertRaisesRegex(RuntimeError, f"not_confined: a confined child can still {found}"):
                child.request("confine", **wall(without=gap))
            with self.assertRaisesRegex(RuntimeError, "not_confined"):
                child.request("batch", calls=[0])

    def test_children_die_with_the_zygote(self):
        zygote = self.start()
        zygote.request("prepare", subject={"kind": "region", "region": hm.rms_region(), "how": "eager"}, threads=1)
        _, first = self.child(zygote)
        _, second = self.child(zygote)
        os.kill(first, signal.SIGKILL)
        self.process.kill()
        self.process.wait(20)
        deadline = time.monotonic() + 10
        for pid in (first, second):
            while _alive(pid) and time.monotonic() < deadline:
                time.sleep(0.02)
            self.assertFalse(_alive(pid))

    def test_errors_have_kinds(self):
        zygote = self.start()
        ours, theirs = socket.socketpair()
        with self.assertRaisesRegex(RuntimeError, "protocol: fork before prepare"):
            zygote.request("fork", fds=[theirs.fileno()])
        with self.assertRaisesRegex(RuntimeError, "file_not_found"):
            zygote.request("prepare", subject={"kind": "model", "model": "nowhere.py", "form": "eager"}, threads=1)
        package = hm.make_package(self.folder / "p", "ours+eager")
        (package / "artefacts" / f"{hm.rms_region()['id']}.so").unlink()
        with self.assertRaisesRegex(RuntimeError, "unsuitable"):
            zygote.request("prepare", subject={"kind": "region", "region": hm.rms_region(), "how": "package", "package": str(package)}, threads=1)
        ours.close(), theirs.close()


def _alive(pid: int) -> bool:
    try:
        with open(f"/proc/{pid}/stat") as file:
            return file.read().rpartition(")")[2].split()[0] != "Z"
    except FileNotFoundError:
        return False


if __name__ == "__main__":
    unittest.main()
