"""Writes the C++ blocks of all pages as functions of one source, which the build compiles. Usage: cpp_blocks.py ROOT
OUT

The names of a block (`<!-- block: with engine, mesh -->`) become parameters of its function. An #include goes to the
top of the source, and a line "..." is left out. Errors name the page and the line.
"""

import pathlib
import sys

import blocks

NAMES = {
    "batch": "torch::data::Example<>& batch",
    "batch size": "std::size_t batch",
    "cursors": "tessera::TokenBatches& batches",
    "data": "Data& data",
    "engine": "tessera::Engine& engine",
    "held out": "Loader::element_type& batches",
    "input": "const at::Tensor& input, const at::Tensor& target",
    "loader": "Loader& loader",
    "loss": "const at::Tensor& loss",
    "mean loss": "double& loss",
    "mesh": "const tessera::Mesh& mesh",
    "model": "Model& model",
    "own": "double right, std::int64_t seen, bool patience_is_over, const at::Tensor& own_logits",
    "resumes": "bool resumes, const std::string& folder, std::int64_t epochs, bool (*saves)()",
    "result": "const tessera::StepResult& result",
    "size": "std::size_t size",
    "strategy": "tessera::Strategy& strategy",
    "weight": "const at::Tensor& weight",
}
HEAD = """// Made by tests/docs/cpp_blocks.py from the pages: what they show in C++ compiles.
#include <ATen/Functions.h>
#include <tessera/tessera.h>
#include <torch/data/dataloader.h>
#include <torch/data/datasets/map.h>
#include <torch/data/datasets/tensor.h>
#include <torch/data/transforms/stack.h>
#include <torch/nn/module.h>
#include <torch/nn/pimpl.h>
#include <torch/script.h>

#include <memory>
#include <string>
#include <vector>

%(includes)s

namespace {

struct ModelImpl : torch::nn::Module {
  at::Tensor forward(const at::Tensor& input, const at::Tensor& target) { return (input - target).square().mean(); }
};
TORCH_MODULE(Model);

struct Samples : torch::data::datasets::Dataset<Samples> {
  torch::data::Example<> get(std::size_t) override { return {}; }
  std::optional<std::size_t> size() const override { return 8; }
};
using Data = torch::data::datasets::MapDataset<Samples, torch::data::transforms::Stack<>>;
using Loader = decltype(torch::data::make_data_loader(std::declval<Data>(), std::declval<tessera::RankSampler>(), std::size_t{1}));

[[maybe_unused]] at::Tensor loss_of(const torch::data::Example<>& batch) { return batch.data.mean(); }

}  // namespace
"""


def source_of(found):
    """Returns (the source, a list of errors)."""
    includes, functions, wrong = {}, [], []
    for number, block in enumerate(found):
        unknown = [name for name in block.names if name not in NAMES]
        if unknown:
            wrong.append(f"{block.place}: no block knows the name {unknown[0]}. hint: tests/docs/cpp_blocks.py has a table of them")
            continue
        lines = block.text.splitlines()
        includes |= {line: None for line in lines if line.startswith("#include")}
        body = "\n".join("" if line.startswith("#include") or line == "..." else line for line in lines)
        parameters = ", ".join(NAMES[name] for name in block.names)
        functions.append(f'void block_{number}({parameters}) {{\n#line {block.line + 1} "{block.page}"\n{body}\n}}\n')
    return HEAD % {"includes": "\n".join(includes)} + "\n" + "\n".join(functions), wrong


def compiled(found):
    return [block for block in found if block.language == "cpp" and not block.note.startswith(("from ", "not run: "))]


def main(root, out):
    text, wrong = source_of(compiled(blocks.all_blocks(root)))
    if wrong:
        print("\n".join(wrong), file=sys.stderr)
        return 1
    out = pathlib.Path(out)
    out.parent.mkdir(parents=True, exist_ok=True)
    if not out.exists() or out.read_text(encoding="utf-8") != text:
        out.write_text(text, encoding="utf-8")
    return 0


if __name__ == "__main__":
    sys.exit(main(*sys.argv[1:]))
