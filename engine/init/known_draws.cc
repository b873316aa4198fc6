#include "engine/init/known_draws.h"

#include <ATen/CPUGeneratorImpl.h>
#include <ATen/ops/empty.h>
#include <ATen/ops/equal.h>

#include <algorithm>
#include <mutex>
#include <string>

#include "engine/init/mersenne_twister.h"

namespace tessera {
namespace {

static_assert(at::MERSENNE_STATE_N == mt19937::kWords && at::MERSENNE_STATE_M == mt19937::kMiddle);

/// Returns the place that the node fills, if it is one contiguous fp32 tensor; else null.
const InitTape::Place* filled_by(const InitTape::Node& node) {
  const InitTape::Place* place = nullptr;
  if (node.overwrites) {
    place = &node.patches[0].place;
  } else if (node.patches.empty() && node.creates.size() == 1) {
    place = &node.creates[0].second;
  }
  return place && place->dtype == at::kFloat && place->contiguous() ? place : nullptr;
}

double number_or(const c10::IValue* value, double otherwise) {
  return value && value->isScalar() ? value->toScalar().toDouble() : otherwise;
}

}  // namespace

std::uint64_t KnownDraw::words(std::int64_t count) const {
  const std::int64_t again = kind == Kind::kNormal && count % kGroup != 0 ? kGroup : 0;
  return static_cast<std::uint64_t>(count + again);
}

void KnownDraw::fill(at::Tensor tensor, at::Generator generator) const {
  if (kind == Kind::kUniform) {
    tensor.uniform_(first, second, std::move(generator));
  } else {
    tensor.normal_(first, second, std::move(generator));
  }
}

std::optional<KnownDraw> known_draw(const InitTape::Node& node) {
  if (!node.generator.defined() || node.generator.device().type() != at::kCPU) return std::nullopt;
  const InitTape::Place* const place = filled_by(node);
  if (!place) return std::nullopt;
  const std::string& name = node.op.schema().name();
  KnownDraw draw;
  draw.numel = place->storage_numel();
  if (name == "aten::uniform_" || name == "aten::rand") {
    draw.first = number_or(node.argument("from"), 0);
    draw.second = number_or(node.argument("to"), 1);
    return draw;
  }
  if (name == "aten::normal_" || name == "aten::randn") {
    draw.kind = KnownDraw::Kind::kNormal;
    draw.first = number_or(node.argument("mean"), 0);
    draw.second = number_or(node.argument("std"), 1);
    return draw;
  }
  return std::nullopt;
}

void skip_words(at::Generator& generator, std::uint64_t words) {
  if (words == 0) return;
  const std::lock_guard lock(generator.mutex());
  auto* const cpu = generator.get<at::CPUGeneratorImpl>();
  at::mt19937 engine = cpu->engine();
  at::mt19937_data_pod data = engine.data();
  // `left_` is one more than the number of words of `state_` that may still be drawn, from `next_` on. A block is made
  // when its first word is drawn.
  const std::uint64_t drawn = mt19937::kWords - static_cast<std::uint64_t>(data.left_ - 1) + words;
  const std::uint64_t blocks = (drawn - 1) / mt19937::kWords;
  if (blocks >= mt19937::kWorthJump) {
    mt19937::jump(data.state_, blocks);
  } else {
    for (std::uint64_t i = 0; i < blocks; ++i) mt19937::next_block(data.state_);
  }
  data.next_ = static_cast<std::uint32_t>(drawn - blocks * mt19937::kWords);
  data.left_ = mt19937::kWords - static_cast<int>(data.next_) + 1;
  engine.set_data(data);
  cpu->set_engine(engine);
}

bool skip_draw(const KnownDraw& draw, at::Generator& generator) {
  at::Generator drawn = generator.clone(), skipped = generator.clone();
  const std::int64_t few = 4 * KnownDraw::kGroup + draw.numel % KnownDraw::kGroup;
  draw.fill(at::empty({few}, at::kFloat), drawn);
  skip_words(skipped, draw.words(few));
  if (!at::equal(drawn.get_state(), skipped.get_state())) return false;
  skip_words(generator, draw.words(draw.numel));
  return true;
}

DrawPieces::DrawPieces(const KnownDraw& draw, const at::Tensor& state)
    : draw_(draw), generator_(at::detail::createCPUGenerator()) {
  generator_.set_state(state);
  start_ = generator_.clone();
}

void DrawPieces::move_to(std::uint64_t word) {
  if (word < word_) {
    generator_ = start_.clone();
    word_ = 0;
  }
  skip_words(generator_, word - word_);
  word_ = word;
}

void DrawPieces::fill(at::Tensor piece, std::int64_t begin) {
  const std::int64_t end = begin + piece.numel();
  if (piece.numel() == draw_.numel) {
    move_to(0);
    draw_.fill(piece, generator_);
    word_ = kUnknown;
    return;
  }
  // If a normal fill's number of elements is not a multiple of kGroup, the fill draws its last kGroup elements again.
  // It draws them from the words that follow the words of all elements.
  const std::int64_t rest = draw_.kind == KnownDraw::Kind::kNormal ? draw_.numel % KnownDraw::kGroup : 0;
  const std::int64_t body_end = std::min(end, draw_.numel - rest);
  if (body_end > begin) {
    move_to(static_cast<std::uint64_t>(begin));
    draw_.fill(piece.narrow(0, 0, body_end - begin), generator_);
    word_ += static_cast<std::uint64_t>(body_end - begin);
  }
  const std::int64_t tail_begin = draw_.numel - KnownDraw::kGroup;
  if (rest == 0 || end <= tail_begin) return;
  move_to(static_cast<std::uint64_t>(draw_.numel));
  const at::Tensor tail = at::empty({KnownDraw::kGroup}, at::kFloat);
  draw_.fill(tail, generator_);
  word_ += KnownDraw::kGroup;
  const std::int64_t from = std::max(begin, tail_begin);
  piece.narrow(0, from - begin, end - from).copy_(tail.narrow(0, from - tail_begin, end - from));
}

}  // namespace tessera
