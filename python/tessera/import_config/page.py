"""Makes docs/import-config.md from the tables: python -m tessera.import_config.page > docs/import-config.md"""

import sys

from tessera.import_config import FORMATS

_INTRODUCTION = """\
# Configurations of DeepSpeed, Accelerate and FSDP

<!-- Made by python -m tessera.import_config.page from the tables in python/tessera/import_config. Change the tables, not this page. -->

```
python -m tessera.import_config ds_config.json --out strategy.json
python -m tessera.import_config accelerate.yaml > strategy.json
python -m tessera.import_config fsdp_config.json --format fsdp --device gpu
```

turns another program's configuration into a [strategy file](strategy.md): a DeepSpeed JSON file, what `accelerate config` wrote, or the
`fsdp_config` of transformers' TrainingArguments. The keys tell which of them it is; `--format` says it otherwise. In Python,
`import tessera.import_config`, and `tessera.import_config.translate(text)` does the same.

Every key of the file is listed on stderr, with what became of it:

- **mapped**: the strategy says the same. Where something differs, the row says "Difference".
- **ignored**: training is the same without it, and the row says why.
- **refused**: training would not be the same without it, and the row says what to use instead. Then no strategy is written, and
  the command ends with 78. With `--skip-refused` such keys are left out.

Offload to the CPU means something where a GPU trains, and nothing where the CPU does. `--device gpu` makes it the memory of the GPU's host,
and `"comm": {"transport": "nccl"}`; with `--device cpu` it is ignored. Without `--device` it is refused.

Keys that the other program has at a default which is not Tessera's are set too, and listed apart. What the file leaves to the training
program (`"auto"`, the optimizer beside FSDP) stays at Tessera's default, or is what [TesseraTrainer](guide/integrations.md) takes from
TrainingArguments.

The strategy on stdout, or in the file that `--out` names, has the keys that differ from their defaults, and the numbers of the optimizer
that the file or the other program's defaults say. A file that exists is kept unless `--overwrite` is given.

A configuration has at most 256 KiB and 500 values, in UTF-8, each key once. JSON may have comments (`//`, `#`, `/* */`), a comma behind the
last member or none at the end of a line, keys without quotes, `NaN` and `Infinity`, as DeepSpeed takes them. YAML is read with PyYAML
(`pip install pyyaml`), without aliases and tags. What cannot be read is an error with its line, column and remedy.
"""


def page() -> str:
    text = _INTRODUCTION
    for form in FORMATS.values():
        text += f"\n## {form.heading}\n\n| key | what becomes of it |\n|---|---|\n"
        text += "".join(f"| `{row.title()}` | {row.doc.replace('|', chr(92) + '|')} |\n" for row in form.rows)
    return text


if __name__ == "__main__":
    sys.stdout.write(page())
