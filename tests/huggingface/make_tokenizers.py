#!/usr/bin/env python3
"""Trains tokenizers with the package `tokenizers`, and writes the results with which a C++ test compares.

    Usage: make_tokenizers.py FOLDER

FOLDER/text is 1 MB of text in many scripts, and FOLDER/bytes is text with parts that are no UTF-8. The kinds are the
ways in which GPT-2, Llama 3, Qwen and others cut text. FOLDER/<kind>/tokenizer.json is the tokenizer of a kind.
FOLDER/<kind>/wanted has `text` and `bytes`, which are the tokens of these files, and `words` with `word_ends`, which
are the tokens of many short texts. FOLDER/<kind>/decoded is the text that `tokenizers` decodes from the text's tokens.
The program prints how fast the package is.
"""

import pathlib
import random
import sys
import time

import torch
from tokenizers import Regex, Tokenizer, decoders, models, normalizers, pre_tokenizers, processors, trainers

sys.path.insert(0, str(pathlib.Path(__file__).resolve().parent.parent / "oracle"))
from exchange import write_tensors  # noqa: E402

LLAMA3 = (r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+"
          r"|\s+(?!\S)|\s+")
QWEN2 = LLAMA3.replace(r"\p{N}{1,3}", r"\p{N}")
ALPHABETS = [
    "abcdefghijklmnopqrstuvwxyzABCDEFGHIJKLMNOPQRSTUVWXYZ", "abcdefghijklmnopqrstuvwxyz", "eéèêëàâäçñöüßøåæœıİĳﬁﬂŉſK",
    "абвгдежзийклмнопрстуфхцчшщъыьэюяЁё", "αβγδεζηθικλμνξοπρσςτυφχψωΆΐ", "אבגדהוזחטיכלמנסעפצקרשתְִֵ", "ابتثجحخدذرزسشصضطظعغفقكلمنهويًٌَُ",
    "कखगघचछजझटठडढणतथदधनपफबभमयरलवशषसहािीुूेैोौ्ंःँ", "กขคงจฉชซญดตถทนบปผฝพฟมยรลวศสหอะาิีึืุูเแโใไ่้๊๋", "အကခဂငစဆဇဈညတထဒဓနပဖဗဘမယရလဝသဟ",
    "的一是不了人我在有他这为之大来以个中上们", "ぁあいうえおかがきぎくぐけげこご", "アイウエオカキクケコガギグゲゴ゛゜", "가각간갈감갑값강개객거건걸검겁것게",
    "ᄀᄁᄂᄃᄄ" + "ᅡᅢᅣᅤ" + "ᆨᆩᆪ", "ႠႡႢႣႤაბგდ", "ԱԲԳԴաբգդ", "ᏣᎳᎩ", "𝒜𝒞𝔄𝔅𐍈𐌰", "áéñö" + "q̣̇" + "ộ" + "Å",
]
DIGITS = ["0123456789", "٠١٢٣٤٥٦٧٨٩", "०१२३४५६७८९", "①②③½¼Ⅷⅸ", "𝟘𝟙𝟚", "一二三"]
SPACES = [" ", " ", " ", " ", " ", " ", "  ", "   ", "\n", "\n\n", "\r\n", "\t", " \t ", "\u00a0", "\u3000", "\u2003", "\u180e", "\u200b", "\u0085",
          "\u2028", "\x0b", "\x0c", "\x1c", "        ", " \n ", "\n    "]
SIGNS = [".", ",", "!", "?", "...", "—", "-", "(", ")", "{}", "=>", "::", "'s", "'S", "'ſ", "'t", "'re", "'VE", "'m", "'ll", "'LL", "'d", "’s", "#", "@",
         "//", "/*", "*/", "\"", "»", "。", "、", "！", "؟", "€", "™", "∑∫", "→", "\\", "\\n", "_", "__", "<", ">", "<|end|>", "<|endoftext|>", "<|end"]
EMOJI = ["😀", "👩‍👩‍👧‍👦", "🏳️‍🌈", "👍🏽", "🇩🇪", "❤️", "e\u0301", "n\u0303", "\u0301", "\u200d", "\ufeff", "\ue000", "\U0010ffff", "\x00", "\x07"]


