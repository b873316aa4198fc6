"""Tests fine-tuning a model of Hugging Face with the `tessera` command, from end to end, and compares it with
`transformers`.

Usage: finetune_test.py TESSERA

The test makes a small Qwen2 model and a tokenizer, runs examples/finetune_language_model/run on them, and checks the
results.
"""

import concurrent.futures
import json
import os
import pathlib
import random
import subprocess
import sys
import tempfile
import unittest

sys.path.append(str(pathlib.Path(__file__).resolve().parents[1] / "support"))
from patience import patient  # noqa: E402

ROOT = pathlib.Path(__file__).resolve().parent.parent.parent
TESSERA = sys.argv.pop(1) if len(sys.argv) > 1 else "tessera"

try:
    import torch
    import transformers
    from safetensors.torch import load_file
    from tokenizers import Tokenizer
except ImportError:
    transformers = None


def make_text():
    rng = random.Random(1)
    who, what, where = ["cat", "dog", "crow", "naïve owl", "猫"], ["sat", "slept", "sang", "ate 12 fish"], ["mat", "roof", "Москва", "hill"]
    return "".join(f"The {rng.choice(who)} {rng.choice(what)} on the {rng.choice(where)}.{rng.choice([' ', chr(10)])}" for _ in range(1500))


def make_model(folder, text):
    from tokenizers import Regex, decoders, models, normalizers, pre_tokenizers, trainers
    tokenizer = Tokenizer(models.BPE())
    tokenizer.normalizer = normalizers.NFC()
    pattern = r"(?i:'s|'t)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence([pre_tokenizers.Split(Regex(pattern), "isolated"),
                                                       pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)])
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.train_from_iterator([text], trainers.BpeTrainer(vocab_size=320, special_tokens=["<|endoftext|>"], show_progress=False,
                                                              initial_alphabet=pre_tokenizers.ByteLevel.alphabet()))
    torch.manual_seed(3)
    config = transformers.Qwen2Config(vocab_size=tokenizer.get_vocab_size() + 3, hidden_size=48, intermediate_size=96, num_hidden_layers=2,
                                      num_attention_heads=4, num_key_value_heads=2, max_position_embeddings=64, initializer_range=0.1,
                                      tie_word_embeddings=True, bos_token_id=None, eos_token_id=None)
    transformers.Qwen2ForCausalLM(config).save_pretrained(folder)
    tokenizer.save(str(folder / "tokenizer.json"))
    return tokenizer


def run(*command, code=0, **environment):
    done = subprocess.run([str(word) for word in command], capture_output=True, text=True, timeout=patient(300),
                          env={**os.environ, "OMP_NUM_THREADS": "1", "TESSERA_LOG_LEVEL": "error", **environment})
    assert done.returncode == code, f"{command} ended with {done.returncode}:\n{done.stdout[-2000:]}\n{done.stderr[-4000:]}"
    return done.stdout if code == 0 else done.stderr


def two_at_once(function, arguments):
    with concurrent.futures.ThreadPoolExecutor(2) as pool:
        return list(pool.map(function, arguments))


