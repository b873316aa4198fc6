#include "sharding/reduce/pack/gradient_packer.h"

#include <ATen/Functions.h>
#include <ATen/Parallel.h>
#include <ATen/TensorIterator.h>

#include <algorithm>
#include <cstring>

#include "runtime/base/seeded_fault.h"
#include "sharding/memory_view.h"
#include "sharding/reduce/pack/squared_copy.h"
#include "sharding/unrecorded.h"

namespace tessera {
namespace {

/// Returns whether the elements of `gradient` lie in memory in the order of the elements of `flat`, without gaps.
bool lies_alike(const at::Tensor& gradient, const FlatParameter& flat) {
  return gradient.layout() == at::kStrided && gradient.is_non_overlapping_and_dense() &&
         gradient.sizes() == at::IntArrayRef(flat.sizes) && gradient.strides() == at::IntArrayRef(flat.strides);
}

/// Returns whether the code in this file, and not LibTorch, copies the bytes of `gradient`. LibTorch copies large
/// gradients, since it may use several threads.
bool is_copied_bytewise(const at::Tensor& gradient, DType dtype, const FlatParameter& flat) {
  return gradient.scalar_type() == scalar_type_of(dtype) && lies_alike(gradient, flat) &&
         (gradient.numel() < at::internal::GRAIN_SIZE || at::get_num_threads() == 1);
}

/// Copies `gradient` to `view`, or adds it to the values there.
void put(const at::Tensor& view, const at::Tensor& gradient, bool adds) {
  if (gradient.is_sparse()) {  // the rows of a sparse gradient are added one after another
    if (!adds) view.zero_();
    view.add_(gradient.to(view.scalar_type()));
  } else if (adds) {
    view.add_(gradient);
  } else {
    view.copy_(gradient);
  }
}

/// Does the same as `put`. If `gradient` and `view` have the same order in memory, the function works in pieces, and
/// squares each piece while the piece is in cache. Returns the sum of the squares of all of `view`, whose memory of
/// `dtype` is at `place`.
double put_and_square(const at::Tensor& view, const at::Tensor& gradient, bool adds, const FlatParameter& flat,
                      std::byte* place, DType dtype) {
  const std::int64_t numel = view.numel();
  if (!lies_alike(gradient, flat)) {
    put(view, gradient, adds);
    return sum_of_squares(place, dtype, numel);
  }
  const at::Tensor to = view.as_strided({numel}, {1}), from = gradient.as_strided({numel}, {1});
  const std::int64_t piece = at::internal::GRAIN_SIZE * std::max(1, at::get_num_threads());
  double sum = 0;
  for (std::int64_t begin = 0; begin < numel; begin += piece) {
    const std::int64_t count = std::min(piece, numel - begin);
    put(to.narrow(0, begin, count), from.narrow(0, begin, count), adds);
    sum += sum_of_squares(place + begin * static_cast<std::int64_t>(size_of(dtype)), dtype, count);
  }
  return sum;
}

/// A GPU copies a gradient with fewer elements than this in no more time than the host needs to start a copy. Such
/// gradients therefore wait and are copied together. Larger gradients are copied without waiting.
constexpr std::int64_t kSmallNumel = 1 << 22;

bool waits(const at::Tensor& gradient) {
  return gradient.numel() > 0 && gradient.numel() < kSmallNumel && gradient.layout() == at::kStrided;
}

}  // namespace

GradientPacker::GradientPacker(const Unit& unit, DType dtype, ComputeDevice device, PendingCopies& copies)
    : dtype_(dtype), device_(device), copies_(copies) {
  for (const auto& group : unit.groups) {
    const std::size_t count = group->trainable ? group->parameters.size() : 0;
    trainable_ += static_cast<std::int64_t>(count);
    Part& part = parts_.emplace_back();
    part.arrived.resize(count);
    part.expected.resize(count, 1);
    part.used.resize(count);
    part.views.resize(count);
  }
  usually_missing_ = missing_ = trainable_;
}

void GradientPacker::expect(std::span<const char> used) {
  usually_missing_ = 0;
  for (Part& part : parts_) {
    std::copy_n(used.begin(), part.expected.size(), part.expected.begin());
    used = used.subspan(part.expected.size());
    usually_missing_ += std::count(part.expected.begin(), part.expected.end(), 1);
  }
}

void GradientPacker::begin() {
  missing_ = usually_missing_;
  expects_all_ = false;
  for (Part& part : parts_) {
    std::fill(part.arrived.begin(), part.arrived.end(), 0);
    std::fill(part.squares.begin(), part.squares.end(), 0.0);
  }
}

void GradientPacker::keep_squares() {
  for (Part& part : parts_) part.squares.resize(part.arrived.size());
}

double GradientPacker::square() const {
  double sum = 0;
  for (const Part& part : parts_) {
    for (const double each : part.squares) sum += each;
  }
  return sum;
}

void GradientPacker::add_pieces(const FlatGroup& group, const std::byte* bucket,
                                std::vector<GradientPiece>& pieces) const {
  const std::vector<char>& arrived = parts_[group.index].arrived;
  for (std::size_t i = 0; i < arrived.size(); ++i) {
    const Extent extent = group.layout.extent(i);
    if (arrived[i])
      pieces.push_back({bucket + extent.offset * static_cast<std::int64_t>(size_of(dtype_)), extent.numel});
  }
}

void GradientPacker::reset() {
  begin();
  for (Part& part : parts_) std::fill(part.used.begin(), part.used.end(), 0);
}

void GradientPacker::take(const FlatGroup& group, std::size_t parameter, const at::Tensor& gradient, std::byte* bucket,
                          bool is_usual) {
  const FlatParameter& flat = group.parameters[parameter];
  Part& part = parts_[group.index];
  std::byte* const place = bucket + group.layout.extent(parameter).offset * static_cast<std::int64_t>(size_of(dtype_));
  char& arrived = part.arrived[parameter];
  double* const square = squares_ ? &part.squares[parameter] : nullptr;
  if (!arrived && !device_.is_queued && is_copied_bytewise(gradient, dtype_, flat)) {
    if (square)
      *square = squared_copy(place, static_cast<const std::byte*>(gradient.const_data_ptr()), dtype_, gradient.numel());
    else
      std::memcpy(place, gradient.const_data_ptr(), gradient.nbytes());
  } else if (!arrived && device_.is_queued && waits(gradient)) {
    copies_.add(view_of(group, parameter, place, is_usual), gradient);
  } else {
    if (arrived) copies_.flush();  // this gradient may be added to a gradient whose copy waits
    const Unrecorded unrecorded;
    const at::Tensor view = view_of(group, parameter, place, is_usual);
    if (square)
      *square = put_and_square(view, gradient, arrived != 0, flat, place, dtype_);
    else
      put(view, gradient, arrived != 0);
  }
  if (!arrived) note_arrival(part, parameter);
  arrived = 1;
  part.used[parameter] = 1;
}

void GradientPacker::take_zeros(const FlatGroup& group, std::size_t parameter, std::byte* bucket) {
  Part& part = parts_[group.index];
  if (part.arrived[parameter]) return;
  const auto element = static_cast<std::int64_t>(size_of(dtype_));
  clear(bucket + group.layout.extent(parameter).offset * element, group.layout.extent(parameter).numel * element);
  note_arrival(part, parameter);
  part.arrived[parameter] = 1;
}

void GradientPacker::note_arrival(Part& part, std::size_t parameter) {
  if (expects_all_ || part.expected[parameter]) {
    --missing_;
    return;
  }
  expects_all_ = true;
  missing_ = trainable_ - 1;
  for (const Part& other : parts_) missing_ -= std::count(other.arrived.begin(), other.arrived.end(), 1);
}

/// Returns a view of the gradient's place. Making a view costs the host as much time as starting a copy, and the guard
/// Unrecorded takes time too, so views of the usual places are kept.
at::Tensor GradientPacker::view_of(const FlatGroup& group, std::size_t parameter, std::byte* place, bool is_usual) {
  const FlatParameter& flat = group.parameters[parameter];
  const auto make = [&] {
    const Unrecorded unrecorded;
    return memory_view(place, dtype_, flat.sizes, flat.strides, device_.device);
  };
  if (!device_.is_queued || !is_usual) return make();
  std::vector<PlaceView>& views = parts_[group.index].views[parameter];
  for (const PlaceView& known : views) {
    if (known.place == place) return known.view;
  }
  return views.emplace_back(PlaceView{place, make()}).view;
}

void GradientPacker::fill_missing(const FlatGroup& group, std::byte* bucket, bool gaps_are_zero) const {
  const auto element = static_cast<std::int64_t>(size_of(dtype_));
  const auto clear_extent = [&](Extent extent) { clear(bucket + extent.offset * element, extent.numel * element); };
  if (!gaps_are_zero) {
    for (Extent gap : group.layout.gaps()) clear_extent(gap);
  }
  const std::vector<char>& arrived = parts_[group.index].arrived;
  for (std::size_t i = seeded_fault(SeededFault::kFirstGradientNotCleared) ? 1 : 0; i < arrived.size(); ++i) {
    if (!arrived[i]) clear_extent(group.layout.extent(i));
  }
}

void GradientPacker::clear(std::byte* memory, std::int64_t bytes) const {
  if (!device_.is_queued) {
    std::memset(memory, 0, static_cast<std::size_t>(bytes));
    return;
  }
  const Unrecorded unrecorded;
  flat_view(memory, DType::kU8, bytes, device_.device).zero_();
}

}  // namespace tessera
