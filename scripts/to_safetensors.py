#!/usr/bin/env python3
"""Turns weights that PyTorch has pickled into a safetensors file, which Tessera and transformers can read.

    scripts/to_safetensors.py SOURCE TARGET [--key NAME] [--prefix TEXT] [--dtype fp32|bf16|fp16]

SOURCE is one of

    a file of torch.save (.pt, .bin, .pth): a dictionary of tensors, or one that holds such a dictionary under --key
        (left out: state_dict, model, module or model_state_dict)
    a folder with pytorch_model.bin or pytorch_model.bin.index.json, as transformers wrote them
    a folder of torch.distributed.checkpoint (DCP: .metadata and *.distcp)
    a folder of DeepSpeed's ZeRO checkpoints, stage 1, 2 or 3 (with `latest`), or one step of it: the fp32 masters

TARGET is a file.safetensors, or a folder, which gets model.safetensors. --prefix takes only the tensors whose names
begin with it, and removes it from them ("module.", "model."). Floating tensors keep their types unless --dtype says
otherwise. Tied tensors are written under each of their names. The program prints the names of
at most 20 things in SOURCE that it does not write, and how many more there are.

It needs torch 2.6 or later and the package safetensors. It runs no code of a pickle: files are read with weights_only,
and DCP's metadata and DeepSpeed's classes as plain data. Exit codes: 64 if an option is wrong; 65 if a file has the
wrong content; 66 if a file is missing; 73 if TARGET already exists.
"""

import argparse
import io
import json
import math
import pathlib
import pickle
import re
import sys

import torch

DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}
MOST_NAMED = 20
KEYS = ["state_dict", "model", "module", "model_state_dict"]


# Names in the source that the written file lacks; the program prints them at the end.
unused = []


class Refusal(Exception):
    def __init__(self, code, text):
        super().__init__(text)
        self.code = code


def load(path):
    """Returns a pickle's tensors and plain data."""
    if not path.is_file():
        raise Refusal(66, f"{path} is missing")
    try:
        return torch.load(path, map_location="cpu", weights_only=True)
    except (pickle.UnpicklingError, RuntimeError, EOFError, ValueError) as error:
        raise Refusal(65, f"{path} cannot be read without running it: {str(error).splitlines()[0]}") from error


def is_state(value):
    return isinstance(value, dict) and value and all(isinstance(each, torch.Tensor) for each in value.values())


def from_file(path, key):
    """Returns the dictionary of tensors in a file of torch.save."""
    whole = load(path)
    if not isinstance(whole, dict):
        raise Refusal(65, f"{path} holds a {type(whole).__name__}, wanted a dictionary of tensors")
    if key is None and is_state(whole):
        return whole
    found = [name for name in ([key] if key else KEYS) if isinstance(whole.get(name), dict)]
    if not found:
        raise Refusal(65, f"{path} holds no dictionary of tensors; its keys are {', '.join(map(str, whole))[:500]}. hint: --key")
    unused.extend(name for name in whole if name != found[0])
    tensors = {name: each for name, each in whole[found[0]].items() if isinstance(each, torch.Tensor)}
    unused.extend(f"{found[0]}: {name}" for name in whole[found[0]] if name not in tensors)
    return tensors


def add_tensors(tensors, more, where):
    """Adds tensors. If a name comes again, its tensor must have the same value."""
    for name, tensor in more.items():
        known = tensors.setdefault(name, tensor)
        if known.dtype != tensor.dtype or known.shape != tensor.shape or not torch.equal(bits(known), bits(tensor)):
            raise Refusal(65, f"{where} holds {name} with other values than a file before it")


def bits(tensor):
    return tensor.detach().contiguous().flatten().view(torch.uint8)


def plain_name(folder, name):
    """Returns the path of a file in this folder. Refuses a file in any other folder."""
    if not isinstance(name, str) or pathlib.PurePath(name).name != name:
        raise Refusal(65, f"{folder}: {name!r} is no name of a file of this folder")
    return folder / name


def from_transformers(folder):
    index = folder / "pytorch_model.bin.index.json"
    if not index.exists():
        return from_file(folder / "pytorch_model.bin", None)
    tensors = {}
    for name in sorted(set(json.loads(index.read_text())["weight_map"].values())):
        path = plain_name(folder, name)
        add_tensors(tensors, from_file(path, None), path)
    return tensors


