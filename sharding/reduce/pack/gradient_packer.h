#pragma once

// See docs/glossary.md: unit.

#include <ATen/core/Tensor.h>

#include <cstdint>
#include <span>
#include <vector>

#include "sharding/compute_device.h"
#include "sharding/reduce/pack/gradient_squares.h"
#include "sharding/reduce/pack/pending_copies.h"
#include "sharding/unit.h"

namespace tessera {

/// Packs the gradients of one unit into its bucket, and records which gradients have arrived. `bucket` is the address
/// of the group's part of the bucket, which has elements of `dtype` in the group's layout. Reducer owns a
/// GradientPacker for each unit; the thread that runs backward calls it.
class GradientPacker {
 public:
  /// `copies` has copies that wait to be started together; it must outlive this object.
  GradientPacker(const Unit& unit, DType dtype, ComputeDevice device, PendingCopies& copies);

  /// Returns the number of parameters that train.
  std::int64_t trainable() const { return trainable_; }
  /// Sets the parameters that are expected to get a gradient each time, from the next `begin` on. These are the
  /// parameters whose entry in `used` [trainable parameter of the unit, in group order] is not 0. Before the first call
  /// all parameters are expected.
  void expect(std::span<const char> used);
  bool expects_any() const { return usually_missing_ > 0; }
  /// Returns whether every expected gradient has arrived since `begin`. When an unexpected gradient arrives, all
  /// gradients become expected, since parameters that were unused together are usually used together again.
  bool is_complete() const { return missing_ == 0; }
  /// Returns whether this parameter's gradient has arrived since `reset`.
  bool used(const FlatGroup& group, std::size_t parameter) const { return parts_[group.index].used[parameter] != 0; }

  /// Allocates memory for `square`: a number for each parameter that trains. It is called once, before the first
  /// gradient.
  void keep_squares();
  /// Sets whether gradients that arrive from now on are squared. REQUIRES: `keep_squares` was called.
  void squares(bool on) { squares_ = on; }
  /// Returns the squared norm of the gradients in the bucket. REQUIRES: all of them arrived while gradients were
  /// squared.
  double square() const;
  /// Appends to `pieces` the places in `bucket` of the group's gradients that have arrived.
  void add_pieces(const FlatGroup& group, const std::byte* bucket, std::vector<GradientPiece>& pieces) const;

  /// It is called when the unit gets an empty bucket, in which no gradient has arrived.
  void begin();
  /// It is called at the end of a step. Afterwards no parameter counts as used.
  void reset();
  /// Copies `gradient` to its place, or adds it to an earlier gradient. On a GPU, small gradients wait among `copies`.
  /// `is_usual` is true if the bucket is one of the few that this unit gets again and again.
  void take(const FlatGroup& group, std::size_t parameter, const at::Tensor& gradient, std::byte* bucket,
            bool is_usual);
  /// Takes a gradient that must not enter the sum: writes zeros, unless there is an earlier gradient. The parameter
  /// does not become used.
  void take_zeros(const FlatGroup& group, std::size_t parameter, std::byte* bucket);
  /// Writes zeros to the places of missing gradients, and to the layout's gaps unless the gaps are zero already.
  void fill_missing(const FlatGroup& group, std::byte* bucket, bool gaps_are_zero) const;

 private:
  /// A parameter's place in one of its unit's buckets.
  struct PlaceView {
    std::byte* place;
    at::Tensor view;
  };
  /// The data of this object about one group.
  struct Part {
    std::vector<char> arrived, used;            ///< [parameter]: whether its gradient has arrived since `begin`, and
                                                ///< since `reset`
    std::vector<char> expected;                 ///< [parameter]: whether a gradient is expected (see `expect`)
    std::vector<std::vector<PlaceView>> views;  ///< [parameter]: views of its usual places, on a GPU
    std::vector<double> squares;                ///< [parameter]: square of the values at its place; empty if squares
                                                ///< are not kept
  };

  at::Tensor view_of(const FlatGroup& group, std::size_t parameter, std::byte* place, bool is_usual);
  void note_arrival(Part& part, std::size_t parameter);
  void clear(std::byte* memory, std::int64_t bytes) const;

  const DType dtype_;
  const ComputeDevice device_;
  PendingCopies& copies_;
  std::int64_t trainable_ = 0;
  /// The number of gradients that an empty bucket expects, and the number of expected gradients that have not arrived
  /// yet.
  std::int64_t usually_missing_ = 0, missing_ = 0;
  bool expects_all_ = false;  ///< whether an unexpected gradient has arrived
  bool squares_ = false;
  std::vector<Part> parts_;
};

}  // namespace tessera
