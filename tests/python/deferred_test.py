"""Tests that a module made under tessera.deferred_init has the values of eager construction, whatever its
initialisation does with its tensors."""

import unittest

import tessera
import torch


def skips_meta(tensor):
    """Skips tensors without memory, as the functions of some libraries do."""
    if not tensor.is_meta:
        torch.nn.init.normal_(tensor)


def skips_device(tensor):
    if tensor.device.type != "meta":
        torch.nn.init.uniform_(tensor)


def needs_cpu(tensor):
    if tensor.is_cpu:
        torch.nn.init.normal_(tensor)


def by_elements(tensor):
    torch.nn.init.uniform_(tensor)
    with torch.no_grad():
        tensor[0, 0] = sum(tensor[0].tolist())


INITIALISATIONS = {
    "trunc_normal_, nothing drawn again": lambda tensor: torch.nn.init.trunc_normal_(tensor, std=0.02),
    "trunc_normal_, much drawn again": lambda tensor: torch.nn.init.trunc_normal_(tensor, std=1.0, a=-0.5, b=1.0),
    "trunc_normal_, by rejection": lambda tensor: torch.nn.init.trunc_normal_(tensor, std=1.0, a=2.0, b=3.0),
    "kaiming_uniform_": torch.nn.init.kaiming_uniform_, "orthogonal_": torch.nn.init.orthogonal_,
    "skips meta": skips_meta, "skips the device meta": skips_device, "needs the CPU": needs_cpu, "reads elements": by_elements}


class DeferredTest(unittest.TestCase):
    def test_every_initialisation_gives_the_values_of_eager_construction(self):
        for name, initialise in INITIALISATIONS.items():
            with self.subTest(name):
                def make():
                    torch.manual_seed(7)
                    model = torch.nn.Sequential(torch.nn.Linear(33, 20), torch.nn.Linear(20, 3))
                    for layer in model:
                        initialise(layer.weight)
                    return model

                eager = make()
                with tessera.deferred_init():
                    deferred = make()
                engine = tessera.Engine(deferred, {})
                state = engine.state_dict()
                for key, value in eager.state_dict().items():
                    self.assertTrue(torch.equal(state[key], value), f"{name}: {key}")
                engine.close()

    def test_a_tensor_of_the_device_meta_stays_one(self):
        real, meta = torch.ones(2), torch.ones(2, device="meta")
        with tessera.deferred_init():
            deferred = torch.ones(2)
            self.assertEqual((real.is_meta, meta.is_meta, deferred.is_meta), (False, True, False))
            self.assertEqual((real.device.type, meta.device.type, deferred.device.type), ("cpu", "meta", "cpu"))


if __name__ == "__main__":
    unittest.main()
