#include "engine/init/piece_maker.h"

#include <ATen/CPUGeneratorImpl.h>
#include <ATen/Context.h>
#include <ATen/core/grad_mode.h>
#include <ATen/ops/empty.h>
#include <ATen/ops/equal.h>

#define XXH_INLINE_ALL
#include <xxhash.h>

#include <algorithm>
#include <cstring>
#include <limits>
#include <map>
#include <sstream>
#include <string_view>

namespace tessera {
namespace {

using Node = InitTape::Node;
using Place = InitTape::Place;

// This file works as follows. `of` gets from the tape the nodes that the tensor needs, and turns each one into a Step.
// It returns nothing if a node does not treat each element by itself. `make` widens the piece to whole groups of
// KnownDraw::kGroup elements. It runs every step on buffers of that length only, and cuts the piece out of the last
// buffer.

/// A tensor with fewer elements is made whole, and the piece is cut out of it.
constexpr std::int64_t kWorthCutting = 4096;

bool is_one_of(const std::string& name, std::initializer_list<std::string_view> names) {
  return std::find(names.begin(), names.end(), name) != names.end();
}

/// Returns whether the operator creates a tensor whose elements are all equal, or not initialized.
bool is_constant_factory(const Node& node) {
  return node.patches.empty() && node.creates.size() == 1 &&
         is_one_of(node.op.schema().name(), {"aten::empty", "aten::zeros", "aten::ones", "aten::full"});
}

/// Returns whether the operator gives an element the same bits wherever the element lies: in a SIMD vector, or behind
/// the last whole vector. Conversions do so, and so does arithmetic that is rounded once.
bool is_element_wise(const Node& node) {
  const bool is_known = is_one_of(
      node.op.schema().name(),
      {"aten::fill_", "aten::zero_",  "aten::mul",       "aten::mul_",       "aten::div",       "aten::div_",
       "aten::add",   "aten::add_",   "aten::sub",       "aten::sub_",       "aten::neg",       "aten::neg_",
       "aten::clamp", "aten::clamp_", "aten::clamp_min", "aten::clamp_min_", "aten::clamp_max", "aten::clamp_max_",
       "aten::copy_", "aten::clone",  "aten::to",        "aten::_to_copy"});
  const c10::IValue* const alpha = node.argument("alpha");  // a + alpha * b may be rounded once or twice
  const c10::IValue* const mode = node.argument("rounding_mode");
  return is_known && !(alpha && alpha->isScalar() && alpha->toScalar().toDouble() != 1.0) && !(mode && !mode->isNone());
}

/// Returns whether every tensor among the arguments is a single number, or has `numel` elements in the order of memory.
bool is_for_all_alike(const Node& node, std::int64_t numel) {
  const auto fits = [&](const Place& place) { return place.contiguous() && place.storage_numel() == numel; };
  bool numbers = true;
  for_each_tensor(node.arguments, [&](std::size_t, std::ptrdiff_t, const at::Tensor& real) {
    numbers = numbers && real.dim() == 0 && real.is_cpu();
  });
  const c10::IValue* const device = node.argument("device");
  const c10::IValue* const format = node.argument("memory_format");
  const bool plain_format = !format || format->isNone() || format->toMemoryFormat() == at::MemoryFormat::Contiguous ||
                            format->toMemoryFormat() == at::MemoryFormat::Preserve;
  return numbers && plain_format && (!device || device->isNone() || device->toDevice().is_cpu()) &&
         std::all_of(node.patches.begin(), node.patches.end(), [&](const auto& patch) { return fits(patch.place); }) &&
         std::all_of(node.creates.begin(), node.creates.end(), [&](const auto& made) { return fits(made.second); });
}

/// Returns whether DrawPieces can make parts of LibTorch's fills. The first call tries it, since another version of
/// LibTorch may draw numbers in another way.
bool draws_can_be_cut() {
  static const bool kCan = [] {
    constexpr std::int64_t kGroup = KnownDraw::kGroup, kNumel = 9 * kGroup + 5, kCut = 4 * kGroup;
    for (const auto kind : {KnownDraw::Kind::kUniform, KnownDraw::Kind::kNormal}) {
      const KnownDraw draw{kind, 0.25, 1.5, kNumel};
      at::Generator generator = at::globalContext().defaultGenerator(at::kCPU).clone();
      DrawPieces pieces(draw, generator.get_state());
      const at::Tensor whole = at::empty({kNumel}, at::kFloat), cut = at::empty({kNumel}, at::kFloat);
      draw.fill(whole, generator);
      pieces.fill(cut.narrow(0, kCut, kNumel - kCut), kCut);
      pieces.fill(cut.narrow(0, 0, kCut), 0);
      if (!at::equal(whole, cut)) return false;
    }
    return true;
  }();
  return kCan;
}

/// Writes nodes and their arguments as text, for recipe_of.
class RecipeText {
 public:
  RecipeText() { text_.precision(std::numeric_limits<double>::max_digits10); }

