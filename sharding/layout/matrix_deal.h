#pragma once

// See docs/glossary.md: dealt, unit.

#include <cstddef>
#include <cstdint>
#include <span>
#include <vector>

#include "sharding/layout/placement.h"
#include "sharding/layout/shapes.h"

namespace tessera {

/// The work that the owner of a matrix does.
struct MatrixWork {
  /// If true, the rule is Muon: the owner gets a direction, makes it orthogonal, and sends it back. If false, it is a
  /// rule of whole tensors: the owner gets gradient, master and states, and sends master and states back.
  bool is_muon = true;
  /// If true, the rule multiplies matrices, so owners are balanced by the number of products. If false, they are
  /// balanced by elements.
  bool multiplies = true;
};

/// A matrix whose update needs the whole matrix, and the rank that computes the update. Rules of whole tensors take a
/// tensor of any shape.
struct DealtMatrix {
  std::size_t unit = 0, group = 0, tensor = 0;
  Extent extent;  ///< part of the group's flat buffer
  std::int64_t group_numel = 0;
  MatrixShape shape;
  int owner = 0;
  Extent states = {};  ///< part of the group's tensor states
  std::int64_t states_numel = 0;
};

/// Matrices of neighbouring units that are exchanged and updated together.
struct MatrixBatch {
  std::size_t begin = 0, end = 0;            ///< indices among the deal's matrices
  std::size_t begin_unit = 0, end_unit = 0;  ///< the units to which these matrices belong
  /// The largest numbers of elements that any pair of ranks exchanges: in messages to owners, and in messages back. All
  /// messages have these lengths. The owner's own part is not sent.
  std::int64_t collected = 0, returned = 0;
};

/// Deals matrices to ranks, so that all ranks have about the same amount of work. The result consists of integers,
/// which are the same on every rank.
///
/// Each rank holds a part of each matrix (its optimizer part), and of the matrix's states. A batch is exchanged
/// together. The rank to which a matrix is dealt is the matrix's owner. The other ranks send the owner their parts of
/// the matrix. The owner computes, and sends each rank its part of the result. If several ranks hold the same part, the
/// rank in the owner's replica sends it. Units are added to a batch until no rank has more than kMostUneven times the
/// mean amount of work, or until all units are taken. Small batches need little memory, and large batches are dealt
/// evenly.
class MatrixDeal {
 public:
  static constexpr double kMostUneven = 1.1;

  MatrixDeal() = default;
  /// `optimizer` says how optimizer state is cut over the mesh. If `by_unit` is true, units are updated one by one, in
  /// backward. In this case a batch has the matrices of one unit, even if they cannot be dealt evenly.
  MatrixDeal(std::span<const UnitShape> units, AxisPlacement optimizer, const MeshPosition& mesh, MatrixWork work = {},
             bool by_unit = false);

  std::span<const DealtMatrix> matrices() const { return matrices_; }
  std::span<const MatrixBatch> batches() const { return batches_; }
  /// Returns the batch of a unit's matrices; null if the unit has no matrices. REQUIRES: matrices were dealt by unit.
  const MatrixBatch* batch_of(std::size_t unit) const;
  std::span<const DealtMatrix> matrices_of(const MatrixBatch& batch) const {
    return matrices().subspan(batch.begin, batch.end - batch.begin);
  }

  /// Returns the part that rank `from` sends to the owner of the matrix, as an extent of the group's flat buffer; numel
  /// is 0 if the rank sends nothing.
  Extent collected_piece(const DealtMatrix& matrix, int from) const;
  /// Returns the part of the result that the owner sends to rank `to`, as an extent of the group's flat buffer.
  Extent returned_piece(const DealtMatrix& matrix, int to) const;
  /// These functions return the same pieces of the matrix's states, as extents of the group's tensor states.
  Extent collected_states(const DealtMatrix& matrix, int from) const;
  Extent returned_states(const DealtMatrix& matrix, int to) const;
  /// Returns the number of values that owners collect for each element: the gradient or direction, and under rules of
  /// whole tensors also the master.
  int collected_values() const { return work_.is_muon ? 1 : 2; }

  /// Returns the number of elements of each of the two buffers in which a rank exchanges messages: the number of ranks
  /// times the longest message.
  std::int64_t exchange_numel() const;
  /// Returns the number of fp32 elements of an owner's memory: for all data that it gets for the largest matrix, and
  /// for the scratch of orthogonalization.
  std::int64_t work_numel() const;
  /// Returns the number of elements of a rank's parts of the matrices that it owns in one batch. It is the largest such
  /// number of all ranks and batches. Each part begins on a cache line.
  std::int64_t own_numel() const;
  /// Returns `numel`, a number of fp32 elements, rounded up to whole cache lines, since each piece begins on a cache
  /// line.
  static std::int64_t in_whole_lines(std::int64_t numel) { return rounded_up(numel, 16); }
  /// Returns the work that one matrix makes for its owner, as a number for comparison: the number of products if
  /// `work.multiplies`, or else the number of elements.
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

/// Returns the number of fp32 elements of scratch with which one rank, or one server, updates any matrix of a group
/// where it lies, without an exchange. `is_cut` says whether masters and states lie in several parts, and are joined
/// first. The result is 0 if the group has no matrices.
std::int64_t work_where_it_lies(const GroupShape& group, MatrixWork work, bool is_cut);

}  // namespace tessera
