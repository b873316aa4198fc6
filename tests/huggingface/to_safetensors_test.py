"""Tests scripts/to_safetensors.py on files of torch.save, of transformers, of DCP, and of DeepSpeed's layout.

DeepSpeed's files are made here, in the layout that its converter to fp32 reads. DeepSpeed itself is not run.
"""

import contextlib
import dataclasses
import importlib.util
import io
import os
import pathlib
import pickle
import subprocess
import sys
import tempfile
import types
import unittest
import unittest.mock

import torch

sys.path.append(str(pathlib.Path(__file__).resolve().parents[1] / "support"))
from patience import patient  # noqa: E402

ROOT = pathlib.Path(__file__).resolve().parent.parent.parent
SCRIPT = ROOT / "scripts" / "to_safetensors.py"
specification = importlib.util.spec_from_file_location("to_safetensors", SCRIPT)
to_safetensors = importlib.util.module_from_spec(specification)
specification.loader.exec_module(to_safetensors)

try:
    from safetensors.torch import load_file
except ImportError:
    load_file = None


def some_state():
    generator = torch.Generator().manual_seed(1)
    state = {"embed.weight": torch.randn(7, 5, generator=generator), "norm.bias": torch.randn(5, generator=generator),
             "half": torch.randn(3, 2, generator=generator).to(torch.bfloat16), "steps": torch.tensor(4), "one": torch.randn((), generator=generator)}
    state["head.weight"] = state["embed.weight"]
    return state


class RunsAProgram:
    """An object that writes a file if it is unpickled carelessly."""

    def __init__(self, path):
        self.path = path

    def __reduce__(self):
        return pathlib.Path.write_text, (pathlib.Path(self.path), "run")


class LossScaler:
    __module__ = "deepspeed.runtime.fp16.loss_scaler"


