#include "app/import/import_docs.h"

#include "app/import/import_formats.h"

namespace tessera::app {
namespace {

constexpr char kIntroduction[] = R"(# Configurations of DeepSpeed, Accelerate and FSDP

<!-- Made by tessera_import_docs from the tables in app/import. Change the tables, not this page. -->

```
tessera import-config ds_config.json --out strategy.json
tessera import-config accelerate.yaml > strategy.json
tessera import-config fsdp_config.json --format fsdp
```

turns another program's configuration into a [strategy file](strategy.md): a DeepSpeed JSON file, what `accelerate config` wrote, or the
`fsdp_config` of transformers' TrainingArguments. The keys tell which of them it is; `--format` says it otherwise.

Every key of the file is listed on stderr, with what became of it:

- **mapped**: the strategy says the same. Where something differs, the row says "Difference".
- **ignored**: training is the same without it, and the row says why.
- **refused**: training would not be the same without it, and the row says what to use instead. Then no strategy is written, and
  the command ends with 78. With `--skip-refused` such keys are left out.

Keys that the other program has at a default which is not Tessera's are set too, and listed apart. What the file leaves to the training
program (`"auto"`, the optimizer beside FSDP) stays at Tessera's default, or is what [TesseraTrainer](integrations.md) takes from
TrainingArguments.

The strategy on stdout, or in the file that `--out` names, has the keys that differ from their defaults, and the numbers of the optimizer
that the file or the other program's defaults say. A file that exists is kept unless `--overwrite` is given. A configuration has at most 256 KiB and 500 values, in UTF-8, each key once; YAML without aliases and tags.

)";

std::string cell_of(std::string text) {
  for (std::size_t at = 0; (at = text.find('|', at)) != std::string::npos; at += 2) text.insert(at, "\\");
  return text;
}

std::string table_of(const ImportFormat& format) {
  std::string text = "| key | what becomes of it |\n|---|---|\n";
  for (const ImportRow& row : format.rows) text += "| `" + row.shown + "` | " + cell_of(row.doc) + " |\n";
  return text;
}

std::string heading_of(const ImportFormat& format) {
  if (format.name == "deepspeed") return "## DeepSpeed (`--format deepspeed`)\n\n";
  if (format.name == "accelerate")
    return "## Accelerate (`--format accelerate`)\n\nKeys of `fsdp_config` count with `distributed_type: FSDP`, those "
           "of `deepspeed_config` with "
           "`distributed_type: DEEPSPEED`.\n\n";
  return "## fsdp_config of transformers (`--format fsdp`)\n\nKeys may begin with `fsdp_`, and may stand alone or in "
         "an object `fsdp_config` with `fsdp` beside it. "
         "JSON and YAML are read.\n\n";
}

}  // namespace

std::string import_reference() {
  std::string text = kIntroduction;
  for (const ImportFormat& format : import_formats()) text += heading_of(format) + table_of(format) + "\n";
  text.pop_back();
  return text;
}

}  // namespace tessera::app