def make_text(size, seed):
    rng = random.Random(seed)
    # Words are repeated, as in real text.
    words = ["".join(rng.choices(rng.choice(ALPHABETS), k=rng.randint(1, 9))) for _ in range(6000)]
    parts, length = [], 0
    while length < size:
        kind = rng.random()
        if kind < 0.7:
            part = rng.choice(words) if rng.random() < 0.8 else "".join(rng.choices(rng.choice(ALPHABETS), k=rng.randint(1, 20)))
        elif kind < 0.8:
            part = "".join(rng.choices(rng.choice(DIGITS), k=rng.randint(1, 12)))
        elif kind < 0.93:
            part = "".join(rng.choices(SIGNS, k=rng.randint(1, 3)))
        else:
            part = rng.choice(EMOJI) * rng.randint(1, 4)
        parts.append(part + (rng.choice(SPACES) if rng.random() < 0.75 else ""))
        length += len(parts[-1].encode())
    return "".join(parts)


def make_bytes(seed):
    rng = random.Random(seed)
    text = make_text(50_000, seed).encode()
    broken = bytearray(text)
    for _ in range(2000):
        broken[rng.randrange(len(broken))] = rng.randrange(256)
    return bytes(broken) + b"\xf0\x9f\x98" + b"\xc0\xaf\xed\xa0\x80\xf4\x90\x80\x80\xe2\x82"


def tokenizers(text):
    """Yields (kind, tokenizer) for each kind. A tokenizer has about 3000 tokens."""
    def trained(pre_tokenizer, normalizer=None, special=("<|endoftext|>",), **options):
        tokenizer = Tokenizer(models.BPE(**options))
        tokenizer.pre_tokenizer = pre_tokenizer
        tokenizer.decoder = decoders.ByteLevel()
        if normalizer:
            tokenizer.normalizer = normalizer
        tokenizer.train_from_iterator([text[:300_000]], trainers.BpeTrainer(
            vocab_size=3000, special_tokens=list(special), initial_alphabet=pre_tokenizers.ByteLevel.alphabet(), show_progress=False))
        return tokenizer

    def split(pattern, behavior="isolated", invert=False):
        return pre_tokenizers.Split(Regex(pattern), behavior, invert)

    def byte_level(**options):
        return pre_tokenizers.ByteLevel(**{"add_prefix_space": False, "use_regex": False, **options})

    yield "gpt2", trained(byte_level(use_regex=True))
    yield "prefix_space", trained(byte_level(use_regex=True, add_prefix_space=True))
    llama = trained(pre_tokenizers.Sequence([split(LLAMA3), byte_level()]), special=("<|begin|>", "<|end|>"), ignore_merges=True)
    llama.post_processor = processors.Sequence([
        processors.ByteLevel(trim_offsets=False),
        processors.TemplateProcessing(single="<|begin|> $A <|end|>", special_tokens=[("<|begin|>", 0), ("<|end|>", 1)])])
    yield "llama3", llama
    qwen = trained(pre_tokenizers.Sequence([split(QWEN2), byte_level()]), normalizers.NFC())
    qwen.add_tokens(["<|end", "é", "  "])
    yield "qwen2", qwen
    yield "digits", trained(pre_tokenizers.Sequence([pre_tokenizers.Digits(individual_digits=True), split(LLAMA3, "removed", True),
                                                     byte_level()]))


def main(folder):
    text = make_text(1_000_000, 1)
    (folder / "text").write_bytes(text.encode())
    broken = make_bytes(2)
    (folder / "bytes").write_bytes(broken)
    words = [make_text(20, seed) for seed in range(3, 1003)]
    (folder / "words").write_bytes("\x1e".join(words).encode())
    for kind, tokenizer in tokenizers(text):
        (folder / kind).mkdir()
        tokenizer.save(str(folder / kind / "tokenizer.json"))
        start = time.perf_counter()
        ids = tokenizer.encode(text).ids
        seconds = time.perf_counter() - start
        print(f"{kind}: tokenizers {len(text.encode()) / 1e6 / seconds:.1f} MB/s")
        each = [tokenizer.encode(word).ids for word in words]
        ends = torch.tensor([len(one) for one in each]).cumsum(0)
        write_tensors(folder / kind / "wanted", {
            "text": torch.tensor(ids), "bytes": torch.tensor(tokenizer.encode(broken.decode("utf-8", "replace")).ids),
            "words": torch.tensor([token for one in each for token in one]), "word_ends": ends})
        (folder / kind / "decoded").write_bytes(tokenizer.decode(ids).encode())
        (folder / kind / "decoded_special").write_bytes(tokenizer.decode(ids, skip_special_tokens=False).encode())


if __name__ == "__main__":
    main(pathlib.Path(sys.argv[1]))
