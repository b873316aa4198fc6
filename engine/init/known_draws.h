#pragma once

#include <ATen/core/Generator.h>

#include <cstdint>
#include <optional>

#include "engine/init/init_tape.h"

namespace tessera {

/// An operator that fills all elements of a contiguous fp32 tensor on the CPU from a known number of the generator's
/// words, so that the generator can be moved on without making the numbers, and pieces can be made without the rest.
struct KnownDraw {
  enum class Kind {
    kUniform,  ///< element i from word i; `first`, `second`: from, to
    kNormal,   ///< `first`, `second`: mean, standard deviation
  };
  Kind kind = Kind::kUniform;
  double first = 0, second = 1;
  std::int64_t numel = 0;

  /// Elements are made in groups of so many, which must not be cut.
  static constexpr std::int64_t kGroup = 16;

  /// How many words fill `count` elements: one an element, and for a normal fill the last 16 elements again where they
  /// do not end a group. REQUIRES: count >= kGroup; smaller normal fills draw in another way.
  std::uint64_t words(std::int64_t count) const;
  /// The operator itself, on `tensor` instead.
  void fill(at::Tensor tensor, at::Generator generator) const;
};

/// What `node` draws, if that is known: aten::uniform_ and rand, aten::normal_ and randn.
std::optional<KnownDraw> known_draw(const InitTape::Node& node);

/// Leaves `generator`, one of the CPU, as if `words` words had been drawn from it. Takes some milliseconds at most
/// (engine/init/mersenne_twister.h).
void skip_words(at::Generator& generator, std::uint64_t words);

/// Moves `generator` on as `draw` would, without drawing; false, and nothing done, where the operator itself, tried on a
/// few elements, draws other than we know. REQUIRES: draw.numel >= KnownDraw::kGroup.
bool skip_draw(const KnownDraw& draw, at::Generator& generator);

/// Makes any elements of one KnownDraw: those that the whole draw would have made, bit for bit. Going forward through
/// them costs what drawing them costs; elsewhere the generator jumps.
class DrawPieces {
 public:
  /// `state`: of a generator of the CPU before the draw.
  DrawPieces(const KnownDraw& draw, const at::Tensor& state);
  /// Elements [begin, begin + piece.numel()) into `piece`, fp32 and contiguous. REQUIRES: `begin` is a multiple of
  /// kGroup, and so is the end, unless it is that of the draw. A draw of less than kGroup comes whole.
  void fill(at::Tensor piece, std::int64_t begin);

 private:
  static constexpr std::uint64_t kUnknown = ~std::uint64_t{0};
  void move_to(std::uint64_t word);

  KnownDraw draw_;
  at::Generator generator_, start_;
  std::uint64_t word_ = 0;  ///< that generator_ draws next, counted from the draw's first; or kUnknown
};

}  // namespace tessera
