"""The C++ module tree that stands for a Python module: names and classes only, around the same tensors."""

import torch

from tessera import _native
from tessera._error import Error


def mirror_of(model: torch.nn.Module) -> _native.Mirror:
    """Raises Error (64), naming the parameter or module, for what an Engine cannot train."""
    if not isinstance(model, torch.nn.Module):
        raise Error(f"an Engine wants a torch.nn.Module, got {type(model).__name__}")
    return _mirror(model, "", {}, set())


def _mirror(module: torch.nn.Module, path: str, made: dict, above: set) -> _native.Mirror:
    if module in made:
        return made[module]
    _expect_forward_writes_nothing(module, path)
    mirror = made[module] = _native.Mirror(type(module).__name__)
    for name, parameter in module._parameters.items():
        if parameter is not None:
            _expect_plain_tensor(parameter, "parameter", path + name)
            mirror.add_parameter(name, parameter)
    for name, buffer in module._buffers.items():
        if buffer is not None:
            _expect_plain_tensor(buffer, "buffer", path + name)
            mirror.add_buffer(name, buffer)
    for name, child in module._modules.items():
        if child is None:
            continue
        if child is module or child in above:
            raise Error(f"module {path}{name} contains itself. hint: keep the reference outside of the module tree, in a list, say")
        mirror.add_child(name, _mirror(child, f"{path}{name}.", made, above | {module}))
    return mirror


def _expect_plain_tensor(tensor: torch.Tensor, what: str, name: str) -> None:
    if torch.nn.parameter.is_lazy(tensor):
        raise Error(f"{what} {name} has no shape yet. hint: run one forward before the Engine is made")
    if tensor.layout != torch.strided:
        raise Error(f"{what} {name} has the layout {tensor.layout}. Tessera shards dense tensors only")
    # A Parameter's data is the plain tensor below it; a DTensor or a quantised tensor is one of a class of its own there too.
    if type(tensor.data) is not torch.Tensor:
        raise Error(f"{what} {name} is a {type(tensor.data).__name__}, not a plain tensor. hint: give the Engine the module before any other "
                    "library shards or quantises it")


def _expect_forward_writes_nothing(module: torch.nn.Module, path: str) -> None:
    if getattr(module, "max_norm", None) is None or not isinstance(module, (torch.nn.Embedding, torch.nn.EmbeddingBag)):
        return
    raise Error(f"module {path.rstrip('.') or '(root)'} is an embedding with max_norm, which writes its weight in forward: ranks would write one "
                "memory, or copies that are thrown away. hint: leave max_norm out, and rescale rows under engine.gathered(write=True)")
