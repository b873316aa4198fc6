"""Makes `tolist` work on a sharded parameter. `repr` uses `tolist` too."""

import functools

import torch

_list_of_memory = torch.Tensor.tolist


@functools.wraps(_list_of_memory)
def _tolist(tensor: torch.Tensor):
    """Returns the values as lists. torch's own tolist reads memory, and a sharded parameter refuses this outside of
    operators. An operator therefore makes a copy, and tolist reads the copy.
    """
    try:
        return _list_of_memory(tensor)
    except RuntimeError as error:
        if "are sharded and not gathered" not in str(error):
            raise
        return _list_of_memory(tensor.detach().clone())


def let_lists_be_read() -> None:
    """Replaces `tolist` for the whole process, so that it gathers a parameter of an Engine as operators do.

    Printing a tensor calls `tolist`, and so does a debugger's view of a tensor.
    """
    torch.Tensor.tolist = _tolist
