#include "runtime/comm/c10d/c10d_collectives.h"

#include <absl/container/inlined_vector.h>

#include <algorithm>
#include <bit>
#include <cstring>
#include <functional>
#include <future>
#include <optional>
#include <utility>

#include "runtime/base/status.h"
#include "runtime/comm/c10d/c10d_calls.h"
#include "runtime/comm/c10d/packing.h"
#include "runtime/comm/c10d/run_rounds.h"
#include "runtime/comm/c10d/transfers.h"
#include "runtime/comm/call.h"
#include "runtime/comm/compose/background.h"
#include "runtime/comm/compose/call_thread.h"
#include "runtime/comm/local/plain_buffer.h"
#include "runtime/comm/rounds/call_work.h"
#include "runtime/comm/rounds/gather_rounds.h"
#include "runtime/comm/rounds/halving_rounds.h"
#include "runtime/comm/sum/pairwise_sum.h"
#include "runtime/comm/sum/sum_method.h"
#include "runtime/comm/sum/visited_sum.h"
#include "runtime/comm/sum/wire_codec.h"

// Collectives over a c10d backend. C10dCalls begins each call and waits for it, or the group's thread makes the whole
// call (PendingOnThread). Reductions are split into pieces of kPieceBytes, so that one piece is summed while the next
// piece is on the wire. The staging memory holds two pieces. Five functions make reductions: `scatter` (reduce-scatter,
// direct), `reduce_small` (all-reduce by gathering everything), `reduce_large` (all-reduce by exchange, sum and
// gather), and `scatter_in_rounds` and `reduce_in_rounds`, which run the halving algorithm.

namespace tessera {
namespace {

/// Returns the number of elements in a piece, out of `numel` elements of `element_bytes`. It is a multiple of
/// `multiple` and of SumVisitor::kAlignment, unless one piece holds all elements.
std::size_t piece_numel(std::size_t numel, std::size_t element_bytes, std::size_t multiple) {
  const std::size_t step = multiple * SumVisitor::kAlignment;
  return std::min(numel, std::max<std::size_t>(1, kPieceBytes / (element_bytes * step)) * step);
}

/// Returns the codec with which contributions to a sum of `numel` elements are sent.
WireCoding coding_of_contributions(const ReduceOptions& options, DType dtype, std::size_t numel) {
  return {options.contributions, dtype, options.feedback, {options.encoded, numel}};
}

/// The codecs with which contributions to a sum of `numel` elements are sent, and with which the sums are sent on.
struct Codings {
  Codings(const ReduceOptions& options, DType dtype, std::size_t numel)
      : contributions(coding_of_contributions(options, dtype, numel)), sums(options.sums, DType::kF32) {}
  bool round() const { return contributions.rounds() || sums.rounds(); }

  WireCoding contributions, sums;
};

/// Returns whether a message of `numel` elements has other bytes than the elements. If so, the call uses kDirect.
bool changes(const WireCoding& coding, std::size_t numel) {
  return coding.rounds() || (coding.packs() && is_packed(*coding.packs(), coding.bytes(numel)));
}

/// Returns whether the transport's backend can send messages, and takes calls from any thread. A user's own backend may
/// have only collectives, and may expect all its calls on one thread.
bool has_messages(TransportKind kind) { return kind == TransportKind::kGloo || kind == TransportKind::kMpi; }

class C10dCollectives : public Collectives, private C10dCalls {
 public:
  C10dCollectives(const Group& group, TransportKind kind, Backend backend, std::shared_ptr<KeyValueStore> store,
                  ChooseAlgorithm choose)
      : C10dCalls(group, std::move(backend), std::move(store),
                  has_messages(kind) ? Transfers::Means::kMessages : Transfers::Means::kCollective),
        kind_(kind),
        choose_(means_ == Transfers::Means::kMessages ? std::move(choose) : nullptr) {}