@unittest.skipIf(load_file is None, "no safetensors. hint: scripts/setup --tests")
class ToSafetensors(unittest.TestCase):
    def setUp(self):
        self.folder = pathlib.Path(self.enterContext(tempfile.TemporaryDirectory()))

    def convert(self, source, *options, code=0):
        target = self.folder / "out.safetensors"
        target.unlink(missing_ok=True)
        got, said = self.run_script(source, target, *options)
        self.assertEqual(got, code, said)
        self.said = said
        return said if code else load_file(target)

    def run_script(self, *arguments):
        """Runs the script in this process, since most of the time goes to the import of torch."""
        said = io.StringIO()
        with contextlib.redirect_stderr(said), contextlib.redirect_stdout(io.StringIO()), unittest.mock.patch.object(
                sys, "argv", [str(SCRIPT), *map(str, arguments)]):
            return to_safetensors.main(), said.getvalue()

    def expect_same(self, got, wanted):
        self.assertEqual(sorted(got), sorted(wanted))
        for name, tensor in wanted.items():
            self.assertEqual(got[name].dtype, tensor.dtype, name)
            self.assertTrue(torch.equal(got[name], tensor), name)

    def test_torch_save_files_are_converted(self):
        state = some_state()
        torch.save(state, self.folder / "a.pt")
        self.expect_same(self.convert(self.folder / "a.pt"), state)
        self.assertEqual(self.said, "")
        torch.save({"model": state, "epoch": 3, "optimizer": {"lr": 1.0}}, self.folder / "b.pt")
        self.expect_same(self.convert(self.folder / "b.pt"), state)
        self.assertIn("b.pt: epoch, optimizer", self.said)
        torch.save({"model": {**state, "_extra": 5}}, self.folder / "d.pt")
        self.expect_same(self.convert(self.folder / "d.pt"), state)
        self.assertIn("model: _extra", self.said)
        torch.save({"net": {f"module.{name}": each for name, each in state.items()}, "x": 1}, self.folder / "c.pt")
        self.assertIn("--key", self.convert(self.folder / "c.pt", code=65))
        self.expect_same(self.convert(self.folder / "c.pt", "--key", "net", "--prefix", "module."), state)
        self.convert(self.folder / "a.pt", "--prefix", "norm.")
        self.assertIn("head.weight", self.said)
        narrow = self.convert(self.folder / "a.pt", "--dtype", "bf16")
        self.assertEqual({each.dtype for name, each in narrow.items() if name != "steps"}, {torch.bfloat16})

    def test_transformers_folders_are_converted(self):
        state = some_state()
        names = sorted(state)
        (self.folder / "m").mkdir()
        torch.save({name: state[name] for name in names[:2]}, self.folder / "m" / "pytorch_model-1.bin")
        torch.save({name: state[name] for name in names[2:]}, self.folder / "m" / "pytorch_model-2.bin")
        index = self.folder / "m" / "pytorch_model.bin.index.json"
        index.write_text('{"weight_map": {"a": "pytorch_model-1.bin", "b": "pytorch_model-2.bin"}}')
        self.expect_same(self.convert(self.folder / "m"), state)
        # Two files contain the same name.
        for value, code in ((state[names[0]], 0), (state[names[0]] + 1, 65)):
            torch.save({name: state[name] for name in names[2:]} | {names[0]: value}, self.folder / "m" / "pytorch_model-2.bin")
            got = self.convert(self.folder / "m", code=code)
            self.assertIn("other values", got) if code else self.expect_same(got, state)
        index.write_text('{"weight_map": {"a": "../m/pytorch_model-1.bin"}}')
        self.assertIn("this folder", self.convert(self.folder / "m", code=65))

    def test_dcp_checkpoint_is_converted(self):
        import torch.distributed.checkpoint as dcp
        state = some_state()
        del state["head.weight"]
        dcp.save({"model": state, "note": "text"}, checkpoint_id=self.folder / "dcp", no_dist=True)
        self.expect_same(self.convert(self.folder / "dcp", "--prefix", "model."), state)
        self.assertIn("note", self.said)

    def test_dcp_checkpoint_of_several_ranks_is_converted(self):
        # The process ends by itself after everything is saved. PyTorch 2.11's Gloo group sometimes aborts when it is
        # destroyed ("terminate called without an active exception", one run in twenty on two cores).
        program = ("import os, sys, torch, torch.distributed as dist, torch.distributed.checkpoint as dcp\n"
                   "from torch.distributed.tensor import distribute_tensor, init_device_mesh, Shard\n"
                   "dist.init_process_group('gloo')\n"
                   "mesh = init_device_mesh('cpu', (2,))\n"
                   "whole = torch.arange(35.).view(7, 5)\n"
                   "dcp.save({'w': distribute_tensor(whole, mesh, [Shard(0)])}, checkpoint_id=sys.argv[1])\n"
                   "dist.barrier()\n"
                   "os._exit(0)\n")
        (self.folder / "save.py").write_text(program)
        subprocess.run([sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2", self.folder / "save.py", self.folder / "two"],
                       check=True, capture_output=True, timeout=patient(120), env={**os.environ, "OMP_NUM_THREADS": "1"})
        self.expect_same(self.convert(self.folder / "two"), {"w": torch.arange(35.).view(7, 5)})
        # The pieces have the right number of elements, but they overlap and leave a hole.
        metadata = pickle.loads((self.folder / "two" / ".metadata").read_bytes())
        metadata.storage_data = {dataclasses.replace(index, offset=torch.Size([1, 0])) if index.offset[0] else index: info
                                 for index, info in metadata.storage_data.items()}
        (self.folder / "two" / ".metadata").write_bytes(pickle.dumps(metadata))
        self.assertIn("does not fit the others", self.convert(self.folder / "two", code=65))

    def test_deepspeed_checkpoint_is_converted(self):
        generator = torch.Generator().manual_seed(2)
        wanted = {name: torch.randn(shape, generator=generator) for name, shape in
                  {"a.weight": (5, 3), "a.bias": (5,), "b.weight": (2, 7)}.items()}
        shapes = [{"a.weight": (5, 3), "b.weight": (2, 7)}, {"a.bias": (5,)}]
        for module in ("deepspeed", "deepspeed.runtime", "deepspeed.runtime.fp16", "deepspeed.runtime.fp16.loss_scaler"):
            sys.modules[module] = types.ModuleType(module)
            self.addCleanup(sys.modules.pop, module)
        sys.modules["deepspeed.runtime.fp16.loss_scaler"].LossScaler = LossScaler
        for stage in (2, 3):
            with self.subTest(stage=stage):
                folder = self.folder / f"stage{stage}" / "global_step10"
                folder.mkdir(parents=True)
                (folder.parent / "latest").write_text("global_step10")
                model = {"param_shapes": shapes, "module": {"running": torch.ones(3)}, "buffer_names": ["running"],
                         "shared_params": {"tied.weight": "a.weight"}}
                world = 2
                for rank in range(world):
                    if stage == 2:
                        flats = []
                        for group in shapes:
                            flat = torch.cat([wanted[name].flatten() for name in group])
                            flat = torch.nn.functional.pad(flat, (0, -flat.numel() % (2 * world)))
                            flats.append(flat.chunk(world)[rank].clone())
                        optim = {"single_partition_of_fp32_groups": flats}
                    else:
                        flats = []
                        for group in shapes:
                            parts = []
                            for name in group:
                                part = -(-wanted[name].numel() // world)
                                flat = torch.nn.functional.pad(wanted[name].flatten(), (0, part * world - wanted[name].numel()))
                                parts.append(flat[rank * part:(rank + 1) * part])
                            flats.append(torch.cat(parts))
                        optim = {"fp32_flat_groups": flats}
                    optim["loss_scaler"] = LossScaler()
                    torch.save({"optimizer_state_dict": optim}, folder / f"bf16_zero_pp_rank_{rank}_mp_rank_00_optim_states.pt")
                    if stage == 3:
                        torch.save(model, folder / f"zero_pp_rank_{rank}_mp_rank_00_model_states.pt")
                if stage == 2:
                    torch.save(model, folder / "mp_rank_00_model_states.pt")
                all_wanted = {**wanted, "running": torch.ones(3), "tied.weight": wanted["a.weight"]}
                self.expect_same(self.convert(folder.parent), all_wanted)
                self.expect_same(self.convert(folder), all_wanted)
                self.assertEqual(self.said, "")
                (folder / "bf16_zero_pp_rank_0_mp_rank_00_optim_states.pt").unlink()
                self.assertIn("missing", self.convert(folder, code=66))

    def test_pickles_are_not_run(self):
        marker = self.folder / "marker"
        torch.save({"a": torch.ones(2), "b": RunsAProgram(marker)}, self.folder / "evil.pt")
        self.assertIn("without running", self.convert(self.folder / "evil.pt", code=65))
        (self.folder / "dcp").mkdir()
        (self.folder / "dcp" / ".metadata").write_bytes(pickle.dumps(RunsAProgram(marker)))
        self.convert(self.folder / "dcp", code=65)
        self.assertFalse(marker.exists())

    def test_missing_damaged_and_existing_files_are_refused(self):
        self.convert(self.folder / "none.pt", code=66)
        (self.folder / "empty").mkdir()
        self.convert(self.folder / "empty", code=66)
        torch.save(some_state(), self.folder / "a.pt")
        (self.folder / "model.safetensors").write_text("kept")
        self.assertEqual(self.run_script(self.folder / "a.pt", self.folder)[0], 73)
        self.assertEqual((self.folder / "model.safetensors").read_text(), "kept")
        (self.folder / "cut.pt").write_bytes((self.folder / "a.pt").read_bytes()[:300])
        self.convert(self.folder / "cut.pt", code=65)


if __name__ == "__main__":
    unittest.main()
