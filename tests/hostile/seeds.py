"""Makes the good files that cases change. They are made once, and by the commands themselves if commands can write
them."""

import json
import os
import struct

MODEL = {"model": "gpt", "vocab_size": 256, "seq_len": 16, "layers": 1, "width": 16, "heads": 2}
STRATEGY = {"strategy": "FULL_SHARD", "units": {"classes": ["Block"]}, "comm": {"init_timeout_s": 30, "timeout_s": 30}}
FIT = {"alpha_s": 4e-5, "beta_s_per_byte": 8e-10, "busy_alpha_s": 4e-5, "busy_beta_s_per_byte": 8e-10}
LINKS = {"transport": "gloo", "ranks": 2, "hosts": 2, "all_gather": FIT, "reduce_scatter": FIT, "all_reduce": FIT, "small": FIT, "cpu_s_per_byte": 0,
         "sum_s_per_byte": 0, "coding": {"lossless_s_per_byte": 1e-9, "int8_s_per_byte": 1e-9, "int4_s_per_byte": 1e-9, "load": 0.5},
         "reduces_in_background": True, "gathers_in_background": True}

TRAIN = ["train", "--model", "model.json", "--strategy", "strategy.json", "--data", "text", "--steps", "2", "--batch", "2"]
PLAN = ["plan", "--model", "model.json", "--strategy", "strategy.json", "--world-size", "2"]
SAMPLE = ["sample", "--model", "model.json", "--weights", "weights.pt", "--tokens", "2"]
TOKENIZE = ["tokenize", "--tokenizer", "tokenizer.json", "--data", "text", "--out", "tokens"]
OFFLOAD = [*TRAIN, "--strategy", "offload.json"]
DURABLE = [*TRAIN, "--strategy", "durable.json", "--steps", "4"]


def tokenizer():
    """Makes a tokenizer with all bytes and two merges."""
    vocabulary, other = {}, 0x100
    for byte in range(256):
        visible = 0x21 <= byte <= 0x7E or (byte >= 0xA1 and byte != 0xAD)
        vocabulary[chr(byte if visible else other)] = byte
        other += not visible
    vocabulary.update({"ab": 256, "abc": 257})
    return {"decoder": {"type": "ByteLevel"}, "pre_tokenizer": {"type": "ByteLevel", "add_prefix_space": False},
            "model": {"type": "BPE", "vocab": vocabulary, "merges": ["a b", "ab c"]}}


def with_offload(strategy, folder):
    return {**strategy, "mixed_precision": {"param": "bf16"}, "offload": {"masters": {"tier": "nvme"}, "moments": {"tier": "nvme"}, "paths": [folder], "record": "8KiB"}}


def make_seeds(folder, run):
    """Makes the files in the folder. `run(words)` runs a command there and must succeed."""
    def write(name, content):
        (folder / name).write_text(content if isinstance(content, str) else json.dumps(content))
    write("model.json", MODEL)
    write("strategy.json", STRATEGY)
    write("offload.json", with_offload(STRATEGY, "scratch"))
    write("durable.json", {**STRATEGY, "durable": {"every": 1, "dir": "durable"}})
    write("gloo.json", {**STRATEGY, "comm": {**STRATEGY["comm"], "transport": "gloo"}})
    write("text", "gather wait release shard unit mesh rank plan step\n" * 60)
    write("tokenizer.json", tokenizer())
    write("links.json", LINKS)
    for name in ("scratch", "durable"):
        (folder / name).mkdir()
    tokens = [ord(letter) for letter in "gather wait release shard\n" * 40]
    (folder / "tokens.llmc").write_bytes(struct.pack("<256i", 20240520, 1, len(tokens), *[0] * 253) + struct.pack(f"<{len(tokens)}H", *tokens))
    run([*TRAIN, "--checkpoint-dir", "saved", "--every-steps", "1", "--save-weights", "weights.pt", "--export-hf", "hf", "--profile",
         "profile.json"])
    run([*DURABLE, "--steps", "2"])
    run([*TOKENIZE, "--out", "corpus"])
    whole = (folder / "hf" / "model.safetensors").read_bytes()
    (folder / "weights.safetensors").write_bytes(whole)
    split_safetensors(folder / "hf", folder / "sharded")
    for left in folder.glob("**/*.lock"):
        left.unlink()


def split_safetensors(model, sharded):
    """Makes a model of Hugging Face in two files and an index."""
    sharded.mkdir()
    (sharded / "config.json").write_bytes((model / "config.json").read_bytes())
    data = (model / "model.safetensors").read_bytes()
    size = struct.unpack("<Q", data[:8])[0]
    header, body = json.loads(data[8:8 + size]), data[8 + size:]
    header.pop("__metadata__", None)
    names, where = sorted(header), {}
    for number, part in enumerate((names[::2], names[1::2]), 1):
        file, at, entries, content = f"model-0000{number}-of-00002.safetensors", 0, {}, b""
        for name in part:
            begin, end = header[name]["data_offsets"]
            entries[name] = {**header[name], "data_offsets": [at, at + end - begin]}
            content += body[begin:end]
            at += end - begin
            where[name] = file
        text = json.dumps(entries).encode()
        text += b" " * (-len(text) % 8)
        (sharded / file).write_bytes(struct.pack("<Q", len(text)) + text + content)
    (sharded / "model.safetensors.index.json").write_text(json.dumps({"metadata": {"total_size": len(body)}, "weight_map": where}))


def size_of(path):
    return os.stat(path).st_size
