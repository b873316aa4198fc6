"""Lists of a sharded parameter's values, which `repr` prints too."""

import functools

import torch

_list_of_memory = torch.Tensor.tolist


@functools.wraps(_list_of_memory)
def _tolist(tensor: torch.Tensor):
    """torch's own reads memory, which a sharded parameter refuses outside of operators; a copy is read by an operator."""
    try:
        return _list_of_memory(tensor)
    except RuntimeError as error:
        if "are sharded and not gathered" not in str(error):
            raise
        return _list_of_memory(tensor.detach().clone())


def let_lists_be_read() -> None:
    """For the whole process: `tolist` gathers a parameter of an Engine as operators do. Printing a tensor and a debugger's view of one
    use it."""
    torch.Tensor.tolist = _tolist