  int rank() const override { return group_.rank; }
  int size() const override { return group_.size(); }
  TransportKind kind() const override { return kind_; }
  bool gathers_in_background() const override { return means_ == Transfers::Means::kMessages; }
  int compressed_part() const override { return 1; }
  std::string transport() const override { return name_; }

  absl::StatusOr<std::unique_ptr<CommBuffer>> allocate(std::size_t bytes) override {
    TESSERA_RETURN_IF_ERROR(status());
    return std::unique_ptr<CommBuffer>(std::make_unique<PlainBuffer>(bytes));
  }
  Work broadcast(std::string_view label, void* data, std::size_t bytes, int root) override;
  Work all_to_all(std::string_view label, const void* input, void* output, std::size_t bytes_per_rank) override;
  Work barrier(std::string_view label) override;
  void abort(const absl::Status& reason) override { C10dCalls::abort(reason); }
  void leave() override { C10dCalls::leave(); }
  absl::Status status() const override { return C10dCalls::status(); }
  bool end_if_left_alone(HasKey has_key) override { return C10dCalls::end_if_left_alone(has_key); }

 protected:
  Work do_all_gather(const GatherCall& call) override;
  Work do_reduce(const ReduceCall& call) override;

 private:
  class PendingOnThread;

  /// Chooses the algorithm of an uncompressed call in which each rank gives `bytes`.
  Algorithm algorithm_of(Operation operation, DType dtype, std::size_t bytes) const;
  /// Does the same as `start`, but the group's thread begins the call, after the work that was given to the thread
  /// before.
  Work start_on_thread(const CallSignature& call, Start start);
  Work on_thread(std::function<absl::Status()> call);
  Work start_gather(const CallSignature& call, const void* shard, void* full, std::size_t bytes,
                    std::optional<DType> packs = std::nullopt);
  bool codes(const GatherOptions& options, std::size_t bytes) const;
  absl::Status gather_coded(const CallSignature& call, const WireCoding& coding, const std::byte* shard,
                            std::byte* full, std::size_t numel);
  /// Returns a function that makes a gather in rounds and returns when all rounds are over.
  Start gather_in_rounds(const CallSignature& call, Algorithm algorithm, const void* shard, void* full,
                         std::size_t bytes) const;
  Work start_exchange(const CallSignature& call, RankParts<const void> input, void* output, std::size_t bytes,
                      std::optional<DType> packs = std::nullopt);
  /// Returns memory of the group for data on the wire; its old content is lost.
  std::byte* staging(std::size_t bytes);

  /// The ranks' contributions to a sum, as they are on the wire. This rank's contribution lies in `own`; this rank's
  /// part of `parts` is not read.
  struct Contributions {
    RankParts<const std::byte> parts;
    const std::byte* own;
    const WireCoding& coding;
  };
  void sum_parts(const Contributions& contributions, float* output, std::size_t numel, SumVisitor* visitor = nullptr,
                 std::size_t offset = 0) const;
  absl::Status scatter(const CallSignature& call, const std::byte* input, float* output, std::size_t numel,
                       const ReduceOptions& options);
  absl::Status scatter_in_rounds(const CallSignature& call, const std::byte* input, float* output, std::size_t numel,
                                 SumVisitor* visitor);
  absl::Status reduce_in_rounds(const CallSignature& call, const std::byte* input, float* output, std::size_t numel,
                                SumVisitor* visitor);
  absl::Status make_rounds(const CallSignature& call, const Rounds& rounds, const RoundBuffers& buffers);
  absl::Status reduce_small(const CallSignature& call, const std::byte* input, float* output, std::size_t numel,
                            const ReduceOptions& options, Algorithm algorithm);
  absl::Status reduce_large(const CallSignature& call, const std::byte* input, float* output, std::size_t numel,
                            const ReduceOptions& options);

  const TransportKind kind_;
  const ChooseAlgorithm choose_;  ///< null: every call uses kDirect
  CallThread thread_;             // the last member is destroyed first, since its calls need the other members
};

/// A call that the group's thread makes.
class C10dCollectives::PendingOnThread : public Work::State {
 public:
  explicit PendingOnThread(std::future<absl::Status> end) : end_(std::move(end)) {}
  ~PendingOnThread() override {
    if (end_.valid()) end_.wait();
  }
  absl::Status wait() override { return end_.get(); }