class MetadataUnpickler(pickle.Unpickler):
    """Reads DCP's .metadata. It makes objects of classes that hold data. The only function that it calls is torch's
    _get_layout."""

    MODULES = ("torch.distributed.checkpoint.metadata", "torch.distributed.checkpoint.filesystem")
    OTHERS = {("torch", "Size"), ("torch.serialization", "_get_layout"), ("collections", "OrderedDict"), ("collections", "defaultdict"),
              ("builtins", "dict"), ("builtins", "list"), ("builtins", "set"), ("pathlib", "PosixPath"), ("pathlib", "PurePosixPath"),
              ("pathlib._local", "PosixPath")}

    def find_class(self, module, name):
        is_dtype = module == "torch" and isinstance(getattr(torch, name, None), torch.dtype)
        of_dcp = module in self.MODULES and name in ("Metadata", "TensorStorageMetadata", "BytesStorageMetadata", "TensorProperties",
                                                     "ChunkStorageMetadata", "MetadataIndex", "StorageMeta", "_MEM_FORMAT_ENCODING",
                                                     "_StorageInfo", "_StoragePrefix")
        if not (is_dtype or of_dcp or (module, name) in self.OTHERS):
            raise pickle.UnpicklingError(f"{module}.{name} is no part of DCP's metadata")
        return super().find_class(module, name)


def from_dcp(folder):
    from torch.distributed.checkpoint.metadata import TensorStorageMetadata
    try:
        with open(folder / ".metadata", "rb") as file:
            metadata = MetadataUnpickler(file).load()
    except (pickle.UnpicklingError, EOFError, AttributeError) as error:
        raise Refusal(65, f"{folder / '.metadata'}: {error}") from error
    tensors = {name: torch.empty(each.size, dtype=each.properties.dtype)
               for name, each in metadata.state_dict_metadata.items() if isinstance(each, TensorStorageMetadata)}
    unused.extend(name for name in metadata.state_dict_metadata if name not in tensors)
    filled = {name: torch.zeros(tensor.shape, dtype=torch.bool) for name, tensor in tensors.items()}
    for index, info in metadata.storage_data.items():
        if index.fqn not in tensors:
            continue
        with open(plain_name(folder, info.relative_path), "rb") as file:
            file.seek(info.offset)
            piece = torch.load(io.BytesIO(file.read(info.length)), map_location="cpu", weights_only=True)
        place = tuple(slice(begin, begin + size) for begin, size in zip(index.offset or [0] * piece.dim(), piece.shape))
        tensor = tensors[index.fqn]
        if piece.dtype != tensor.dtype or tensor[place].shape != piece.shape or filled[index.fqn][place].any():
            raise Refusal(65, f"{folder}: a piece of {index.fqn} in {info.relative_path} does not fit the others")
        tensor[place] = piece
        filled[index.fqn][place] = True
    for name, tensor in tensors.items():
        if not filled[name].all():
            raise Refusal(65, f"{folder}: {name} has {tensor.numel()} elements, and the files hold {int(filled[name].sum())}")
    return tensors


class DeepSpeedObject:
    """Stands for an object of DeepSpeed whose state is not needed."""

    def __init__(self, *arguments):
        pass

    def __setstate__(self, state):
        pass


DEEPSPEED_CLASSES = ["deepspeed.runtime.fp16.loss_scaler.LossScaler", "deepspeed.runtime.fp16.loss_scaler.DynamicLossScaler",
                     "deepspeed.runtime.zero.config.ZeroStageEnum", "deepspeed.utils.tensor_fragment.fragment_address",
                     "deepspeed.runtime.zero.config.DeepSpeedZeroConfig", "argparse.Namespace"]


def ranks_in(folder, pattern):
    found = {int(match[1]): path for path in folder.iterdir() if (match := re.fullmatch(pattern, path.name))}
    if found and sorted(found) != list(range(len(found))):
        raise Refusal(66, f"{folder}: of {len(found)} files of ranks some are missing; there are those of {sorted(found)}")
    return [found[rank] for rank in range(len(found))]


def from_deepspeed(folder):
    if (folder / "latest").is_file():
        folder = plain_name(folder, (folder / "latest").read_text().strip())
    optim_files = ranks_in(folder, r"(?:bf16_|fp16_)?zero_pp_rank_(\d+)_mp_rank_00_optim_states\.pt")
    model_files = ranks_in(folder, r"zero_pp_rank_(\d+)_mp_rank_00_model_states\.pt") or [folder / "mp_rank_00_model_states.pt"]
    if not optim_files:
        raise Refusal(66, f"{folder} holds no *zero_pp_rank_*_mp_rank_00_optim_states.pt")
    with torch.serialization.safe_globals([(DeepSpeedObject, name) for name in DEEPSPEED_CLASSES]):
        states = [load(path)["optimizer_state_dict"] for path in optim_files]
        model = load(model_files[0])
    groups = [list(group.items()) for group in model["param_shapes"]]
    world = len(states)
    if "fp32_flat_groups" in states[0]:
        tensors = deepspeed_stage_3(groups, [state["fp32_flat_groups"] for state in states], world)
    else:
        tensors = deepspeed_stage_2(groups, [state["single_partition_of_fp32_groups"] for state in states], folder)
    buffers = set(model.get("buffer_names") or [])
    module = model.get("module") or {}
    tensors.update({name: value for name, value in module.items() if name in buffers and isinstance(value, torch.Tensor)})
    frozen = model.get("frozen_param_shapes") or {}
    for name in frozen:
        value = module.get(name)
        if value is None or tuple(value.shape) != tuple(frozen[name]):
            raise Refusal(65, f"{folder}: the frozen parameter {name} is not whole in this checkpoint")
        tensors[name] = value
    for alias, name in (model.get("shared_params") or {}).items():
        if name not in tensors:
            raise Refusal(65, f"{folder}: {alias} shares the values of {name}, which are not in this checkpoint")
        tensors[alias] = tensors[name]
    unused.extend(name for name in module if name not in tensors)
    return tensors


