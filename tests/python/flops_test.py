"""Tests that StepResult.flop is the number that torch.utils.flop_counter counts for the same forward and backward, on
many architectures."""

import unittest

import tessera
import torch
from architectures import OF_TORCHVISION, OTHERS, SAMPLE
from launched import LONG
from torch import nn
from torch.utils.checkpoint import checkpoint
from torch.utils.flop_counter import FlopCounterMode

ARCHITECTURES = {**SAMPLE, **OTHERS, **OF_TORCHVISION}
NAMES = ("llama", "gpt2", "gemma", "bert", "t5", "vit", "convnext", "wav2vec2", "mamba", "torchvision resnet",
         "torchvision mobilenet_v3")[::1 if LONG else 2]


class Convolutions(nn.Module):
    """Convolutions with strides, padding, dilation, groups and transposition, in one, two and three dimensions."""

    def __init__(self):
        super().__init__()
        self.plain = nn.Conv2d(3, 8, 3, stride=2, padding=1)
        self.grouped = nn.Conv2d(8, 8, 3, padding="same", dilation=2, groups=4, bias=False)
        self.transposed = nn.ConvTranspose2d(8, 4, 3, stride=2, output_padding=1, groups=2)
        self.line = nn.Conv1d(4, 6, 5, padding=2)
        self.space = nn.Conv3d(1, 2, (1, 2, 3))
        self.line_back = nn.ConvTranspose1d(6, 2, 4)

    def forward(self, x):
        x = self.transposed(self.grouped(self.plain(x)))
        line = self.line(x.flatten(2))
        return self.line_back(line).square().mean() + self.space(x[:, None]).mean()


class Attention(nn.Module):
    """Fused attention with and without a mask, with fewer keys than queries, by a module and by the function."""

    def __init__(self):
        super().__init__()
        self.module = nn.MultiheadAttention(16, 4, batch_first=True)

    def forward(self, x):
        query = x.unflatten(-1, (4, 4)).transpose(1, 2)
        short = query[:, :, :3]
        y = self.module(x, x, x)[0]
        z = nn.functional.scaled_dot_product_attention(query, short, short)
        w = nn.functional.scaled_dot_product_attention(query, query, query, is_causal=True)
        v = torch.baddbmm(torch.zeros(()), x, x.transpose(1, 2))
        recomputed = checkpoint(self.module, x, x, x, use_reentrant=False)[0]
        return y.mean() + z.mean() + w.mean() + v.mean() + recomputed.mean()


class Bilinear(nn.Module):
    """A product inside an operator for which torch's counter has no formula."""

    def __init__(self):
        super().__init__()
        self.mixed = nn.Bilinear(6, 5, 4, bias=False)

    def forward(self, x):
        return self.mixed(x, x[:, :5]).square().mean()


def cases():
    """Returns {name: (module, batch, function of both that returns the loss, classes of units)}. Each call makes new
    modules."""
    made = {name: (ARCHITECTURES[name].make, ARCHITECTURES[name].batches(1)[0], ARCHITECTURES[name].loss_of, ARCHITECTURES[name].units)
            for name in NAMES}
    made["convolutions"] = (Convolutions, torch.randn(2, 3, 12, 12), lambda module, x: module(x), ("Conv2d",))
    made["attention"] = (Attention, torch.randn(2, 6, 16, requires_grad=True), lambda module, x: module(x), ("MultiheadAttention",))
    return made


class FlopsTest(unittest.TestCase):
    def test_flop_of_a_step_are_those_of_the_flop_counter(self):
        for name, (make, batch, loss_of, units) in cases().items():
            with self.subTest(name):
                plain = make()
                with FlopCounterMode(display=False) as counter:
                    loss_of(plain, batch).backward()
                self.assertGreater(counter.get_total_flops(), 0)
                model = make()
                engine = tessera.Engine(model, {"strategy": "FULL_SHARD", "units": {"classes": list(units)}})
                for _ in range(2):
                    engine.backward(loss_of(model, batch))
                    self.assertEqual(engine.step().flop, counter.get_total_flops())
                engine.close()

    def test_products_inside_other_operators_count_too(self):
        x = torch.randn(7, 6)
        with FlopCounterMode(display=False) as counter:
            Bilinear()(x).backward()
        model = Bilinear()
        engine = tessera.Engine(model, {})
        engine.backward(model(x))
        self.assertGreater(engine.step().flop, counter.get_total_flops())
        engine.close()

    def test_flop_of_several_microbatches_add_up_and_evaluations_are_left_out(self):
        make, batch, loss_of, units = cases()["llama"]
        plain = make()
        with FlopCounterMode(display=False) as counter:
            loss_of(plain, batch).backward()
        model = make()
        engine = tessera.Engine(model, {"gradient_accumulation": 3, "units": {"classes": list(units)}})
        engine.evaluate([batch], lambda each: loss_of(model, each))
        for _ in range(3):
            engine.backward(loss_of(model, batch))
        result = engine.step()
        self.assertEqual(result.flop, 3 * counter.get_total_flops())
        self.assertEqual(result.tflops, result.flop / result.seconds * 1e-12)
        self.assertIsNone(result.mfu)
        engine.set_peak_tflops(0.25)
        for _ in range(3):
            engine.backward(loss_of(model, batch))
        result = engine.step()
        self.assertEqual(result.mfu, result.tflops / 0.25)
        engine.close()


if __name__ == "__main__":
    unittest.main()