  void add_tensor(const Place& place) {
    const auto known = numbers_.try_emplace(place.storage, numbers_.size()).first;
    text_ << '%' << known->second << ' ' << c10::toString(place.dtype) << at::IntArrayRef(place.sizes);
    if (place.contiguous()) return;
    text_ << " strides " << at::IntArrayRef(place.strides) << " at " << place.offset;
  }

  void add_node(const Node& node, InitTape::Need need) {
    text_ << (need == InitTape::Need::kStorageOnly ? "memory of " : "");
    for (const auto& [output, place] : node.creates) {
      add_tensor(place);
      text_ << " = ";
    }
    text_ << node.op.schema().name() << '(';
    for (std::size_t i = 0; i < node.arguments.size(); ++i) {
      text_ << (i == 0 ? "" : ", ");
      add_argument(node, i);
    }
    text_ << ")\n";
  }

  void end_line() { text_ << '\n'; }
  std::string text() const { return text_.str(); }

 private:
  void add_argument(const Node& node, std::size_t i) {
    bool is_deferred = false;
    for (const InitTape::Patch& patch : node.patches) {
      if (patch.argument != i) continue;
      text_ << (is_deferred ? " " : "");
      add_tensor(patch.place);
      is_deferred = true;
    }
    const c10::IValue& value = node.arguments[i];
    if (is_deferred) return;
    if (value.isTensor() && value.toTensor().defined()) {
      const at::Tensor& real = value.toTensor();
      if (real.dim() == 0 && real.is_cpu() && !real.is_complex()) {
        text_ << real.item().toDouble();
      } else {
        text_ << "a real tensor " << real.sizes();
      }
    } else if (value.isScalar() || value.isBool() || value.isIntList() || value.isDoubleList() || value.isString()) {
      text_ << value;
    } else {
      text_ << (value.isNone() ? "-" : "...");
    }
  }

