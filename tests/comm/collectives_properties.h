#pragma once

#include <gtest/gtest.h>

#include <string>

#include "runtime/base/status.h"
#include "runtime/comm/collectives.h"
#include "tests/comm/reference.h"

namespace tessera {

// Properties that every transport must have. All ranks of a group call each function. The function checks its own
// rank's result, using inputs that every rank can compute. The functions throw exceptions, so that threads and forked
// processes can use them alike.

/// An exception that says which property failed. The functions below throw it.
struct PropertyFailed : std::runtime_error {
  using std::runtime_error::runtime_error;
};

inline void require(bool holds, const std::string& what) {
  if (!holds) throw PropertyFailed(what);
}
/// Makes no string if `holds`. Tests call it for each of millions of values.
inline void require(bool holds, const char* what) {
  if (!holds) throw PropertyFailed(what);
}
inline void require_ok(const absl::Status& status) {
  if (!status.ok()) throw PropertyFailed(message_of(status));
}

/// Gives a test its buffers, in memory of the group (`symmetric`) or in any other memory.
class TestMemory {
 public:
  TestMemory(Collectives& group, bool symmetric) : group_(group), symmetric_(symmetric) {}

  /// Returns a buffer with the alignment that sums require.
  std::byte* of(std::size_t bytes) {
    if (!symmetric_) return plain_.emplace_back(bytes + 1).data();
    auto buffer = group_.allocate(bytes);
    require_ok(buffer.status());
    return buffers_.emplace_back(*std::move(buffer))->data();
  }
  std::byte* of(const Bytes& content) {
    std::byte* data = of(content.size());
    if (!content.empty()) std::memcpy(data, content.data(), content.size());
    return data;
  }

 private:
  Collectives& group_;
  const bool symmetric_;
  std::vector<std::vector<std::byte>> plain_;
  std::vector<std::unique_ptr<CommBuffer>> buffers_;
};

inline Bytes part(const Bytes& all, std::size_t index, std::size_t bytes) {
  return Bytes(all.begin() + index * bytes, all.begin() + (index + 1) * bytes);
}

inline std::vector<Bytes> inputs_of_all(int ranks, DType dtype, std::size_t numel, std::uint32_t seed) {
  std::vector<Bytes> inputs;
  for (int q = 0; q < ranks; ++q) inputs.push_back(random_values(dtype, numel, seed * 1000 + q));
  return inputs;
}

inline bool equal(const std::byte* data, const Bytes& expected) {
  return expected.empty() || std::memcmp(data, expected.data(), expected.size()) == 0;
}

inline std::string at(const std::string& what, DType dtype, std::size_t numel, int rank) {
  return what + " of " + std::to_string(numel) + " " + std::string(name_of(dtype)) + ", rank " + std::to_string(rank);
}

inline void check_all_gather(Collectives& group, std::size_t bytes, bool symmetric, bool in_place) {
  TestMemory memory(group, symmetric);
  const auto inputs = inputs_of_all(group.size(), DType::kBF16, (bytes + 1) / 2, 7);
  std::byte* full = memory.of(bytes * group.size());
  const Bytes mine = part(inputs[group.rank()], 0, bytes);
  std::byte* shard = in_place ? full + group.rank() * bytes : memory.of(mine);
  if (in_place && bytes > 0) std::memcpy(shard, mine.data(), bytes);
  require_ok(group.all_gather("gather", shard, full, bytes).wait());
  for (int q = 0; q < group.size(); ++q)
    require(equal(full + q * bytes, part(inputs[q], 0, bytes)), at("all_gather", DType::kU8, bytes, group.rank()));
}

inline void check_reduce_scatter(Collectives& group, DType dtype, std::size_t numel, bool symmetric, bool in_place) {
  TestMemory memory(group, symmetric);
  const auto inputs = inputs_of_all(group.size(), dtype, numel * group.size(), 11);
  std::byte* input = memory.of(inputs[group.rank()]);
  in_place = in_place && dtype == DType::kF32;
  auto* output = reinterpret_cast<float*>(in_place ? input + group.rank() * numel * 4 : memory.of(numel * 4));
  require_ok(group.reduce_scatter("scatter", input, dtype, output, numel).wait());
  const auto expected = reference_sum(inputs, dtype, group.rank() * numel, numel);
  require(same_bits(std::vector<float>(output, output + numel), expected),
          at("reduce_scatter", dtype, numel, group.rank()));
}

inline void check_all_reduce(Collectives& group, DType dtype, std::size_t numel, bool symmetric, bool in_place) {
  TestMemory memory(group, symmetric);
  const auto inputs = inputs_of_all(group.size(), dtype, numel, 13);
  std::byte* input = memory.of(inputs[group.rank()]);
  in_place = in_place && dtype == DType::kF32;
  auto* output = reinterpret_cast<float*>(in_place ? input : memory.of(numel * 4));
  require_ok(group.all_reduce("reduce", input, dtype, output, numel).wait());
  const std::vector<float> result(output, output + numel);
  require(same_bits(result, reference_sum(inputs, dtype, 0, numel)), at("all_reduce", dtype, numel, group.rank()));
}

/// Checks the rules of SumVisitor, and records the values that it saw.
class RecordingVisitor : public SumVisitor {
 public:
  explicit RecordingVisitor(std::size_t expected) : expected_(expected) {}
  void visit(std::size_t offset, const float* values, std::size_t numel) override {
    require(offset == seen_.size() && offset % kAlignment == 0 && numel > 0, "pieces are in order and aligned");
    seen_.insert(seen_.end(), values, values + numel);
    require(seen_.size() <= expected_, "pieces end with the output");
  }
  const std::vector<float>& seen() const { return seen_; }