def deepspeed_stage_2(groups, partitions, folder):
    """Joins the parts of stages 1 and 2, where each group is one flat tensor that is cut between the ranks."""
    tensors = {}
    for number, group in enumerate(groups):
        flat = torch.cat([partition[number].flatten() for partition in partitions])
        offset = 0
        for name, shape in group:
            numel = math.prod(shape)
            if offset + numel > flat.numel():
                raise Refusal(65, f"{folder}: group {number} has {flat.numel()} elements, too few for {name}")
            tensors[name] = flat[offset:offset + numel].view(tuple(shape))
            offset += numel
    return tensors


def deepspeed_stage_3(groups, flats, world):
    """Joins the parts of stage 3, where each parameter is cut between the ranks. All parts of a rank are one flat
    tensor."""
    ranks = [torch.cat([flat.flatten() for flat in flat_groups]) for flat_groups in flats]
    tensors, offset = {}, 0
    for name, shape in (pair for group in groups for pair in group):
        numel = math.prod(shape)
        part = -(-numel // world)
        pieces = [rank[offset:offset + part] for rank in ranks]
        if any(piece.numel() != part for piece in pieces):
            raise Refusal(65, f"the ranks' files have too few elements for {name}")
        tensors[name] = torch.cat(pieces)[:numel].view(tuple(shape))
        offset += part
    return tensors


def tensors_of(source, key):
    if not source.exists():
        raise Refusal(66, f"{source} is missing")
    if source.is_file():
        return from_file(source, key)
    if (source / ".metadata").exists():
        return from_dcp(source)
    if (source / "pytorch_model.bin").exists() or (source / "pytorch_model.bin.index.json").exists():
        return from_transformers(source)
    if (source / "latest").exists() or any(source.glob("*_optim_states.pt")):
        return from_deepspeed(source)
    raise Refusal(66, f"{source} holds neither pytorch_model.bin, nor DCP's .metadata, nor DeepSpeed's `latest`")


def convert(options):
    from safetensors.torch import save_file
    target = options.target
    if target.suffix != ".safetensors":
        target = target / "model.safetensors"
    if target.exists():
        raise Refusal(73, f"{target} exists already, and is kept")
    unused.clear()
    found = tensors_of(options.source, options.key)
    tensors = {name: each for name, each in found.items() if name.startswith(options.prefix)}
    unused.extend(name for name in found if name not in tensors)
    if not tensors:
        raise Refusal(65, f"{options.source} holds no tensor whose name begins with {options.prefix!r}")
    result = {}
    for name, tensor in tensors.items():
        convert_type = options.dtype and tensor.is_floating_point()
        # This is a copy, since safetensors has no tensors that share memory.
        result[name.removeprefix(options.prefix)] = tensor.detach().to(DTYPES[options.dtype] if convert_type else tensor.dtype).contiguous().clone()
    target.parent.mkdir(parents=True, exist_ok=True)
    save_file(result, target, metadata={"format": "pt"})
    print(f"{target}: {len(result)} tensors, {sum(each.numel() for each in result.values())} elements")
    if unused:
        more = f", and {len(unused) - MOST_NAMED} more" if len(unused) > MOST_NAMED else ""
        print(f"not used of {options.source}: {', '.join(map(str, unused[:MOST_NAMED]))}{more}", file=sys.stderr)


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("source", type=pathlib.Path)
    parser.add_argument("target", type=pathlib.Path)
    parser.add_argument("--key")
    parser.add_argument("--prefix", default="")
    parser.add_argument("--dtype", choices=sorted(DTYPES))
    try:
        convert(parser.parse_args())
    except Refusal as refusal:
        print(f"to_safetensors: {refusal}", file=sys.stderr)
        return refusal.code
    except SystemExit as end:
        return 64 if end.code else 0
    return 0


if __name__ == "__main__":
    sys.exit(main())
