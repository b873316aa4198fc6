#include "runtime/comm/shared/shared_memory_collectives.h"

#include <algorithm>
#include <cstring>
#include <exception>
#include <utility>

#include "runtime/base/status.h"
#include "runtime/comm/sum/pairwise_sum.h"
#include "runtime/comm/sum/streaming.h"
#include "runtime/comm/sum/visited_sum.h"

// Collectives through shared memory. A call begins with a barrier that exchanges descriptors (`exchange_calls`). Small
// calls go through the mailboxes with that one barrier (`in_one_round`). If all buffers are reachable, ranks access
// peers' buffers directly and make a second barrier (`access_peers`). Otherwise data goes through the mailboxes window
// by window (`in_rounds`): one window is used while the next window is loaded. Each collective below has one function
// that chooses among these ways.

namespace tessera {
namespace {

constexpr std::size_t kSmallBytes = 16 << 10;
constexpr std::size_t kLine = 64;  // bytes: data written past the caches begins and ends with whole lines
// Size of a part of a round. It is large enough that a copy keeps its speed, and small enough that memory handles one
// part while another is under way.
constexpr std::size_t kPartBytes = 2048, kPartElements = kPartBytes / sizeof(float);
static_assert(kPartElements % SumVisitor::kAlignment == 0);

// Returns `elements`, rounded down to a place where a visitor's next piece may begin. The result is the length of the
// largest round of a sum. A mailbox has room for at least one piece of a visitor for each rank.
std::size_t visited_window(std::size_t elements) { return elements / SumVisitor::kAlignment * SumVisitor::kAlignment; }

void copy_bytes(void* to, const void* from, std::size_t bytes) {
  if (to != from) copy_large(to, from, bytes);
}

// Copies the `bytes` bytes of one round. `whole` is the number of bytes that the call copies in all its rounds.
void take_bytes(void* to, const std::byte* from, std::size_t bytes, std::size_t whole) {
  if (whole >= kStreamBytes) return stream_bytes(to, from, bytes);
  if (bytes > 0) std::memcpy(to, from, bytes);
}

bool overlap(const void* a, std::size_t a_bytes, const void* b, std::size_t b_bytes) {
  const auto from = reinterpret_cast<std::uintptr_t>(a), other = reinterpret_cast<std::uintptr_t>(b);
  return a_bytes > 0 && b_bytes > 0 && from < other + b_bytes && other < from + a_bytes;
}

const std::byte* bytes_of(const void* data) { return static_cast<const std::byte*>(data); }
std::byte* bytes_of(void* data) { return static_cast<std::byte*>(data); }

}  // namespace

// A window of a call that goes through the mailboxes. The call decides whether a window counts bytes or elements.
struct SharedMemoryCollectives::Round {
  std::size_t number, begin, length;
  SharedSpace* space;
  int parity;
  bool streams;  // whether this rank writes its mailbox past the caches
  std::byte* mailbox(int rank) const { return space->mailbox(rank, parity); }
};

// The part of a round that is done in one go: bytes or elements [begin, begin + length), or fewer at the round's end.
struct SharedMemoryCollectives::Part {
  std::size_t begin = 0, length = SIZE_MAX;
  Slice of(std::size_t units) const {
    const std::size_t first = std::min(begin, units);
    return {first, std::min(length, units - first)};
  }
};

// Copies `bytes` bytes into this rank's mailbox, from byte `at` on. Calls copy one part at a time, except in a call's
// first round.
void SharedMemoryCollectives::fill_mailbox(const Round& round, std::size_t at, const std::byte* from,
                                           std::size_t bytes) const {
  std::byte* const to = round.mailbox(rank()) + at;
  if (round.streams) return stream_bytes(to, from, bytes);
  if (round.number > 0 && bytes <= kPartBytes) return load_bytes(to, from, bytes);
  if (bytes > 0) std::memcpy(to, from, bytes);
}

// Calls `first` and `second` in turn for the parts of a round. Each part has `part` of the round's `units` bytes or
// elements. A read of memory and a write are thus under way at the same time. If all reads came before all writes, each
// of them would leave half of the memory's bandwidth unused.
template <typename First, typename Second>
void SharedMemoryCollectives::in_turn(std::size_t units, std::size_t part, First first, Second second) {
  for (std::size_t begin = 0; begin < units; begin += part) {
    first(Part{begin, part});
    second(Part{begin, part});
  }
}

SharedMemoryCollectives::SharedMemoryCollectives(TransportKind kind, Group group, std::unique_ptr<SharedSpace> space)
    : kind_(kind),
      group_(std::move(group)),
      space_(std::move(space)),
      peers_(group_, *space_),
      meeting_(peers_, *space_, Lane::kCalls),
      buffers_(peers_, *space_),
      started_(peers_, *space_, *this),
      exceptions_at_start_(std::uncaught_exceptions()),
      sources_(group_.size()) {}

// If an exception destroys this object, its peers should learn of the exception, and not only that the rank left. If
// ranks are threads, run_ranks catches the exception and tells the peers its message. If ranks are processes, only this
// destructor can tell the peers.
SharedMemoryCollectives::~SharedMemoryCollectives() {
  if (std::uncaught_exceptions() == exceptions_at_start_) {
    peers_.leave();
  } else if (space_->between_processes()) {
    peers_
        .fail(make_error(ExitCode::kPeerLost,
                         "an exception ended " + group_.self() + ". [T0495] hint: what that rank printed says which"))
        .IgnoreError();
  }
}

void SharedMemoryCollectives::abort(const absl::Status& reason) { peers_.fail(reason).IgnoreError(); }

CallDescriptor SharedMemoryCollectives::describe(Operation operation, std::string_view label, DType dtype,
                                                 std::size_t count, int root) {
  CallDescriptor call;
  call.signature = make_signature(operation, label, dtype, count, static_cast<std::uint32_t>(root));
  call.signature.sequence = ++sequence_;
  return call;
}

// Begins a call that blocks: it first waits for all reductions under way. A failure of an earlier call persists, so the
// new call returns it.
CallDescriptor SharedMemoryCollectives::begin(Operation operation, std::string_view label, DType dtype,
                                              std::size_t count, int root) {
  started_.finish().IgnoreError();
  const CallDescriptor call = describe(operation, label, dtype, count, root);
  peers_.start(call.signature);
  return call;
}

absl::Status SharedMemoryCollectives::give_up(const absl::Status& why) {
  return peers_.fail(make_error(exit_code_of(why), peers_.prefix() + message_of(why)));
}

absl::Status SharedMemoryCollectives::refuse(const std::string& why) {
  TESSERA_RETURN_IF_ERROR(peers_.status());
  return give_up(make_error(ExitCode::kInternal, why));
}

// --- Barriers ---

absl::Status SharedMemoryCollectives::meet_about(const CallDescriptor& call) {
  TESSERA_RETURN_IF_ERROR(exchange_calls(call));
  return buffers_.view(meeting_, meeting_.phase());
}

absl::Status SharedMemoryCollectives::exchange_calls(const CallDescriptor& call) {
  meeting_.publish(call);
  TESSERA_RETURN_IF_ERROR(meeting_.meet());
  if (meeting_.all_published_the_same(meeting_.phase())) return absl::OkStatus();
  return meeting_.disagreement(meeting_.phase());
}

// Checks that all ranks name the same place in common memory, so that no other place is changed.
absl::Status SharedMemoryCollectives::meet_about_common(const CallDescriptor& call,
                                                        Location (Meeting::*place_of)(int, std::uint64_t) const) {
  TESSERA_RETURN_IF_ERROR(exchange_calls(call));
  const auto place = [&](int q) { return (meeting_.*place_of)(q, meeting_.phase()); };
  for (int q = 1; q < size(); ++q)
    if (!(place(q) == place(0)))
      return give_up(make_error(ExitCode::kInternal,
                                peers_.who(q) + " and " + peers_.who(0) + " name different places of common memory"));
  return absl::OkStatus();
}

bool SharedMemoryCollectives::small(std::size_t bytes) const {
  return bytes <= std::min(kSmallBytes, space_->mailbox_bytes());
}

// Reads and writes peers' buffers, then waits until all ranks have done so.
template <typename Access>
absl::Status SharedMemoryCollectives::access_peers(Access access) {
  TESSERA_RETURN_IF_ERROR(peers_.begin_access());
  access();
  peers_.end_access();
  return meeting_.meet();
}

// Makes a call in rounds: `load(round, part)` fills this rank's mailbox, `use(round, part)` reads peers' mailboxes. The
// data that peers loaded stay until the next round's barrier (invariant 2). One round is therefore used while the next
// one is loaded, `part` bytes or elements of each round in turn. REQUIRES: a barrier exchanged the call's descriptors.
template <typename Load, typename Use>
absl::Status SharedMemoryCollectives::in_rounds(std::size_t total, std::size_t window, std::size_t part, Load load,
                                                Use use) {
  TESSERA_RETURN_IF_ERROR(peers_.status());
  way_.begin((total + window - 1) / window);
  Round round = round_of(0, total, window);
  load(round, Part{});
  TESSERA_RETURN_IF_ERROR(meet_loaded());
  while (round.begin + round.length < total) {
    const Round next = round_of(round.number + 1, total, window);
    in_turn(
        round.length, part, [&](const Part& some) { use(round, some); }, [&](const Part& some) { load(next, some); });
    TESSERA_RETURN_IF_ERROR(meet_loaded());
    way_.passed(round.number);
    round = next;
  }
  use(round, Part{});
  end_stream();
  return absl::OkStatus();
}

// Makes a small call: one round, whose barrier exchanges the descriptors too.
template <typename Load, typename Use>
absl::Status SharedMemoryCollectives::in_one_round(const CallDescriptor& call, std::size_t total, Load load, Use use) {
  TESSERA_RETURN_IF_ERROR(peers_.status());
  const Round round{0, 0, total, space_.get(), next_parity(), false};
  load(round, Part{});
  TESSERA_RETURN_IF_ERROR(exchange_calls(call));
  use(round, Part{});
  return absl::OkStatus();
}

// Returns a round. REQUIRES: the last barrier is over, and the round is loaded before the next barrier.
SharedMemoryCollectives::Round SharedMemoryCollectives::round_of(std::size_t number, std::size_t total,
                                                                 std::size_t window) const {
  const std::size_t begin = number * window;
  return {number, begin, std::min(window, total - begin), space_.get(), next_parity(), way_.streams(number)};
}

// Makes a barrier. After it all ranks see the data that were written past the caches.
absl::Status SharedMemoryCollectives::meet_loaded() {
  end_stream();
  return meeting_.meet();
}

absl::StatusOr<std::unique_ptr<CommBuffer>> SharedMemoryCollectives::allocate(std::size_t bytes) {
  const CallDescriptor call = begin(Operation::kAllocate, "", DType::kU8, bytes);
  TESSERA_RETURN_IF_ERROR(peers_.status());
  return open_all(call, space_->allocate(bytes));
}

absl::StatusOr<std::unique_ptr<CommBuffer>> SharedMemoryCollectives::allocate_common(std::size_t bytes) {
  const CallDescriptor call = begin(Operation::kAllocateCommon, "", DType::kU8, bytes);
  TESSERA_RETURN_IF_ERROR(peers_.status());
  return open_all(call, space_->allocate_common(bytes));
}

absl::StatusOr<std::unique_ptr<CommBuffer>> SharedMemoryCollectives::open_all(
    CallDescriptor call, absl::StatusOr<std::unique_ptr<SharedSpace::Allocation>> allocation) {
  if (!allocation.ok()) return give_up(allocation.status());
  call.input = (*allocation)->publish();
  TESSERA_RETURN_IF_ERROR(exchange_calls(call));
  std::vector<Location> offers;
  for (int q = 0; q < size(); ++q) offers.push_back(meeting_.input_of(q, meeting_.phase()));
  TESSERA_RETURN_IF_ERROR(peers_.begin_access());
  auto buffer = (*allocation)->open(offers);
  peers_.end_access();
  if (!buffer.ok()) return give_up(buffer.status());
  TESSERA_RETURN_IF_ERROR(meeting_.meet());  // all ranks have opened the segments, so the offers may be withdrawn
  return buffer;
}

// --- all_gather ---

Work SharedMemoryCollectives::do_all_gather(const GatherCall& given) {
  const auto& [label, shard, full, bytes_per_rank, options] = given;
  CallDescriptor call = begin(Operation::kAllGather, label, DType::kU8, bytes_per_rank);
  call.output = space_->locate(full, bytes_per_rank * size());
  call.signature.common = call.output.common();
  if (call.signature.common || !small(bytes_per_rank)) call.input = space_->locate(shard, bytes_per_rank);
  if (call.signature.common) return Work(gather_common(call, bytes_of(shard), bytes_of(full), bytes_per_rank));
  return Work(gather(call, bytes_of(shard), bytes_of(full), bytes_per_rank));
}

// Gathers into common memory. `full` is one buffer for all: each rank writes its own part, unless the part is there
// already.
absl::Status SharedMemoryCollectives::gather_common(const CallDescriptor& call, const std::byte* shard, std::byte* full,
                                                    std::size_t bytes) {
  TESSERA_RETURN_IF_ERROR(meet_about_common(call, &Meeting::output_of));
  bool in_place = true;
  for (int q = 0; q < size(); ++q)
    in_place &= meeting_.input_of(q, meeting_.phase()) == Location{call.output.segment, call.output.offset + q * bytes};
  if (in_place) return absl::OkStatus();
  copy_bytes(full + rank() * bytes, shard, bytes);
  return meeting_.meet();
}

absl::Status SharedMemoryCollectives::gather(const CallDescriptor& call, const std::byte* shard, std::byte* full,
                                             std::size_t bytes) {
  if (!small(bytes)) {
    TESSERA_RETURN_IF_ERROR(meet_about(call));
    if (buffers_.inputs_reachable()) {
      return access_peers([&] {
        for (int step = 0; step < size(); ++step)
          copy_bytes(full + peer(step) * bytes, buffers_.input(peer(step)), bytes);
      });
    }
  }
  const auto load = [&](const Round& round, const Part& part) {
    const Slice some = part.of(round.length);
    const std::size_t at = round.begin + some.begin;
    fill_mailbox(round, some.begin, shard + at, some.numel);
    if (std::byte* const own = full + rank() * bytes; own != shard) take_bytes(own + at, shard + at, some.numel, bytes);
  };
  const auto use = [&](const Round& round, const Part& part) {
    const Slice some = part.of(round.length);
    const std::size_t at = round.begin + some.begin;
    for (int step = 1; step < size(); ++step) {
      const int q = peer(step);
      take_bytes(full + q * bytes + at, round.mailbox(q) + some.begin, some.numel, bytes);
    }
  };
  if (small(bytes)) return in_one_round(call, bytes, load, use);
  return in_rounds(bytes, space_->mailbox_bytes(), kPartBytes, load, use);
}

// --- Reductions ---

// Returns all ranks' mailboxes from `offset` bytes on; `own` replaces this rank's mailbox.
std::span<const void* const> SharedMemoryCollectives::mailboxes_from(const Round& round, std::size_t offset,
                                                                     const std::byte* own) {
  for (int q = 0; q < size(); ++q) sources_[q] = q == rank() ? own : round.mailbox(q) + offset;
  return sources_;
}

Work SharedMemoryCollectives::do_reduce(const ReduceCall& given) {
  const auto& [scatters, label, input, dtype, output, numel, options] = given;
  if (!is_reducible(dtype)) {
    begin(given.operation(), label, dtype, numel);
    return Work(refuse("sums are of fp32, bf16 or fp16, got " + std::string(name_of(dtype))));
  }
  const std::size_t bytes = given.input_numel(size()) * size_of(dtype);
  const bool is_later = options.waits == Waits::kLater;
  CallDescriptor call =
      is_later ? describe(given.operation(), label, dtype, numel) : begin(given.operation(), label, dtype, numel);
  if (is_later || !small(bytes)) {
    call.input = space_->locate(input, bytes);
    if (!scatters) call.output = space_->locate(output, numel * sizeof(float));
  }
  if (is_later) return started_.start(call, bytes_of(input), output, options.visitor);
  if (scatters) return Work(scatter(call, bytes_of(input), output, numel, options.visitor));
  const absl::Status status = reduce(call, bytes_of(input), output, numel);
  if (status.ok()) visit_sums(options.visitor, 0, output, numel);
  return Work(status);
}

absl::Status SharedMemoryCollectives::scatter(const CallDescriptor& call, const std::byte* input, float* output,
                                              std::size_t numel, SumVisitor* visitor) {
  const DType dtype = call.signature.dtype;
  const std::size_t element = size_of(dtype);
  const bool is_small = small(numel * size() * element);
  if (!is_small) {
    TESSERA_RETURN_IF_ERROR(meet_about(call));
    if (buffers_.inputs_reachable()) {
      return access_peers([&] { buffers_.sum_part(dtype, output, numel, visitor); });
    }
  }
  const auto load = [&](const Round& round, const Part& part) {
    const Slice some = part.of(round.length);
    for (int step = 1; step < size(); ++step) {
      const int q = peer(step);
      fill_mailbox(round, (place_for(q, rank()) * round.length + some.begin) * element,
                   input + (q * numel + round.begin + some.begin) * element, some.numel * element);
    }
  };
  const auto use = [&](const Round& round, const Part& part) {
    const Slice some = part.of(round.length);
    const std::size_t at = round.begin + some.begin;
    for (int q = 0; q < size(); ++q)
      sources_[q] = q == rank() ? input + (q * numel + at) * element
                                : round.mailbox(q) + (place_for(rank(), q) * round.length + some.begin) * element;
    visited_window_sum(sources_, dtype, output + at, {}, {at, some.numel, numel}, visitor);
  };
  if (is_small) return in_one_round(call, numel, load, use);
  const std::size_t window = visited_window(space_->mailbox_bytes() / (element * peer_count()));
  return in_rounds(numel, window, kPartElements, load, use);
}

absl::Status SharedMemoryCollectives::reduce_blocking(const CallDescriptor& call, const std::byte* input, float* output,
                                                      SumVisitor* visitor) {
  const std::size_t numel = call.signature.count;
  if (call.signature.operation == Operation::kReduceScatter) return scatter(call, input, output, numel, visitor);
  return reduce(call, input, output, numel);
}

absl::Status SharedMemoryCollectives::reduce(const CallDescriptor& call, const std::byte* input, float* output,
                                             std::size_t numel) {
  const DType dtype = call.signature.dtype;
  if (small(numel * size_of(dtype))) {
    // There are so few data that every rank sums everything. This needs one barrier; rounds would need three or more.
    const auto load = [&](const Round& round, const Part&) { fill_mailbox(round, 0, input, numel * size_of(dtype)); };
    const auto use = [&](const Round& round, const Part&) {
      // This rank's own mailbox is read, too: the input may lie in common memory, and a peer's output may overlap the
      // input.
      pairwise_sum(mailboxes_from(round, 0, round.mailbox(rank())), dtype, output, numel);
    };
    return in_one_round(call, numel, load, use);
  }
  TESSERA_RETURN_IF_ERROR(meet_about(call));
  if (!buffers_.inputs_reachable() || !buffers_.outputs_reachable())
    return reduce_in_rounds(dtype, input, output, numel);
  return access_peers([&] { buffers_.sum_slice(dtype, numel); });
}

// Makes an all-reduce one window at a time: peers' slices of the input go through one mailbox, and the sums of this
// rank's slice through the other. Ranks read a window's sums while they load the next window's inputs.
absl::Status SharedMemoryCollectives::reduce_in_rounds(DType dtype, const std::byte* input, float* output,
                                                       std::size_t numel) {
  // A slice's sums fit into a mailbox too. If there are two or more ranks, a slice is at most half a window, and an
  // element has at least 2 bytes.
  const std::size_t element = size_of(dtype), window = space_->mailbox_bytes() / element,
                    own_numel = slice_of(numel, rank(), size()).numel, whole = own_numel * sizeof(float);
  const auto for_peers = [&](const Round& round, const Part& part, const auto& body) {
    for (int step = 1; step < size(); ++step) {
      const Slice slice = slice_of(round.length, peer(step), size()), some = part.of(slice.numel);
      body(peer(step), some.begin, slice.begin + some.begin, some.numel);
    }
  };
  const auto load_inputs = [&](const Round& round, const Part& part) {
    for_peers(round, part, [&](int, std::size_t, std::size_t at, std::size_t length) {
      fill_mailbox(round, at * element, input + (round.begin + at) * element, length * element);
    });
  };
  const auto add_up = [&](const Round& inputs, const Round& sums) {
    const Slice mine = slice_of(inputs.length, rank(), size());
    const std::size_t at = inputs.begin + mine.begin;
    visited_window_sum(mailboxes_from(inputs, mine.begin * element, input + at * element), dtype, output + at,
                       {reinterpret_cast<float*>(sums.mailbox(rank())), sums.streams},
                       {.numel = mine.numel, .whole = own_numel});
  };
  const auto take_sums = [&](const Round& round, const Part& part) {
    for_peers(round, part, [&](int q, std::size_t in_slice, std::size_t at, std::size_t length) {
      take_bytes(output + round.begin + at, round.mailbox(q) + in_slice * sizeof(float), length * sizeof(float), whole);
    });
  };

  TESSERA_RETURN_IF_ERROR(peers_.status());
  way_.begin((numel + window - 1) / window);
  Round inputs = round_of(0, numel, window);
  load_inputs(inputs, Part{});
  TESSERA_RETURN_IF_ERROR(meet_loaded());
  for (;;) {
    const Round sums = round_of(inputs.number, numel, window);
    add_up(inputs, sums);
    TESSERA_RETURN_IF_ERROR(meet_loaded());
    if (sums.begin + sums.length == numel) {
      take_sums(sums, Part{});
      end_stream();
      return absl::OkStatus();
    }
    inputs = round_of(sums.number + 1, numel, window);
    in_turn(
        slice_of(sums.length, 0, size()).numel, kPartElements, [&](const Part& some) { take_sums(sums, some); },
        [&](const Part& some) { load_inputs(inputs, some); });
    TESSERA_RETURN_IF_ERROR(meet_loaded());
    way_.passed(sums.number);
  }
}

// --- broadcast, all_to_all, barrier ---

Work SharedMemoryCollectives::broadcast(std::string_view label, void* data, std::size_t bytes, int root) {
  CallDescriptor call = begin(Operation::kBroadcast, label, DType::kU8, bytes, root);
  if (root < 0 || root >= size())
    return Work(refuse("root is " + std::to_string(root) + " of " + std::to_string(size()) + " ranks"));
  call.input = space_->locate(data, bytes);
  call.signature.common = call.input.common();
  if (call.signature.common) return Work(meet_about_common(call, &Meeting::input_of));
  return Work(spread(call, bytes_of(data), bytes, root));
}

absl::Status SharedMemoryCollectives::spread(const CallDescriptor& call, std::byte* data, std::size_t bytes, int root) {
  if (!small(bytes)) {
    TESSERA_RETURN_IF_ERROR(meet_about(call));
    if (buffers_.input(root)) {
      return access_peers([&] { copy_bytes(data, rank() == root ? data : buffers_.input(root), bytes); });
    }
  }
  const auto load = [&](const Round& round, const Part& part) {
    const Slice some = part.of(round.length);
    if (rank() == root) fill_mailbox(round, some.begin, data + round.begin + some.begin, some.numel);
  };
  const auto use = [&](const Round& round, const Part& part) {
    const Slice some = part.of(round.length);
    if (rank() != root)
      take_bytes(data + round.begin + some.begin, round.mailbox(root) + some.begin, some.numel, bytes);
  };
  if (small(bytes)) return in_one_round(call, bytes, load, use);
  const std::size_t window = space_->mailbox_bytes();  // one part, since one rank loads and the other ranks read
  return in_rounds(bytes, window, window, load, use);
}

Work SharedMemoryCollectives::all_to_all(std::string_view label, const void* input, void* output,
                                         std::size_t bytes_per_rank) {
  CallDescriptor call = begin(Operation::kAllToAll, label, DType::kU8, bytes_per_rank);
  const std::size_t total = bytes_per_rank * size();
  if (overlap(input, total, output, total)) return Work(refuse("input and output overlap"));
  if (!small(total)) call.input = space_->locate(input, total);
  return Work(exchange(call, bytes_of(input), bytes_of(output), bytes_per_rank));
}

absl::Status SharedMemoryCollectives::exchange(const CallDescriptor& call, const std::byte* input, std::byte* output,
                                               std::size_t bytes) {
  const bool is_small = small(bytes * size());
  if (!is_small) {
    TESSERA_RETURN_IF_ERROR(meet_about(call));
    if (buffers_.inputs_reachable()) {
      return access_peers([&] {
        for (int step = 0; step < size(); ++step)
          copy_bytes(output + peer(step) * bytes, buffers_.input(peer(step)) + rank() * bytes, bytes);
      });
    }
  }
  const auto load = [&](const Round& round, const Part& part) {
    const Slice some = part.of(round.length);
    for (int step = 1; step < size(); ++step) {
      const int q = peer(step);
      fill_mailbox(round, place_for(q, rank()) * round.length + some.begin,
                   input + q * bytes + round.begin + some.begin, some.numel);
    }
  };
  const auto use = [&](const Round& round, const Part& part) {
    const Slice some = part.of(round.length);
    const std::size_t at = round.begin + some.begin;
    for (int step = 0; step < size(); ++step) {
      const int q = peer(step);
      const std::byte* const from =
          q == rank() ? input + q * bytes + at : round.mailbox(q) + place_for(rank(), q) * round.length + some.begin;
      take_bytes(output + q * bytes + at, from, some.numel, bytes);
    }
  };
  if (is_small) return in_one_round(call, bytes, load, use);
  const std::size_t window = space_->mailbox_bytes() / peer_count() / kLine * kLine;
  return in_rounds(bytes, window, kPartBytes, load, use);
}

Work SharedMemoryCollectives::barrier(std::string_view label) {
  return Work(exchange_calls(begin(Operation::kBarrier, label, DType::kU8, 0)));
}

}  // namespace tessera