 private:
  const std::size_t expected_;
  std::vector<float> seen_;
};

/// Returns whether a visitor sees sums. It cannot see sums in a GPU's memory.
inline bool sums_are_seen(const Collectives& group) { return group.transport() != "cuda_host"; }

/// Checks that a visitor sees the whole output and nothing else, and changes nothing.
inline void check_visited_sums(Collectives& group, DType dtype, std::size_t numel, bool symmetric, bool in_place) {
  if (!sums_are_seen(group)) return;
  in_place = in_place && dtype == DType::kF32;
  TestMemory memory(group, symmetric);
  const auto inputs = inputs_of_all(group.size(), dtype, numel * group.size(), 29);
  std::byte* input = memory.of(inputs[group.rank()]);
  const std::size_t first = group.rank() * numel;
  auto* output = reinterpret_cast<float*>(in_place ? input + first * 4 : memory.of(numel * 4));
  RecordingVisitor scattered(numel);
  require_ok(group.reduce_scatter("visited", input, dtype, output, numel, &scattered).wait());
  require(same_bits(scattered.seen(), reference_sum(inputs, dtype, first, numel)),
          at("visited reduce_scatter", dtype, numel, group.rank()));
  require(same_bits(scattered.seen(), {output, output + numel}), "reduce_scatter has another output");

  input = memory.of(inputs[group.rank()]);
  output = reinterpret_cast<float*>(in_place ? input : memory.of(numel * 4));
  RecordingVisitor reduced(numel);
  require_ok(group.all_reduce("visited", input, dtype, output, numel, &reduced).wait());
  require(same_bits(reduced.seen(), reference_sum(inputs, dtype, 0, numel)),
          at("visited all_reduce", dtype, numel, group.rank()));
  require(same_bits(reduced.seen(), {output, output + numel}), "all_reduce has another output");
}

/// Starts all-reduces and reduce-scatters that are under way together, advances them late or never, and makes a
/// blocking call between them. Checks that each reduction has its own sum, and that its visitor sees this sum once. If
/// `symmetric`, the buffers of every fourth reduction are nevertheless outside of the group's memory.
inline void check_started_reductions(Collectives& group, std::size_t numel, bool symmetric) {
  struct Started {
    std::vector<Bytes> inputs;
    DType dtype;
    bool scatters;
    std::byte* input;
    float* output;
    std::unique_ptr<RecordingVisitor> visitor;
    Work work;
  };
  TestMemory shared(group, symmetric), elsewhere(group, false);
  const int ranks = group.size(), rank = group.rank();
  constexpr DType kTypes[] = {DType::kF32, DType::kBF16, DType::kF16};
  std::vector<Started> started(12);
  for (std::size_t i = 0; i < started.size(); ++i) {
    Started& reduction = started[i];
    reduction.dtype = kTypes[i % 3];
    reduction.scatters = i % 2 == 0;
    reduction.inputs = inputs_of_all(ranks, reduction.dtype, numel * ranks, 31 + static_cast<std::uint32_t>(i));
    TestMemory& memory = i % 4 == 3 ? elsewhere : shared;
    reduction.input = memory.of(reduction.inputs[rank]);
    reduction.output = reinterpret_cast<float*>(memory.of(numel * sizeof(float)));
    if (sums_are_seen(group)) reduction.visitor = std::make_unique<RecordingVisitor>(numel);
  }
  const auto start = [&](Started& reduction) {
    const auto run = [&](auto operation) {
      return (group.*operation)("started", reduction.input, reduction.dtype, reduction.output, numel,
                                ReduceOptions(reduction.visitor.get(), Waits::kLater));
    };
    reduction.work = reduction.scatters ? run(&Collectives::reduce_scatter) : run(&Collectives::all_reduce);
  };
  const auto end = [&](Started& reduction) {
    require_ok(reduction.work.wait());
    const std::size_t first = reduction.scatters ? rank * numel : 0;
    const auto expected = reference_sum(reduction.inputs, reduction.dtype, first, numel);
    const std::string what = reduction.scatters ? "started reduce_scatter" : "started all_reduce";
    require(same_bits({reduction.output, reduction.output + numel}, expected), at(what, reduction.dtype, numel, rank));
    const bool seen = !reduction.visitor || same_bits(reduction.visitor->seen(), expected);
    require(seen, at("visited " + what, reduction.dtype, numel, rank));
    std::memset(reduction.input, 0xff, reduction.inputs[rank].size());  // the input may be overwritten now
  };
  std::size_t ended = 0;
  for (std::size_t i = 0; i < started.size(); ++i) {
    start(started[i]);
    if (i >= 3 && i % 4 == 0) require_ok(started[i - 3].work.advance());
    if (i == 5) require_ok(group.barrier("while reductions are under way").wait());
    if (i >= 6) end(started[ended++]);
  }
  while (ended < started.size()) end(started[ended++]);
}

/// Checks that peers find the values that a rank writes into common memory. Also checks that collectives use this
/// memory for input and output without writing another rank's part. REQUIRES: group.shares_memory().
inline void check_common_memory(Collectives& group, std::size_t numel) {
  const std::size_t ranks = group.size(), rank = group.rank(), bytes = numel * sizeof(float);
  auto buffer = group.allocate_common(2 * ranks * bytes);
  require_ok(buffer.status());
  require((*buffer)->bytes() == 2 * ranks * bytes, "size of common memory");
  auto* full = reinterpret_cast<float*>((*buffer)->data());
  float* mine = full + rank * numel;
  const auto expect_rounds = [&](float round, const std::string& where) {
    for (std::size_t i = 0; i < ranks * numel; ++i)
      if (full[i] != round + static_cast<float>(i)) require(false, where + " at " + std::to_string(i));
  };
  const auto write_own = [&](float round) {
    for (std::size_t i = 0; i < numel; ++i) mine[i] = round + static_cast<float>(rank * numel + i);
  };
  for (std::size_t i = 0; i < 2 * ranks * numel; ++i) require(full[i] == 0, "common memory is zero at first");
  require_ok(group.barrier("seen zero").wait());
  // These gathers are in place. A rank writes again as soon as it is allowed to, so that a late write to a peer's part
  // would be found.
  for (int round = 1; round <= 20; ++round) {
    write_own(static_cast<float>(round));
    require_ok(group.all_gather("in place", mine, full, bytes).wait());
    expect_rounds(static_cast<float>(round), "gather in place");
    require_ok(group.barrier("read").wait());
  }
  std::vector<float> shard(numel);
  for (std::size_t i = 0; i < numel; ++i) shard[i] = 100 + static_cast<float>(rank * numel + i);
  require_ok(group.all_gather("from elsewhere", shard.data(), full, bytes).wait());
  expect_rounds(100, "gather from elsewhere");

  float* sums = full + ranks * numel;  // the second half has a slice for each rank
  require_ok(group.reduce_scatter("sum", full, DType::kF32, sums + rank * numel, numel).wait());
  require_ok(group.barrier("summed").wait());
  // All ranks gave the same addends. Sums of few equal integers are exact in any order.
  for (std::size_t i = 0; i < ranks * numel; ++i)
    if (sums[i] != static_cast<float>(ranks) * full[i]) require(false, "sum of common memory at " + std::to_string(i));
  require_ok(group.barrier("read").wait());

  for (int root = 0; root < group.size(); ++root) {
    if (group.rank() == root) std::fill_n(sums, numel, static_cast<float>(root + 5));
    require_ok(group.broadcast("common", sums, bytes, root).wait());
    for (std::size_t i = 0; i < numel; ++i) require(sums[i] == static_cast<float>(root + 5), "broadcast");
    require_ok(group.barrier("read").wait());
  }
  // The memory stays until the last rank releases it.
  if (rank == 0) buffer->reset();
  require_ok(group.barrier("rank 0 let go").wait());
  if (rank != 0) expect_rounds(100, "after another rank let go");
}

inline void check_broadcast(Collectives& group, std::size_t bytes, bool symmetric) {
  TestMemory memory(group, symmetric);
  for (int root = 0; root < group.size(); ++root) {
    const auto inputs = inputs_of_all(group.size(), DType::kBF16, (bytes + 1) / 2, 17 + root);
    std::byte* data = memory.of(inputs[group.rank()]);
    require_ok(group.broadcast("broadcast", data, bytes, root).wait());
    require(equal(data, part(inputs[root], 0, bytes)), at("broadcast", DType::kU8, bytes, group.rank()));
  }
}

inline void check_all_to_all(Collectives& group, std::size_t bytes, bool symmetric) {
  TestMemory memory(group, symmetric);
  const auto inputs = inputs_of_all(group.size(), DType::kBF16, bytes * group.size(), 23);
  std::byte* input = memory.of(inputs[group.rank()]);
  std::byte* output = memory.of(bytes * group.size());
  require_ok(group.all_to_all("exchange", input, output, bytes).wait());
  for (int q = 0; q < group.size(); ++q)
    require(equal(output + q * bytes, part(inputs[q], group.rank(), bytes)),
            at("all_to_all", DType::kU8, bytes, group.rank()));
}

/// Checks every operation with every dtype and odd sizes (with at most `largest` elements), in place and out of place.
inline void check_all_operations(Collectives& group, bool symmetric, std::size_t largest = 70001) {
  for (std::size_t numel :
       {std::size_t{0}, std::size_t{1}, std::size_t{15}, std::size_t{1037}, std::size_t{8200}, largest}) {
    if (numel > largest) continue;
    for (bool in_place : {false, true}) {
      check_all_gather(group, numel, symmetric, in_place);
      for (DType dtype : {DType::kF32, DType::kBF16, DType::kF16}) {
        check_reduce_scatter(group, dtype, numel / group.size(), symmetric, in_place);
        check_all_reduce(group, dtype, numel, symmetric, in_place);
        check_visited_sums(group, dtype, numel / group.size(), symmetric, in_place);
      }
    }
    check_started_reductions(group, numel / group.size(), symmetric);
    check_broadcast(group, numel, symmetric);
    check_all_to_all(group, numel / group.size() | 1, symmetric);
    require_ok(group.barrier("barrier").wait());
    if (group.shares_memory() && symmetric) check_common_memory(group, numel / group.size());
  }
}

}  // namespace tessera
