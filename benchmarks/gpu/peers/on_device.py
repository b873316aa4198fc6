"""A torch device and its clock: events on a GPU, the wall clock on the CPU (for smoke tests)."""

import pathlib
import sys
import time

import torch

sys.path.insert(0, str(pathlib.Path(__file__).resolve().parents[2] / "peers"))


class Mark:
    """A place in what the device does: an event on a GPU, this moment on the CPU."""

    def __init__(self, on_gpu):
        self._event = torch.cuda.Event(enable_timing=True) if on_gpu else None
        self._second = time.perf_counter()
        if on_gpu:
            self._event.record()

    def wait(self):
        if self._event:
            self._event.synchronize()

    def seconds_since(self, earlier):
        """REQUIRES: both have been waited for."""
        if self._event:
            return earlier._event.elapsed_time(self._event) * 1e-3
        return self._second - earlier._second


class Device:
    """`name`: "cuda" or "cpu"."""

    def __init__(self, name):
        self.name = name
        self.backend = "nccl" if name == "cuda" else "gloo"

    def mark(self):
        return Mark(self.name == "cuda")

    def seconds_of(self, body):
        """Of what `body()` asks of an idle device."""
        begin = self.mark()
        body()
        end = self.mark()
        end.wait()
        return end.seconds_since(begin)

    def samples_of(self, body, warm_up, count):
        for _ in range(warm_up):
            self.seconds_of(body)
        return [self.seconds_of(body) for _ in range(count)]

    def forget_peak(self):
        if self.name == "cuda":
            torch.cuda.reset_peak_memory_stats()

    def peak_bytes(self):
        """Most bytes of tensors since forget_peak(); None on the CPU."""
        return torch.cuda.max_memory_allocated() if self.name == "cuda" else None
