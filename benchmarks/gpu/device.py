"""Reads facts about the GPU from its driver. It uses the standard library only; no function makes a CUDA context."""

import ctypes
import os
import subprocess

_FIELDS = ("name", "uuid", "memory.total", "driver_version", "compute_cap", "power.limit")


def chosen():
    """Returns the GPU to measure, in the form that nvidia-smi -i takes: the first of CUDA_VISIBLE_DEVICES, or the first
    of the machine."""
    return os.environ.get("CUDA_VISIBLE_DEVICES", "").split(",")[0] or "0"


def facts(gpu):
    """Returns {"name", "uuid", "memory_bytes", "driver", "compute_capability", "power_limit_w"}. Raises OSError or CalledProcessError if there is
    no nvidia-smi or no such GPU."""
    line = subprocess.run(["nvidia-smi", "-i", gpu, f"--query-gpu={','.join(_FIELDS)}",
                           "--format=csv,noheader,nounits"], check=True, capture_output=True, text=True).stdout
    name, uuid, mebibytes, driver, capability, power = (field.strip() for field in line.splitlines()[0].split(","))
    return {"name": name, "uuid": uuid, "memory_bytes": int(mebibytes) * 2**20, "driver": driver,
            "compute_capability": capability, "power_limit_w": power}


class _Memory(ctypes.Structure):
    _fields_ = [("total", ctypes.c_ulonglong), ("free", ctypes.c_ulonglong), ("used", ctypes.c_ulonglong)]


class MemoryMeter:
    """Reads how many bytes all processes use on a GPU, according to NVML. Raises OSError if NVML cannot be loaded or
    refuses the request."""

    def __init__(self, uuid):
        self._nvml = ctypes.CDLL("libnvidia-ml.so.1")
        self._handle = ctypes.c_void_p()
        self._check("nvmlInit_v2")
        self._check("nvmlDeviceGetHandleByUUID", ctypes.c_char_p(uuid.encode()), ctypes.byref(self._handle))

    def used_bytes(self):
        memory = _Memory()
        self._check("nvmlDeviceGetMemoryInfo", self._handle, ctypes.byref(memory))
        return memory.used

    def _check(self, function, *arguments):
        code = getattr(self._nvml, function)(*arguments)
        if code != 0:
            raise OSError(f"{function} returned {code}")
