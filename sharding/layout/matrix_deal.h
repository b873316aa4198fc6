#pragma once

#include <cstddef>
#include <cstdint>
#include <span>
#include <vector>

#include "sharding/layout/placement.h"
#include "sharding/layout/shapes.h"

namespace tessera {

/// What the owners of matrices do with them.
struct MatrixWork {
  /// Muon: a direction comes in, and goes out orthogonal. Else a rule of whole tensors: gradient, master and states come in, and master and
  /// states go out.
  bool is_muon = true;
  /// It multiplies matrices, so that owners are balanced by products; else by elements.
  bool multiplies = true;
};

/// A matrix whose update needs all of it, and the rank that computes that update. Under rules of whole tensors, a tensor of any shape.
struct DealtMatrix {
  std::size_t unit = 0, group = 0, tensor = 0;
  Extent extent;  ///< of the group's flat buffer
  std::int64_t group_numel = 0;
  MatrixShape shape;
  int owner = 0;
  Extent states = {};  ///< of the group's tensor states
  std::int64_t states_numel = 0;
};

/// Matrices of neighbouring units that are exchanged and computed together.
struct MatrixBatch {
  std::size_t begin = 0, end = 0;            ///< among the deal's matrices
  std::size_t begin_unit = 0, end_unit = 0;  ///< all matrices of these units
  /// Elements between two ranks, on the way to owners and back, of the pair that has most; so all pairs' messages are this long. What
  /// an owner holds itself does not travel.
  std::int64_t collected = 0, returned = 0;
};

/// Deals matrices to ranks, so that every rank computes about as much. Integers only; the same on every rank.
///
/// Each rank holds some part of each matrix (its optimizer part), and of its states. In a batch, ranks send owners what they hold of the
/// owners' matrices (where several hold the same, the one in the owner's own replica does), owners compute, and send to each rank what it
/// holds of the results. A batch takes units until no rank computes kMostUneven times the mean, or all are taken: small batches need little memory,
/// and large ones are dealt evenly.
class MatrixDeal {
 public:
  static constexpr double kMostUneven = 1.1;

  MatrixDeal() = default;
  /// `optimizer`: how optimizer state is cut.
  MatrixDeal(std::span<const UnitShape> units, AxisPlacement optimizer, const MeshPosition& mesh, MatrixWork work = {});

  std::span<const DealtMatrix> matrices() const { return matrices_; }
  std::span<const MatrixBatch> batches() const { return batches_; }
  std::span<const DealtMatrix> matrices_of(const MatrixBatch& batch) const {
    return matrices().subspan(batch.begin, batch.end - batch.begin);
  }

  /// What `from` sends the owner `to` of its matrix: an extent of the group's flat buffer; numel 0: nothing.
  Extent collected_piece(const DealtMatrix& matrix, int from) const;
  /// And what the owner sends `to` of the result.
  Extent returned_piece(const DealtMatrix& matrix, int to) const;
  /// The same of its states: extents of the group's tensor states.
  Extent collected_states(const DealtMatrix& matrix, int from) const;
  Extent returned_states(const DealtMatrix& matrix, int to) const;
  /// Values of each element that owners collect: the gradient or direction, and under rules of whole tensors the master.
  int collected_values() const { return work_.is_muon ? 1 : 2; }

  /// Elements of each of the two buffers that a rank needs for its messages: as many ranks as there are times the longest message.
  std::int64_t exchange_numel() const;
  /// fp32 elements that an owner works in: room for all that comes in of the largest matrix, and for what orthogonalizing it takes.
  std::int64_t work_numel() const;
  /// Elements that a rank has of the matrices of a batch that it owns itself, each beginning on a cache line: the most of any rank and batch.
  std::int64_t own_numel() const;
  /// Elements of fp32 that `numel` take up where each piece begins on a cache line.
  static std::int64_t in_whole_lines(std::int64_t numel) { return (numel + 15) / 16 * 16; }
  /// What an owner computes, in units of its own: multiplications that orthogonalizing takes, or elements.
  static std::int64_t cost_of(MatrixShape shape, MatrixWork work = {});

 private:
  void deal(MatrixBatch& batch);
  bool is_even(const MatrixBatch& batch) const;
  void measure(MatrixBatch& batch) const;
  bool is_nearest(const DealtMatrix& matrix, int from) const;
  Extent part_of(Extent extent, std::int64_t buffer_numel, int rank) const;

  AxisPlacement axes_;
  MatrixWork work_;
  MeshPosition mesh_;
  std::vector<DealtMatrix> matrices_;
  std::vector<MatrixBatch> batches_;
};

}  // namespace tessera
