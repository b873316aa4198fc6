"""A torch device and its clock, which uses events on a GPU and the wall clock on the CPU."""

import time

import torch


class Mark:
    """A point in the work of the device. It is an event on a GPU, and the present moment on the CPU."""

    def __init__(self, on_gpu):
        self._event = torch.cuda.Event(enable_timing=True) if on_gpu else None
        self._second = time.perf_counter()
        if on_gpu:
            self._event.record()

    def wait(self):
        if self._event:
            self._event.synchronize()

    def seconds_since(self, earlier):
        """Returns the seconds since `earlier`. REQUIRES: the host has waited for both marks."""
        if self._event:
            return earlier._event.elapsed_time(self._event) * 1e-3
        return self._second - earlier._second


class Device:
    """A device. `name`: "cuda" or "cpu"."""

    def __init__(self, name):
        self.name = name
        self.on_gpu = name == "cuda"
        self.backend = "nccl" if self.on_gpu else "gloo"

    def mark(self):
        return Mark(self.on_gpu)

    def seconds_of(self, body):
        """Returns the seconds that an idle device needs for the work that `body()` queues."""
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
        if self.on_gpu:
            torch.cuda.reset_peak_memory_stats()

    def peak_bytes(self):
        """Returns the largest number of bytes of tensors since forget_peak(); None on the CPU."""
        return torch.cuda.max_memory_allocated() if self.on_gpu else None