  std::ostringstream text_;
  std::map<InitTape::StorageId, std::size_t> numbers_;
};

}  // namespace

std::string recipe_of(const at::Tensor& tensor) {
  const std::shared_ptr<InitTape> tape = tape_of(tensor);
  TORCH_INTERNAL_ASSERT(tape, "recipe_of: not a deferred tensor");
  const Place place = place_of(tensor);
  RecipeText text;
  text.add_tensor(place);
  text.end_line();
  for (const auto& [number, need] : tape->needed_for({place.storage})) text.add_node(tape->node(number), need);
  return text.text();
}

std::uint64_t digest_of_arithmetic() {
  const at::NoGradGuard no_grad;
  constexpr std::int64_t kNumel = 1000;
  const at::Tensor drawn = at::empty({3 * kNumel}, at::kFloat);
  at::Generator generator = at::detail::createCPUGenerator(1);
  drawn.narrow(0, 0, kNumel).uniform_(-1, 1, generator);
  drawn.narrow(0, kNumel, kNumel).normal_(0, 1, generator);
  drawn.narrow(0, 2 * kNumel, kNumel).normal_(0, 1, generator).mul_(0.02).div_(3);
  return XXH3_64bits(drawn.const_data_ptr(), drawn.nbytes());
}

std::optional<PieceMaker> PieceMaker::of(const at::Tensor& tensor) {
  PieceMaker maker;
  maker.tape_ = tape_of(tensor);
  if (!maker.tape_ || !tensor.is_non_overlapping_and_dense()) return std::nullopt;
  const Place place = place_of(tensor);
  if (!place.whole() || !draws_can_be_cut()) return std::nullopt;
  maker.storage_ = place.storage;
  maker.numel_ = place.storage_numel();
  for (const auto& [number, need] : maker.tape_->needed_for({place.storage})) {
    std::optional<Step> step = step_of(maker.tape_->node(number), need, maker.numel_);
    if (!step) return std::nullopt;
    maker.steps_.push_back(std::move(*step));
  }
  return maker;
}

std::optional<PieceMaker::Step> PieceMaker::step_of(const Node& node, InitTape::Need need, std::int64_t numel) {
  if (node.creates.size() + node.writes.size() != 1 || !is_for_all_alike(node, numel)) return std::nullopt;
  Step step;
  step.made = node.creates.empty() ? node.patches[0].place : node.creates[0].second;
  if (!node.writes.empty() && step.made.storage != node.writes[0]) return std::nullopt;
  if (need == InitTape::Need::kStorageOnly) return step;
  step.node = &node;
  if (!node.generator.defined()) {
    return is_constant_factory(node) || is_element_wise(node) ? std::optional(step) : std::nullopt;
  }
  step.draw = known_draw(node);
  if (!step.draw) return std::nullopt;
  step.state = node.generator_state;
  return step;
}

PieceMaker PieceMaker::another() const {
  PieceMaker maker = *this;
  maker.made_.clear();
  for (Step& step : maker.steps_) step.pieces.reset();
  return maker;
}

at::Tensor PieceMaker::make(std::int64_t begin, std::int64_t count) {
  const at::NoGradGuard no_grad;
  std::int64_t from = begin - begin % KnownDraw::kGroup;
  std::int64_t to = std::min(numel_, begin + count + (KnownDraw::kGroup - 1));
  if (to < numel_) to -= to % KnownDraw::kGroup;
  if (numel_ < kWorthCutting) from = 0, to = numel_;
  for (Step& step : steps_) run(step, from, to - from);
  return made_.at(storage_).narrow(0, begin - from, count);
}

void PieceMaker::run(Step& step, std::int64_t begin, std::int64_t count) {
  if (!step.node) {
    buffer(step.made, count);
    return;
  }
  if (step.draw) {
    if (!step.pieces) step.pieces.emplace(*step.draw, step.state);
    return step.pieces->fill(buffer(step.made, count), begin);
  }
  std::vector<c10::IValue> arguments = copy_with_own_lists(step.node->arguments);
  for (const InitTape::Patch& patch : step.node->patches) {
    put(arguments, patch.argument, patch.element, made_.at(patch.place.storage));
  }
  for (std::size_t i = 0; i < arguments.size(); ++i) {
    if (step.node->op.schema().arguments()[i].name() == "size") arguments[i] = std::vector<std::int64_t>{count};
  }
  torch::jit::Stack stack(std::move(arguments));
  step.node->op.callBoxed(&stack);
  if (!step.node->creates.empty()) made_[step.made.storage] = stack.back().toTensor();
}

/// Returns a buffer of `count` elements for the storage at `place`. It is the buffer of the last call if that buffer
/// has the same size.
at::Tensor& PieceMaker::buffer(const Place& place, std::int64_t count) {
  at::Tensor& tensor = made_[place.storage];
  if (!tensor.defined() || tensor.numel() != count) tensor = at::empty({count}, place.dtype);
  return tensor;
}

std::vector<std::byte> PieceMaker::states() const {
  std::vector<std::byte> all;
  for (const Step& step : steps_) {
    if (!step.draw) continue;
    const auto* const bytes = static_cast<const std::byte*>(step.state.const_data_ptr());
    all.insert(all.end(), bytes, bytes + step.state.nbytes());
  }
  return all;
}

void PieceMaker::set_states(const std::vector<std::byte>& states) {
  std::size_t taken = 0;
  for (Step& step : steps_) {
    if (!step.draw) continue;
    step.state = step.state.clone();
    TORCH_INTERNAL_ASSERT(taken + step.state.nbytes() <= states.size());
    std::memcpy(step.state.mutable_data_ptr(), states.data() + taken, step.state.nbytes());
    taken += step.state.nbytes();
    step.pieces.reset();
  }
  TORCH_INTERNAL_ASSERT(taken == states.size());
}

}  // namespace tessera
