"""Makes the C++ module tree that represents a Python module. This tree has only names, classes, and the same
tensors."""

import sys
from collections.abc import Callable

import torch

from tessera import _native
from tessera._error import Error


class Mirror:
    """A tree of modules that represents a model. The Engine uses this tree instead of the model. The tree always has
    the modules and parameters with which it was made.

    Buffers are refreshed, since a forward that assigns `self.mean = ...` gives the module another tensor.
    """

    def __init__(self, model: torch.nn.Module) -> None:
        """Raises Error (64), naming the parameter or module, if an Engine cannot train the model."""
        if not isinstance(model, torch.nn.Module):
            raise Error(f"an Engine wants a torch.nn.Module, got {type(model).__name__}. [T0656] hint: give it the model itself")
        self._modules: dict[torch.nn.Module, _MirroredModule] = {}
        self.native = self._add(model, "", set())

    def refresh(self) -> None:
        """Gives the C++ module all buffers that the modules have now."""
        for module in self._modules.values():
            module.refresh(lambda name: True)

    def refresh_for_weights(self) -> None:
        """Gives the C++ module those buffers that a state_dict has."""
        for module in self._modules.values():
            module.refresh(module.is_persistent)

    def refresh_for_checkpoint(self) -> None:
        """Gives the C++ module the buffers that a checkpoint has: those of a state_dict, and those that the module had
        at first. Other buffers that forward made, such as caches, are left out.
        """
        for module in self._modules.values():
            module.refresh(lambda name, module=module: module.is_persistent(name) or name in module.at_first)

    def _add(self, module: torch.nn.Module, path: str, above: set) -> _native.Mirror:
        if module in self._modules:
            return self._modules[module].native
        _expect_no_wrapper(module, path)
        _expect_forward_writes_nothing(module, path)
        mirrored = self._modules[module] = _MirroredModule(module, path)
        for name, child in module._modules.items():
            if child is None:
                continue
            if child is module or child in above:
                raise Error(f"module {path}{name} contains itself. [T0658] hint: keep the reference outside of the module tree, in a list, say")
            mirrored.native.add_child(name, self._add(child, f"{path}{name}.", above | {module}))
        return mirrored.native


class _MirroredModule:
    """One module of the tree, without its children."""

    def __init__(self, module: torch.nn.Module, path: str) -> None:
        self._module, self._path = module, path
        self.native = _mirror_of(module)
        self._parameters: set[str] = set()
        for name, parameter in module._parameters.items():
            if parameter is not None:
                _expect_plain_tensor(parameter, "parameter", path + name)
                if parameter.is_inference():
                    raise Error(f"parameter {path}{name} was made under torch.inference_mode(), and such a tensor cannot train. "
                                "[T0659] hint: make the "
                                "module outside of it")
                self.native.add_parameter(name, parameter)
                self._parameters.add(name)
        self._known: dict[str, torch.Tensor] = {}
        for name, buffer in module._buffers.items():
            if buffer is not None:
                _expect_plain_tensor(buffer, "buffer", path + name)
                self.native.add_buffer(name, buffer)
                self._known[name] = buffer
        self.at_first = frozenset(self._known)

    def is_persistent(self, name: str) -> bool:
        return name not in self._module._non_persistent_buffers_set

    def refresh(self, belongs: Callable[[str], bool]) -> None:
        buffers = {name: buffer for name, buffer in self._module._buffers.items() if buffer is not None and belongs(name)}
        if list(buffers) == list(self._known) and all(buffer is self._known[name] for name, buffer in buffers.items()):
            return
        for name, buffer in buffers.items():
            if buffer is not self._known.get(name):
                buffers[name] = self._expect_buffer(name, buffer)
        # Buffers are given without their history, since a load and "broadcast_buffers" write into them.
        self.native.set_buffers([(name, buffer.detach() if buffer.requires_grad else buffer) for name, buffer in buffers.items()])
        self._known = buffers

    def _expect_buffer(self, name: str, buffer: torch.Tensor) -> torch.Tensor:
        """Returns the module's buffer of this name, made writable. Raises Error (64) if Tessera cannot use it."""
        _expect_plain_tensor(buffer, "buffer", self._path + name)
        if name in self._parameters:
            raise Error(f"buffer {self._path}{name} has the name of a parameter that the Engine was made with. "
                        "[T0660] hint: close() the Engine, and make "
                        "another over the changed module")
        shares_elements = any(size > 1 and stride == 0 for size, stride in zip(buffer.shape, buffer.stride(), strict=True))
        if shares_elements or buffer.is_inference():
            with torch.inference_mode(False), torch.no_grad():
                buffer = self._module._buffers[name] = buffer.clone(memory_format=torch.contiguous_format)
        return buffer


def _mirror_of(module: torch.nn.Module) -> _native.Mirror:
    """Returns the C++ module of one Python module. The C++ module of a batch norm can have its running statistics
    recorded."""
    name = getattr(module, "class_for_strategies", type(module).__name__)
    is_norm_of_ranks = isinstance(module, torch.nn.SyncBatchNorm) or hasattr(module, "class_for_strategies")
    if isinstance(module, torch.nn.modules.batchnorm._BatchNorm) and not is_norm_of_ranks:
        return _native.MirroredNorm(name, module.momentum is None)
    return _native.Mirror(name)


def _expect_plain_tensor(tensor: torch.Tensor, what: str, name: str) -> None:
    if torch.nn.parameter.is_lazy(tensor):
        raise Error(f"{what} {name} has no shape yet. [T0661] hint: run one forward before the Engine is made")
    if tensor.layout != torch.strided:
        raise Error(f"{what} {name} has the layout {tensor.layout}. [T0662] hint: Tessera shards dense tensors only: make it with to_dense()")
    # A Parameter's data is a plain tensor. The data of a DTensor or a quantised tensor has its own class.
    if type(tensor.data) is not torch.Tensor:
        raise Error(f"{what} {name} is a {type(tensor.data).__name__}, not a plain tensor. [T0663] hint: give the Engine the module before any other "
                    "library shards or quantises it")


def _expect_no_wrapper(module: torch.nn.Module, path: str) -> None:
    """Raises Error if a module, at any level of the model, averages gradients or shards parameters by itself."""
    fsdp = sys.modules.get("torch.distributed.fsdp")  # a program that has not imported it has no such module
    wrappers = (torch.nn.parallel.DistributedDataParallel, torch.nn.DataParallel,
                *([fsdp.FullyShardedDataParallel] if hasattr(fsdp, "FullyShardedDataParallel") else []))
    if isinstance(module, wrappers):
        where = f", here {path.rstrip('.')}" if path else ""
        raise Error(f"an Engine averages gradients itself, and cannot train a module inside {type(module).__name__}{where}. "
                    "[T0657] hint: give the Engine the "
                    "module inside, which is .module of it")


def _expect_forward_writes_nothing(module: torch.nn.Module, path: str) -> None:
    if getattr(module, "max_norm", None) is None or not isinstance(module, (torch.nn.Embedding, torch.nn.EmbeddingBag)):
        return
    raise Error(f"module {path.rstrip('.') or '(root)'} is an embedding with max_norm, which writes its weight in forward: ranks would write one "
                "memory, or copies that are thrown away. [T0664] hint: leave max_norm out, and rescale rows under engine.gathered(write=True)")