 private:
  std::future<absl::Status> end_;
};

Algorithm C10dCollectives::algorithm_of(Operation operation, DType dtype, std::size_t bytes) const {
  if (!choose_ || size() == 1 || bytes == 0) return Algorithm::kDirect;
  const Algorithm chosen = choose_(operation, size(), dtype, bytes);
  return has_algorithm(operation, chosen, bytes) ? chosen : Algorithm::kDirect;
}

Work C10dCollectives::start_on_thread(const CallSignature& call, Start start) {
  return on_thread([this, call, start = std::move(start)] { return this->start(call, start).wait(); });
}

Work C10dCollectives::on_thread(std::function<absl::Status()> call) {
  if (const absl::Status failed = status(); !failed.ok()) return Work(failed);
  return Work(std::make_unique<PendingOnThread>(thread_.push(std::move(call))));
}

// --- Moving bytes ---

/// Returns the tag of a call's messages. Messages of two calls that differ in anything never match. The ranks of such
/// calls therefore wait until the time limit, and then report their state.
int tag_of(const CallSignature& call) { return static_cast<int>(digest_of(call) >> 34) * 2; }
int gather_tag_of(const CallSignature& call) { return tag_of(call) + 1; }

Work C10dCollectives::start_gather(const CallSignature& call, const void* shard, void* full, std::size_t bytes,
                                   std::optional<DType> packs) {
  return start(call, [&](c10d::Backend& backend, Transfers& transfers) {
    transfers.gather_packed(backend, gather_tag_of(call), packs, shard, {full, bytes}, bytes);
  });
}

C10dCollectives::Start C10dCollectives::gather_in_rounds(const CallSignature& call, Algorithm algorithm,
                                                         const void* shard, void* full, std::size_t bytes) const {
  return [=, this](c10d::Backend& backend, Transfers& transfers) {
    RoundBuffers buffers{
        .begins = {0}, .results = static_cast<std::byte*>(full), .result_dtype = DType::kU8, .received = nullptr};
    for (int q = 0; q < size(); ++q) buffers.begins.push_back(buffers.begins.back() + bytes);
    std::byte* const own = buffers.results + static_cast<std::size_t>(rank()) * bytes;
    if (own != shard) std::memcpy(own, shard, bytes);
    const Rounds rounds = algorithm == Algorithm::kRing ? ring_gather(rank(), size()) : doubling_gather(rank(), size());
    run_rounds(backend, transfers, gather_tag_of(call), rounds, buffers);
  };
}

Work C10dCollectives::start_exchange(const CallSignature& call, RankParts<const void> input, void* output,
                                     std::size_t bytes, std::optional<DType> packs) {
  return start(call, [&](c10d::Backend& backend, Transfers& transfers) {
    transfers.exchange(backend, tag_of(call), input, output, bytes, packs);
  });
}

/// Returns whether a gather encodes its elements to send them. Elements that are not floating point are sent unchanged.
bool C10dCollectives::codes(const GatherOptions& options, std::size_t bytes) const {
  const WireCoding coding(options.form, options.dtype);
  if (!changes(coding, bytes / size_of(options.dtype))) return false;
  return coding.rounds() ? is_reducible(options.dtype) : means_ == Transfers::Means::kMessages;
}

// Gathers piece by piece. While one piece is on the wire, the next piece is packed or rounded, so memory for two pieces
// suffices.
absl::Status C10dCollectives::gather_coded(const CallSignature& call, const WireCoding& coding, const std::byte* shard,
                                           std::byte* full, std::size_t numel) {
  const std::size_t ranks = size(), element = size_of(call.dtype), bytes = numel * element;
  const std::size_t most = piece_numel(numel * ranks, element, ranks) / ranks;
  Work under_way;
  for (std::size_t first = 0; first < numel; first += most) {
    const std::size_t count = std::min(most, numel - first), at = first * element;
    Work begun = start(call, [&](c10d::Backend& backend, Transfers& transfers) {
      transfers.gather_coded(backend, gather_tag_of(call), coding, shard + at, {full + at, bytes}, count);
    });
    TESSERA_RETURN_IF_ERROR(std::exchange(under_way, std::move(begun)).wait());
  }
  return under_way.wait();
}

Work C10dCollectives::do_all_gather(const GatherCall& given) {
  const auto& [label, shard, full, bytes_per_rank, options] = given;
  if (size() > 1 && codes(options, bytes_per_rank)) {
    const std::size_t numel = bytes_per_rank / size_of(options.dtype);
    const CallSignature call = begin(Operation::kAllGather, label, options.dtype, numel);
    const auto gather = [this, call, given, numel] {
      return gather_coded(call, {given.options.form, given.options.dtype}, static_cast<const std::byte*>(given.shard),
                          static_cast<std::byte*>(given.full), numel);
    };
    return means_ == Transfers::Means::kCollective ? Work(gather()) : on_thread(gather);
  }
  const CallSignature call = begin(Operation::kAllGather, label, DType::kU8, bytes_per_rank);
  const Algorithm algorithm = algorithm_of(Operation::kAllGather, DType::kU8, bytes_per_rank);
  if (algorithm == Algorithm::kDirect) return start_gather(call, shard, full, bytes_per_rank);
  return start_on_thread(call, gather_in_rounds(call, algorithm, shard, full, bytes_per_rank));
}

Work C10dCollectives::all_to_all(std::string_view label, const void* input, void* output, std::size_t bytes_per_rank) {
  const CallSignature call = begin(Operation::kAllToAll, label, DType::kU8, bytes_per_rank);
  Work work = start_exchange(call, {input, bytes_per_rank}, output, bytes_per_rank);
  const std::size_t own = static_cast<std::size_t>(rank()) * bytes_per_rank;
  if (bytes_per_rank > 0 && means_ == Transfers::Means::kMessages)
    std::memcpy(static_cast<std::byte*>(output) + own, static_cast<const std::byte*>(input) + own, bytes_per_rank);
  return work;
}

Work C10dCollectives::broadcast(std::string_view label, void* data, std::size_t bytes, int root) {
  const CallSignature call = begin(Operation::kBroadcast, label, DType::kU8, bytes, root);
  if (root < 0 || root >= size())
    return refuse(call, "root is " + std::to_string(root) + " of " + std::to_string(size()) + " ranks");
  return start(call,
               [&](c10d::Backend& backend, Transfers& transfers) { transfers.broadcast(backend, data, bytes, root); });
}

Work C10dCollectives::barrier(std::string_view label) {
  return start(begin(Operation::kBarrier, label, DType::kU8, 0),
               [](c10d::Backend& backend, Transfers& transfers) { transfers.barrier(backend); });
}

// --- Sums ---

std::byte* C10dCollectives::staging(std::size_t bytes) {
  if (staging_.size() < bytes) {
    staging_ = {};  // frees the old memory before the new memory is allocated
    staging_.resize(bytes);
  }
  return staging_.data();
}

void C10dCollectives::sum_parts(const Contributions& contributions, float* output, std::size_t numel,
                                SumVisitor* visitor, std::size_t offset) const {
  const auto& [parts, own, coding] = contributions;
  absl::InlinedVector<const std::byte*, 16> wires;
  for (int q = 0; q < size(); ++q)
    wires.push_back(q == rank() ? own : parts.first + static_cast<std::size_t>(q) * parts.stride);
  coding.sum(wires, output, numel, visitor, offset);
}

Work C10dCollectives::do_reduce(const ReduceCall& given) {
  const auto& [scatters, label, input, dtype, output, numel, options] = given;
  const CallSignature call = begin(given.operation(), label, dtype, numel);
  if (!is_reducible(dtype)) return refuse(call, "sums are of fp32, bf16 or fp16, got " + std::string(name_of(dtype)));
  const auto* const from = static_cast<const std::byte*>(input);
  const std::size_t bytes = given.input_numel(size()) * size_of(dtype);
  const std::size_t part = scatters ? numel : numel / static_cast<std::size_t>(size());
  const Codings codings(options, dtype, numel);
  const bool compresses =
      codings.round() || changes(codings.contributions, part) || (!scatters && changes(codings.sums, part));
  const Algorithm algorithm = compresses ? Algorithm::kDirect : algorithm_of(call.operation, dtype, bytes);
  const bool has_rounds = algorithm == Algorithm::kHalving;
  if (scatters)
    return Work(has_rounds ? scatter_in_rounds(call, from, output, numel, options.visitor)
                           : scatter(call, from, output, numel, options));
  if (has_rounds) return Work(reduce_in_rounds(call, from, output, numel, options.visitor));
  return Work(bytes <= kDoublingBytes ? reduce_small(call, from, output, numel, options, algorithm)
                                      : reduce_large(call, from, output, numel, options));
}

// Scatters every rank's part piece by piece: exchanges a piece, then adds this piece while the next one is on the wire.
absl::Status C10dCollectives::scatter(const CallSignature& call, const std::byte* input, float* output,
                                      std::size_t numel, const ReduceOptions& options) {
  const WireCoding coding = coding_of_contributions(options, call.dtype, numel);
  const std::size_t ranks = size(), element = size_of(call.dtype);
  const std::size_t most = piece_numel(numel, element * ranks, 1), most_bytes = coding.bytes(most) * ranks;
  // A collective of the backend needs contiguous parts, and parts are contiguous only if there is one piece.
  const bool is_sent_in_place = !coding.rounds() && (means_ == Transfers::Means::kMessages || most == numel);
  std::byte* const received = staging((is_sent_in_place ? 2 : 4) * most_bytes);
  std::byte* const sent = received + 2 * most_bytes;
  Work exchanges[2];
  const std::byte* own_parts[2] = {};
  const auto begin_piece = [&](std::size_t first) {
    const std::size_t turn = first / most % 2, count = std::min(most, numel - first);
    const std::size_t bytes = coding.bytes(count);
    const std::byte* from = input + first * element;
    if (!is_sent_in_place) {
      std::byte* const parts = sent + turn * most_bytes;
      for (std::size_t q = 0; q < ranks; ++q) coding.write(input, q * numel + first, count, parts + q * bytes);
      from = parts;
    }
    const std::size_t stride = is_sent_in_place ? numel * element : bytes;
    own_parts[turn] = from + static_cast<std::size_t>(rank()) * stride;
    exchanges[turn] = start_exchange(call, {from, stride}, received + turn * most_bytes, bytes, coding.packs());
  };
  if (numel == 0) return status();
  begin_piece(0);
  for (std::size_t first = 0; first < numel; first += most) {
    if (first + most < numel) begin_piece(first + most);
    const std::size_t turn = first / most % 2;
    TESSERA_RETURN_IF_ERROR(exchanges[turn].wait());
    const std::size_t count = std::min(most, numel - first);
    const RankParts<const std::byte> parts{received + turn * most_bytes, coding.bytes(count)};
    sum_parts({parts, own_parts[turn], coding}, output + first, count, options.visitor, first);
  }
  return absl::OkStatus();
}

// Makes the same sums as reduce_large. This rank receives all contributions and makes every sum itself.
absl::Status C10dCollectives::reduce_small(const CallSignature& call, const std::byte* input, float* output,
                                           std::size_t numel, const ReduceOptions& options, Algorithm algorithm) {
  const Codings codings(options, call.dtype, numel);
  const WireCoding &coding = codings.contributions, &of_sums = codings.sums;
  const std::size_t bytes = coding.bytes(numel);
  const std::size_t sums_bytes = of_sums.rounds() ? of_sums.bytes(numel) : 0;
  std::byte* const all = staging(bytes * size() + std::max(bytes, sums_bytes));
  std::byte* const own = all + bytes * size();
  const std::byte* from = input;
  if (coding.rounds()) {
    coding.write(input, 0, numel, own);
    from = own;
  }
  Work gather = algorithm == Algorithm::kDoubling ? start(call, gather_in_rounds(call, algorithm, from, all, bytes))
                                                  : start_gather(call, from, all, bytes);
  TESSERA_RETURN_IF_ERROR(gather.wait());
  sum_parts({{all, bytes}, from, coding}, output, numel, of_sums.rounds() ? nullptr : options.visitor);
  if (!of_sums.rounds()) return absl::OkStatus();
  of_sums.write(output, 0, numel, own);
  of_sums.read(own, output, numel);
  visit_sums(options.visitor, 0, output, numel);
  return absl::OkStatus();
}

// Reduces piece by piece. Each piece has one equal part for each rank (the last piece may be padded). The ranks
// exchange contributions to a piece, each rank adds up its own part, and the sums are gathered. While a sum is made and
// gathered, the next piece is exchanged. The order of calls is the same on all ranks. Parts of compressed pieces are
// whole blocks of the codec, so that blocks begin where they do in `scatter`.
absl::Status C10dCollectives::reduce_large(const CallSignature& call, const std::byte* input, float* output,
                                           std::size_t numel, const ReduceOptions& options) {
  const Codings codings(options, call.dtype, numel);
  const WireCoding &coding = codings.contributions, &of_sums = codings.sums;
  const std::size_t ranks = size(), element = size_of(call.dtype), unit = codings.round() ? kCodecBlock : 1;
  const std::size_t most = piece_numel(numel, element, ranks);
  const auto numel_of = [&](std::size_t first) { return std::min(most, numel - first); };
  const auto part_of = [&](std::size_t count) { return (count + ranks * unit - 1) / (ranks * unit) * unit; };
  const std::size_t most_part = part_of(most);
  // Each of the two pieces under way has memory for data from other ranks and for this rank's sums. If contributions
  // are compressed, it also has memory for data to other ranks. If sums are compressed, it also has memory for all
  // ranks' sums. There is one padded copy, for a piece that cannot be divided evenly among the ranks.
  const std::size_t received_bytes = coding.bytes(most_part) * ranks;
  const std::size_t sent_bytes = coding.rounds() ? received_bytes : 0;
  const std::size_t sums_bytes = most_part * sizeof(float);
  const std::size_t encoded = of_sums.rounds() ? of_sums.bytes(most_part) : 0;
  std::byte* const received =
      staging(2 * (received_bytes + sent_bytes + sums_bytes + (1 + ranks) * encoded) + sums_bytes * ranks);
  std::byte* const sent = received + 2 * received_bytes;
  std::byte* const sums = sent + 2 * sent_bytes;
  std::byte* const own_encoded = sums + 2 * sums_bytes;
  std::byte* const all_encoded = own_encoded + 2 * encoded;
  std::byte* const padded = all_encoded + 2 * ranks * encoded;
  Work exchanges[2], gathers[2];
  const std::byte* own_parts[2] = {};
  const auto begin_exchange = [&](std::size_t first) {
    const std::size_t turn = first / most % 2, count = numel_of(first), part = part_of(count);
    const std::size_t bytes = coding.bytes(part);
    const std::byte* from = input + first * element;
    if (coding.rounds()) {
      std::byte* const parts = sent + turn * sent_bytes;
      for (std::size_t q = 0; q < ranks; ++q) {
        const std::size_t begin = std::min(q * part, count), length = std::min(part, count - begin);
        coding.write(input, first + begin, length, parts + q * bytes);
      }
      from = parts;
    } else if (part * ranks != count) {  // this is the last piece
      std::memcpy(padded, from, count * element);
      std::memset(padded + count * element, 0, (part * ranks - count) * element);
      from = padded;
    }
    own_parts[turn] = from + static_cast<std::size_t>(rank()) * bytes;
    exchanges[turn] = start_exchange(call, {from, bytes}, received + turn * received_bytes, bytes, coding.packs());
  };
  // Returns the index of the first element that rank q sums in the piece at `first`.
  const auto begin_of = [&](std::size_t first, std::size_t q) {
    return std::min(q * part_of(numel_of(first)), numel_of(first));
  };
  const auto length_of = [&](std::size_t first, std::size_t q) { return begin_of(first, q + 1) - begin_of(first, q); };
  const auto sums_wire_bytes = [&](std::size_t first) { return of_sums.bytes(part_of(numel_of(first))); };
  const auto end_gather = [&](std::size_t first) -> absl::Status {
    const std::size_t turn = first / most % 2;
    TESSERA_RETURN_IF_ERROR(gathers[turn].wait());
    if (!of_sums.rounds()) return absl::OkStatus();
    for (std::size_t q = 0; q < ranks; ++q) {
      const std::byte* const from = all_encoded + turn * ranks * encoded + q * sums_wire_bytes(first);
      of_sums.read(from, output + first + begin_of(first, q), length_of(first, q));
    }
    return absl::OkStatus();
  };
  begin_exchange(0);
  for (std::size_t first = 0; first < numel; first += most) {
    if (first + most < numel) begin_exchange(first + most);
    const std::size_t turn = first / most % 2, part = part_of(numel_of(first));
    const bool is_padded = part * ranks != numel_of(first);
    TESSERA_RETURN_IF_ERROR(exchanges[turn].wait());
    if (first >= 2 * most) TESSERA_RETURN_IF_ERROR(end_gather(first - 2 * most));  // the sums of that piece lie here
    // Sums that are sent uncompressed are computed at their place in the output, unless a part is padded.
    const bool is_in_place = !of_sums.rounds() && !is_padded && means_ == Transfers::Means::kMessages;
    float* const own = is_in_place ? output + first + begin_of(first, static_cast<std::size_t>(rank()))
                                   : reinterpret_cast<float*>(sums + turn * sums_bytes);
    const std::size_t length = coding.rounds() ? length_of(first, static_cast<std::size_t>(rank())) : part;
    const RankParts<const std::byte> parts{received + turn * received_bytes, coding.bytes(part)};
    sum_parts({parts, own_parts[turn], coding}, own, length);
    if (of_sums.rounds()) {
      std::byte* const from = own_encoded + turn * encoded;
      std::byte* const to = all_encoded + turn * ranks * encoded;
      of_sums.write(own, 0, length_of(first, static_cast<std::size_t>(rank())), from);
      gathers[turn] = start_gather(call, from, to, sums_wire_bytes(first));
      continue;
    }
    void* const to = is_padded ? static_cast<void*>(padded) : output + first;
    gathers[turn] = start_gather(call, own, to, part * sizeof(float), of_sums.packs());
    if (!is_padded) continue;
    TESSERA_RETURN_IF_ERROR(gathers[turn].wait());
    std::memcpy(output + first, padded, numel_of(first) * sizeof(float));
  }
  const std::size_t pieces = (numel + most - 1) / most;
  for (std::size_t piece = pieces > 2 ? pieces - 2 : 0; piece < pieces; ++piece)
    TESSERA_RETURN_IF_ERROR(end_gather(piece * most));
  visit_sums(options.visitor, 0, output, numel);
  return absl::OkStatus();
}

// --- Sums in rounds ---

absl::Status C10dCollectives::make_rounds(const CallSignature& call, const Rounds& rounds,
                                          const RoundBuffers& buffers) {
  return start(call, [&](c10d::Backend& backend,
                         Transfers& transfers) { run_rounds(backend, transfers, tag_of(call), rounds, buffers); })
      .wait();
}

// Makes a reduce-scatter piece by piece. The contributions lie one slice behind the other, in the order of the rounds.
absl::Status C10dCollectives::scatter_in_rounds(const CallSignature& call, const std::byte* input, float* output,
                                                std::size_t numel, SumVisitor* visitor) {
  const std::size_t ranks = size(), element = size_of(call.dtype), own = static_cast<std::size_t>(rank());
  const StridedSlices slices(ranks);
  const Rounds rounds = halving_reduce_scatter(rank(), size(), slices);
  const std::size_t most = piece_numel(numel, element * ranks, 1);
  RoundBuffers buffers{.begins = {}, .input_dtype = call.dtype};
  const auto cut = [&](std::size_t count) {
    buffers.begins.resize(ranks + 1);
    for (std::size_t place = 0; place <= ranks; ++place) buffers.begins[place] = place * count;
  };
  cut(most);
  const std::size_t packed_bytes = (ranks * most * element + 15) / 16 * 16;  // partial sums are received behind this
  const std::size_t sums_bytes = call.dtype == DType::kF32 ? 0 : ranks * most * sizeof(float);
  buffers.results = staging(sums_bytes + packed_bytes + received_bytes(rounds, buffers));
  std::byte* const packed = buffers.results + sums_bytes;
  buffers.input = packed;
  buffers.received = packed + packed_bytes;
  const float* const sums = reinterpret_cast<const float*>(buffers.results);
  for (std::size_t first = 0; first < numel; first += most) {
    const std::size_t count = std::min(most, numel - first);
    cut(count);
    for (std::size_t place = 0; place < ranks; ++place)
      std::memcpy(packed + place * count * element, input + (slices.order()[place] * numel + first) * element,
                  count * element);
    TESSERA_RETURN_IF_ERROR(make_rounds(call, rounds, buffers));
    std::memcpy(output + first, sums + slices.run_of(own, std::bit_ceil(ranks)).first * count, count * sizeof(float));
    visit_sums(visitor, first, output + first, count);
  }
  return absl::OkStatus();
}

// Reduces piece by piece. Sums and received data are written to their final place directly.
absl::Status C10dCollectives::reduce_in_rounds(const CallSignature& call, const std::byte* input, float* output,
                                               std::size_t numel, SumVisitor* visitor) {
  constexpr std::size_t kLine = 16;  // number of elements: slices begin where cache lines of fp32 do
  const std::size_t slices = static_cast<std::size_t>(halving_slices(size())), element = size_of(call.dtype);
  const Rounds rounds = halving_all_reduce(rank(), size());
  const std::size_t most = piece_numel(numel, element, slices);  // whole slices, except in the last piece
  RoundBuffers buffers{.begins = {}, .input_dtype = call.dtype};
  const auto cut = [&](std::size_t count) {
    const std::size_t slice = (count + slices * kLine - 1) / (slices * kLine) * kLine;
    buffers.begins.resize(slices + 1);
    for (std::size_t i = 0; i <= slices; ++i) buffers.begins[i] = std::min(i * slice, count);
  };
  cut(most);
  buffers.received = staging(received_bytes(rounds, buffers));
  for (std::size_t first = 0; first < numel; first += most) {
    cut(std::min(most, numel - first));
    buffers.input = input + first * element;
    buffers.results = reinterpret_cast<std::byte*>(output + first);
    TESSERA_RETURN_IF_ERROR(make_rounds(call, rounds, buffers));
  }
  visit_sums(visitor, 0, output, numel);
  return absl::OkStatus();
}

}  // namespace

std::shared_ptr<Collectives> c10d_collectives(const Group& group, TransportKind kind,
                                              c10::intrusive_ptr<c10d::Backend> backend,
                                              std::shared_ptr<KeyValueStore> store, ChooseAlgorithm choose) {
  auto collectives = summing_by_methods(
      std::make_shared<C10dCollectives>(group, kind, std::move(backend), std::move(store), std::move(choose)));
  if (!has_messages(kind)) return collectives;  // a backend of another kind may expect all its calls on one thread
  return reducing_in_background(std::move(collectives));
}

}  // namespace tessera
