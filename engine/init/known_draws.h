#pragma once

#include <ATen/core/Generator.h>

#include <cstdint>
#include <optional>

#include "engine/init/init_tape.h"

namespace tessera {

/// An operator that fills all elements of a contiguous fp32 tensor on the CPU from a known number of the generator's
/// words. So the generator can skip the draw without making its numbers, and a part of the tensor can be made without
/// the other parts.
struct KnownDraw {
  enum class Kind {
    kUniform,  ///< element i is drawn from word i, uniformly from `first` to `second`
    kNormal,   ///< `first`, `second`: mean, standard deviation
  };
  Kind kind = Kind::kUniform;
  double first = 0, second = 1;
  std::int64_t numel = 0;

  /// The number of elements in a group. LibTorch makes elements in groups, which must not be cut.
  static constexpr std::int64_t kGroup = 16;

  /// Returns the number of words that are drawn for `count` elements: one word for each element. A normal fill draws 16
  /// more words if `count` is not a multiple of kGroup, since it draws the last group again. REQUIRES: count >= kGroup;
  /// smaller normal fills draw in another way.
  std::uint64_t words(std::int64_t count) const;
  /// Runs this operator on `tensor` instead of its own tensor.
  void fill(at::Tensor tensor, at::Generator generator) const;
};

/// Returns the draw of `node` if it is a known draw: that of aten::uniform_, rand, aten::normal_ or randn.
std::optional<KnownDraw> known_draw(const InitTape::Node& node);

/// Advances `generator`, a generator of the CPU, as if `words` words had been drawn from it. The call takes a few
/// milliseconds at most (engine/init/mersenne_twister.h).
void skip_words(at::Generator& generator, std::uint64_t words);

/// Advances `generator` as `draw` would, without drawing. It first tries the operator on a few elements. Returns false,
/// and does not change `generator`, if the operator draws in an unknown way. REQUIRES: draw.numel >= KnownDraw::kGroup.
bool skip_draw(const KnownDraw& draw, at::Generator& generator);

/// Makes any elements of one KnownDraw, with the bits that the whole draw would have given them. If a call asks for
/// elements behind the elements of the last call, it skips the words of the elements between. A call for earlier
/// elements begins again at the state before the draw. One thread at a time may use it.
class DrawPieces {
 public:
  /// `state`: the state of the CPU generator before the draw.
  DrawPieces(const KnownDraw& draw, const at::Tensor& state);
  /// Fills `piece`, fp32 and contiguous, with elements [begin, begin + piece.numel()). REQUIRES: `begin` is a multiple
  /// of kGroup, and so is the end, unless it is the end of the draw. A draw of less than kGroup elements is made whole.
  void fill(at::Tensor piece, std::int64_t begin);

 private:
  static constexpr std::uint64_t kUnknown = ~std::uint64_t{0};
  void move_to(std::uint64_t word);

  KnownDraw draw_;
  at::Generator generator_, start_;
  std::uint64_t word_ = 0;  ///< number of the word that generator_ draws next, counted from the draw's first word; or
                            ///< kUnknown
};

}  // namespace tessera