@unittest.skipIf(transformers is None, "no transformers. hint: scripts/setup --tests")
class FineTuning(unittest.TestCase):
    @classmethod
    def setUpClass(cls):
        cls.folder = pathlib.Path(cls.enterClassContext(tempfile.TemporaryDirectory()))
        transformers.logging.set_verbosity_error()
        torch.set_num_threads(1)
        cls.text = make_text()
        (cls.folder / "text.txt").write_text(cls.text)
        cls.tokenizer = make_model(cls.folder / "model", cls.text)
        cls.said = run(ROOT / "examples" / "finetune_language_model" / "run", cls.folder / "model", cls.folder / "text.txt", cls.folder / "out",
                       TESSERA=TESSERA, STEPS="60", PROMPT="The cat")

    def loss_of(self, folder):
        """Returns the loss that transformers computes for the data that two ranks read with --eval-batches 4: 64
        windows of 32 tokens."""
        model = transformers.AutoModelForCausalLM.from_pretrained(folder).eval()
        ids = torch.tensor(self.tokenizer.encode(self.text).ids)
        windows = torch.stack([ids[32 * i:32 * i + 33] for i in range(64)])
        with torch.no_grad():
            logits = model(windows[:, :-1]).logits
        return torch.nn.functional.cross_entropy(logits.flatten(0, 1), windows[:, 1:].flatten()).item()

    def test_transformers_finds_the_loss_that_tessera_found(self):
        lines = [json.loads(line) for line in (self.folder / "out" / "metrics.jsonl").read_text().splitlines()]
        found = [line["eval_loss"] for line in lines if "eval_loss" in line][-1]
        self.assertAlmostEqual(self.loss_of(self.folder / "out" / "model"), found, delta=1e-4)
        self.assertLess(found, 0.5 * self.loss_of(self.folder / "model"))

    def test_greedy_samples_are_those_of_transformers(self):
        for folder, mark in ((self.folder / "model", "--- before\n"), (self.folder / "out" / "model", "--- after\n")):
            model = transformers.AutoModelForCausalLM.from_pretrained(folder).eval()
            ids = torch.tensor([self.tokenizer.encode("The cat").ids])
            wanted = self.tokenizer.decode(model.generate(ids, max_new_tokens=40, do_sample=False)[0].tolist())
            clean = "".join("?" if character < " " and character not in "\n\t" or character == "\x7f" else character for character in wanted)
            got = self.said[self.said.index(mark) + len(mark):][:len(clean)]
            # Bytes that are no UTF-8 become U+FFFD in both texts.
            self.assertEqual(got, clean)

    def test_the_exported_folder_is_whole(self):
        exported = self.folder / "out" / "model"
        self.assertEqual((exported / "tokenizer.json").read_bytes(), (self.folder / "model" / "tokenizer.json").read_bytes())
        model, info = transformers.AutoModelForCausalLM.from_pretrained(exported, output_loading_info=True)
        self.assertIsInstance(model, transformers.Qwen2ForCausalLM)
        self.assertFalse(info["missing_keys"] or info["unexpected_keys"], info)
        self.assertEqual(sorted(load_file(exported / "model.safetensors")), sorted(load_file(self.folder / "model" / "model.safetensors")))

    def test_checkpoints_are_exported_too(self):
        for dtype, wanted in (("fp32", torch.float32), ("bf16", torch.bfloat16)):
            target = self.folder / f"of_checkpoint_{dtype}"
            run(TESSERA, "checkpoint", "export", self.folder / "out" / "checkpoints", target, "--dtype", dtype)
            got, trained = load_file(target / "model.safetensors"), load_file(self.folder / "out" / "model" / "model.safetensors")
            self.assertEqual(sorted(got), sorted(trained))
            for name, tensor in trained.items():
                self.assertTrue(torch.equal(got[name], tensor.to(wanted)), name)
            transformers.AutoModelForCausalLM.from_pretrained(target)
        self.assertIn("exists already", run(TESSERA, "checkpoint", "export", self.folder / "out" / "checkpoints", target, code=73))

    def test_tokens_on_disk_give_the_losses_of_text(self):
        run(TESSERA, "tokenize", "--tokenizer", self.folder / "model", "--data", self.folder / "text.txt", "--out", self.folder / "tokens")

        def losses_on(data):
            run(TESSERA, "train", "--init-from", self.folder / "model", "--strategy", ROOT / "examples/finetune_language_model/strategy.json",
                "--data", self.folder / data, "--steps", 3, "--batch", 4, "--seq-len", 16, "--metrics", self.folder / f"{data}.jsonl")
            lines = [json.loads(line) for line in (self.folder / f"{data}.jsonl").read_text().splitlines()]
            return [line["loss"] for line in lines if "loss" in line]
        losses = two_at_once(losses_on, ("text.txt", "tokens"))
        self.assertEqual(len(losses[0]), 3)
        self.assertEqual(*losses)

    def test_a_read_that_fails_midway_ends_all_ranks(self):
        said = run(TESSERA, "launch", "-n", 2, "--", TESSERA, "train", "--strategy", ROOT / "examples/finetune_language_model/strategy.json",
                   "--init-from", self.folder / "model", "--data", self.folder / "text.txt", "--steps", 1, "--batch", 1, "--seq-len", 16,
                   code=74, TESSERA_TEST_FAULTS="read path=model.safetensors nth=9 errno=EIO")
        self.assertIn("model.safetensors", said)
        self.assertIn("The Engine is not as it was", said)

    def test_mismatched_model_is_an_error_on_all_ranks(self):
        def train(*options, code):
            return run(TESSERA, "launch", "-n", 2, "--", TESSERA, "train", "--strategy", ROOT / "examples/finetune_language_model/strategy.json",
                       "--data", self.folder / "text.txt", "--steps", 1, "--batch", 1, "--seq-len", 16, *options, code=code)
        (self.folder / "weights.pt").write_bytes(b"PK\x03\x04 weights")
        said = train("--model", self.folder / "model", "--init-from", self.folder / "weights.pt", code=65)
        self.assertIn("scripts/to_safetensors.py", said)
        config = json.loads((self.folder / "model" / "config.json").read_text())
        cases = (("wider", 65, {"intermediate_size": 100}, "model.layers.0.mlp.up_proj.weight"),
                 ("yarn", 78, {"rope_parameters": {"rope_type": "yarn", "factor": 2.0}}, "yarn"),
                 ("small", 78, {"vocab_size": 300}, "the tokenizer has tokens up to"))

        def refused(case):
            name, code, change, _ = case
            (self.folder / name).mkdir()
            (self.folder / name / "config.json").write_text(json.dumps({**config, **change}))
            return train("--model", self.folder / name, "--init-from", self.folder / "model", code=code)
        for (*_, text), said in zip(cases, two_at_once(refused, cases), strict=True):
            self.assertIn(text, said)
        self.assertIn("--init-from", train(code=64))


if __name__ == "__main__":
    unittest.main()
