#pragma once

#include <cstddef>
#include <cstdint>
#include <span>
#include <vector>

#include "optim/arithmetic/instruction_set.h"
#include "optim/arithmetic/norm_tree.h"

namespace tessera {

// This file computes the squared 2-norm of all gradients, in fp64. The norm has the same bits for every layout of
// tensors in flat buffers, and for every division of buffers into parts.
//
// Each tensor has its own tree (norm_tree.h). A block's sum is made over 16 lanes (element i of the block goes to lane
// i mod 16), which are added in a fixed order. Squares of fp32 numbers are exact in fp64. A rank adds up the largest
// nodes that its part holds completely (NormSums) and sends their sums. Every rank then adds up the nodes above these
// in the same way (NormTotals). The sums of tensors are added in the order of the tensors' numbers, which do not depend
// on the layout.
//
// The nodes of a part depend only on the places of tensors, so every rank can compute them beforehand. Only sums are
// sent, and their number is the same in each step. If an element is infinite or NaN, the total is infinite or NaN too.

/// Takes one part's elements in order and adds up the nodes of its runs. The result has the same bits, however the
/// elements are divided into pieces. A NormSums allocates only when it is constructed. One thread at a time may use it.
///
///   sums.reset();  sums.add(piece); ...  sums.sums(), sums.finite()
class NormSums {
 public:
  /// `runs`: the runs that the part holds, in order. Elements between the runs are ignored.
  explicit NormSums(std::vector<NormRun> runs, InstructionSet set = best_instruction_set());

  std::span<const NormRun> runs() const { return runs_; }

  /// Begins again: the next element is the first element of the part.
  void reset();
  /// Adds the elements that follow those added so far. Throws `std::invalid_argument` if the piece ends inside a block
  /// of a tensor.
  void add(std::span<const float> piece);
  /// Skips to element `begin` of the part. Only whole tensors may be skipped; their elements count as zeros. Throws
  /// `std::invalid_argument` if `begin` lies before the end of the added elements, or inside a tensor.
  void skip_to(std::uint64_t begin);

  /// Returns one sum for each node, run by run, with the nodes of each run in order. Throws `std::logic_error` before
  /// all runs have been added.
  std::span<const double> sums() const;
  /// Returns the number of sums.
  std::size_t count() const { return count_; }
  /// Returns whether all sums are finite. They are finite if all elements are, since fp64 holds the squares of fp32
  /// numbers.
  bool finite() const;

 private:
  void add_blocks(const float* values, std::uint64_t numel);
  void begin_run();
  void end_run();

  std::vector<NormRun> runs_;
  double (*block_sum_)(const float* block, std::size_t numel);
  std::vector<double> sums_;  ///< [count_]: sums, followed by space for the stack of the last runs
  std::size_t count_ = 0;
  std::uint64_t at_ = 0;     ///< number of elements of the part that were added so far
  std::size_t run_ = 0;      ///< index of the run that comes next or is being added
  std::uint64_t block_ = 0;  ///< number of the next block in its tensor
  double* stack_ = nullptr;  ///< sums of the run's nodes so far, as a stack; it lies in the memory for the run's
                             ///< results
  std::size_t depth_ = 0;
};

/// Adds up the sums of all parts. All ranks get the same result. A NormTotals allocates memory only when it is made.
class NormTotals {
 public:
  /// `numels[t]`: the number of elements of tensor t. `parts[k]`: the runs of part k of all buffers, in the order in
  /// which their sums are sent. Throws `std::invalid_argument` unless the parts, in order, hold each block of every
  /// tensor once.
  NormTotals(std::span<const std::uint64_t> numels, std::span<const std::vector<NormRun>> parts);

  std::size_t tensors() const { return first_link_.size() - 1; }
  /// Returns the largest number of sums that one part sends.
  std::size_t most_sums() const { return most_sums_; }

  /// Writes each tensor's sum of squares to `squares` [tensors], and returns the sum of these, added in the order of
  /// the tensors' numbers. `sums[k]`: the sums that part k sent, aligned to 8 bytes.
  double add_up(std::span<const double* const> sums, std::span<double> squares) const;

  /// Kernels use the next two functions. The links of tensor t are links()[k] for first_link()[t] <= k < first_link()[t
  /// + 1].
  std::span<const NormLink> links() const { return links_; }
  std::span<const std::uint32_t> first_link() const { return first_link_; }

 private:
  std::vector<NormLink> links_;
  std::vector<std::uint32_t> first_link_ = {0};
  std::size_t most_sums_ = 0;
};

}  // namespace tessera
