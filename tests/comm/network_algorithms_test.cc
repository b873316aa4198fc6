// Tests that collectives by ring, doubling and halving give the same bits as the direct algorithm over Gloo. The tests
// also count the messages, and let ranks end in the middle of a call.

#include <gmock/gmock.h>
#include <netinet/in.h>
#include <poll.h>
#include <signal.h>
#include <sys/socket.h>
#include <unistd.h>

#include <algorithm>
#include <array>
#include <atomic>
#include <bit>
#include <cerrno>
#include <chrono>
#include <cstdlib>
#include <cstring>
#include <functional>
#include <memory>
#include <random>
#include <set>
#include <stdexcept>
#include <thread>
#include <utility>

#include "runtime/comm/c10d/c10d_collectives.h"
#include "runtime/comm/c10d/failure_report.h"
#include "runtime/comm/c10d/gloo_transport.h"
#include "runtime/comm/c10d/strangers.h"
#include "runtime/comm/c10d/tcp_store.h"
#include "runtime/comm/call_watch.h"
#include "runtime/comm/rounds/algorithm.h"
#include "runtime/comm/rounds/call_work.h"
#include "runtime/comm/rounds/halving_rounds.h"
#include "runtime/comm/rounds/measured_groups.h"
#include "runtime/comm/socket_address.h"
#include "runtime/comm/sum/pairwise_sum.h"
#include "runtime/comm/sum/wire_codec.h"
#include "tests/comm/collectives_properties.h"
#include "tests/comm/forked_world.h"
#include "tests/support/fork_ranks.h"
#include "tests/support/free_port.h"
#include "tests/support/stand_ins/mailbox_backend.h"

namespace tessera {
namespace {

using namespace std::chrono_literals;
using ::testing::AllOf;
using ::testing::ContainsRegex;
using ::testing::HasSubstr;

Topology topology_of(int rank, int ranks, int port) {
  Topology topology;
  topology.rank = topology.local_rank = rank;
  topology.world_size = topology.local_world_size = ranks;
  topology.launcher = "tessera";
  topology.master_port = port;
  topology.run_id = "test";
  return topology;
}

/// Joins a group over Gloo. Each of its calls uses the algorithm that `now` holds at that time.
absl::StatusOr<std::shared_ptr<Collectives>> join_gloo(int rank, int ranks, int port, std::shared_ptr<Algorithm> now,
                                                       double timeout_s = kNeverPassed) {
  TESSERA_ASSIGN_OR_RETURN(auto store, tcp_store(topology_of(rank, ranks, port), kNeverPassed));
  return gloo_collectives(world_of(rank, ranks, timeout_s), "127.0.0.1", store,
                          [now](Operation, int, DType, std::size_t) { return *now; });
}

/// One rank's end of a group over Gloo, with the watch that MeshGroups would give it.
struct WatchedRank {
  std::shared_ptr<C10dStore> store;
  std::unique_ptr<CallWatch> watch;
  std::shared_ptr<Collectives> group;

  static absl::StatusOr<WatchedRank> join(int rank, int ranks, int port, Algorithm algorithm,
                                          double timeout_s = kNeverPassed) {
    WatchedRank joined;
    TESSERA_ASSIGN_OR_RETURN(joined.store, tcp_store(topology_of(rank, ranks, port), kNeverPassed));
    joined.store->set_own_address("127.0.0.1");
    const auto made = std::make_shared<std::weak_ptr<Collectives>>();
    joined.watch = std::make_unique<CallWatch>(rank, ranks, joined.store, [made](const absl::Status& reason) {
      if (const auto group = made->lock()) group->abort(reason);
    });
    const auto make = [&]() -> absl::StatusOr<std::shared_ptr<Collectives>> {
      return gloo_collectives(world_of(rank, ranks, timeout_s), "127.0.0.1", joined.store,
                              [algorithm](Operation, int, DType, std::size_t) { return algorithm; });
    };
    TESSERA_ASSIGN_OR_RETURN(joined.group, joined.watch->watched("world", "test", {.count = ranks}, make));
    *made = joined.group;
    return joined;
  }
};

/// Returns one rank's result of a reduction, after it has checked the values that the visitor saw.
std::vector<float> reduced(Collectives& group, Operation operation, Bytes input, DType dtype, std::size_t numel,
                           bool in_place, Waits waits) {
  std::vector<float> apart(in_place ? 0 : numel);
  const bool scatters = operation == Operation::kReduceScatter;
  auto* const own = reinterpret_cast<float*>(input.data()) + (scatters ? group.rank() * numel : 0);
  float* const output = in_place ? own : apart.data();
  RecordingVisitor visitor(numel);
  require_ok((scatters ? group.reduce_scatter("sum", input.data(), dtype, output, numel, {&visitor, waits})
                       : group.all_reduce("sum", input.data(), dtype, output, numel, {&visitor, waits}))
                 .wait());
  const std::vector<float> sums(output, output + numel);
  require(same_bits(visitor.seen(), sums), "the visitor sees the sums");
  return sums;
}

void check_against_direct(Collectives& group, Algorithm& now, std::size_t numel) {
  const auto ranks = static_cast<std::size_t>(group.size()), rank = static_cast<std::size_t>(group.rank());
  const auto seed = static_cast<std::uint32_t>(1000 * rank + numel % 1000);
  for (const DType dtype : {DType::kF32, DType::kBF16, DType::kF16}) {
    for (const Operation operation : {Operation::kReduceScatter, Operation::kAllReduce}) {
      const bool scatters = operation == Operation::kReduceScatter;
      const std::size_t share = scatters ? (numel + ranks - 1) / ranks : numel;
      const Bytes input = random_values(dtype, scatters ? ranks * share : numel, seed);
      now = Algorithm::kDirect;
      const std::vector<float> direct = reduced(group, operation, input, dtype, share, false, Waits::kAtOnce);
      for (const Algorithm algorithm : {Algorithm::kDoubling, Algorithm::kHalving}) {
        if (!has_algorithm(operation, algorithm, input.size())) continue;
        now = algorithm;
        for (const bool in_place : {false, true}) {
          if (in_place && dtype != DType::kF32) continue;
          const Waits waits = in_place ? Waits::kLater : Waits::kAtOnce;
          const std::vector<float> sums = reduced(group, operation, input, dtype, share, in_place, waits);
          require(same_bits(sums, direct), at(std::string(name_of(algorithm)) + " " + std::string(name_of(operation)),
                                              dtype, numel, group.rank()));
        }
      }
    }
  }
  for (const Algorithm algorithm : {Algorithm::kRing, Algorithm::kDoubling}) {
    now = algorithm;
    for (const bool in_place : {false, true}) check_all_gather(group, (numel + ranks - 1) / ranks, false, in_place);
  }
}

class NetworkAlgorithms : public ::testing::TestWithParam<int> {};

TEST_P(NetworkAlgorithms, GiveTheBitsOfTheDirectWay) {
  const int ranks = GetParam(), port = free_port();
  expect_all_ok(fork_ranks(ranks, [&](int rank, KeyValueStore&) -> absl::Status {
    const auto now = std::make_shared<Algorithm>(Algorithm::kDirect);
    TESSERA_ASSIGN_OR_RETURN(const auto group, join_gloo(rank, ranks, port, now));
    for (const std::size_t numel : {1, 3, 255, 256, 4097, 1 << 20}) check_against_direct(*group, *now, numel);
    return group->barrier("end").wait();
  }));
}

INSTANTIATE_TEST_SUITE_P(Ranks, NetworkAlgorithms, ::testing::Range(2, 10));

/// Starts gathers that are under way together, with a sum between them. One of the gathers is never waited for.
void check_gathers_under_way(Collectives& group, Algorithm& now) {
  constexpr std::size_t kBytes = 30'000;
  const auto ranks = static_cast<std::size_t>(group.size());
  std::vector<Bytes> all(4);
  std::vector<Work> works;
  const auto byte_of = [](std::size_t call, std::size_t rank) { return static_cast<std::byte>(10 * call + rank + 1); };
  for (std::size_t call = 0; call < all.size(); ++call) {
    now = call % 2 == 0 ? Algorithm::kRing : Algorithm::kDoubling;
    if (call == 3) now = Algorithm::kDirect;
    all[call].resize(kBytes * ranks);
    std::byte* const own = all[call].data() + static_cast<std::size_t>(group.rank()) * kBytes;
    std::fill_n(own, kBytes, byte_of(call, static_cast<std::size_t>(group.rank())));
    works.push_back(group.all_gather("gather " + std::to_string(call), own, all[call].data(), kBytes));
    if (call != 1) continue;
    now = Algorithm::kHalving;
    float sum = 1;
    require_ok(group.all_reduce("between", &sum, DType::kF32, &sum, 1).wait());
    require(sum == static_cast<float>(ranks), "sum between gathers");
  }
  works.erase(works.begin() + 2);
  for (Work& work : works) require_ok(work.wait());
  for (std::size_t call = 0; call < all.size(); ++call)
    for (std::size_t i = 0; i < all[call].size(); ++i)
      require(all[call][i] == byte_of(call, i / kBytes), "gather " + std::to_string(call));
}

// Calls over Gloo ask for an algorithm. While a group is measured, its calls use all algorithms. After that, they use
// the algorithm that the ranks have chosen.
TEST(MeasuredNetwork, EachCallAsksForItsAlgorithmAndSumsStayTheSame) {
  const int port = free_port();
  expect_all_ok(fork_ranks(3, [&](int rank, KeyValueStore&) -> absl::Status {
    TESSERA_ASSIGN_OR_RETURN(const auto store, tcp_store(topology_of(rank, 3, port), 20));
    std::set<Algorithm> used;
    const auto join = measured_groups([&](const Group& group, ChooseAlgorithm choose) {
      return gloo_collectives(group, "127.0.0.1", store, [&used, choose](auto... call) {
        const Algorithm chosen = choose(call...);
        used.insert(chosen);
        return chosen;
      });
    });
    TESSERA_ASSIGN_OR_RETURN(const auto group, join(world_of(rank, 3)));
    require(used.size() == 4, "all algorithms are timed");
    check_all_operations(*group, false, 8200);
    return group->barrier("end").wait();
  }));
}

class AllOperationsInRounds : public ::testing::TestWithParam<int> {};

TEST_P(AllOperationsInRounds, EveryOperationIsExact) {
  const int ranks = GetParam(), port = free_port();
  expect_all_ok(fork_ranks(ranks, [&](int rank, KeyValueStore&) -> absl::Status {
    const auto now = std::make_shared<Algorithm>(Algorithm::kDirect);
    TESSERA_ASSIGN_OR_RETURN(const auto group, join_gloo(rank, ranks, port, now));
    for (const Algorithm algorithm : {Algorithm::kHalving, Algorithm::kDoubling, Algorithm::kRing}) {
      *now = algorithm;
      check_all_operations(*group, false, 8200);
    }
    check_gathers_under_way(*group, *now);
    return group->barrier("end").wait();
  }));
}

INSTANTIATE_TEST_SUITE_P(Ranks, AllOperationsInRounds, ::testing::Values(2, 3, 5));

// --- What is sent ---

struct Sent {
  std::size_t messages = 0, bytes = 0;
  friend bool operator==(const Sent&, const Sent&) = default;
};
void PrintTo(const Sent& sent, std::ostream* out) { *out << sent.messages << " messages, " << sent.bytes << " bytes"; }

/// Makes one call. `numel` is the number of elements of a rank's part, or of the whole buffer for all_reduce.
absl::Status call_once(Collectives& group, Operation operation, void* input, DType dtype, float* output,
                       std::size_t numel) {
  switch (operation) {
    case Operation::kAllGather:
      return group.all_gather("blocks.3", input, output, numel * size_of(dtype)).wait();
    case Operation::kReduceScatter:
      return group.reduce_scatter("blocks.3", input, dtype, output, numel).wait();
    default:
      return group.all_reduce("blocks.3", input, dtype, output, numel).wait();
  }
}

/// Returns the messages and bytes that each rank of a group sends in one call.
std::vector<Sent> sent_by_each(int ranks, Algorithm algorithm, Operation operation, DType dtype, std::size_t numel) {
  const auto mailboxes = std::make_shared<testing::Mailboxes>();
  const auto store = memory_store();
  std::vector<c10::intrusive_ptr<testing::MailboxBackend>> backends;
  for (int rank = 0; rank < ranks; ++rank)
    backends.push_back(c10::make_intrusive<testing::MailboxBackend>(rank, ranks, mailboxes));
  {
    std::vector<std::jthread> threads;
    for (int rank = 0; rank < ranks; ++rank) {
      threads.emplace_back([&, rank] {
        const auto group = c10d_collectives(world_of(rank, ranks, 20), TransportKind::kGloo, backends[rank], store,
                                            [&](Operation, int, DType, std::size_t) { return algorithm; });
        Bytes input(numel * static_cast<std::size_t>(ranks) * size_of(dtype));
        std::vector<float> output(numel * static_cast<std::size_t>(ranks));
        const absl::Status status = call_once(*group, operation, input.data(), dtype, output.data(), numel);
        EXPECT_TRUE(status.ok()) << status;
      });
    }
  }
  std::vector<Sent> sent;
  for (const auto& backend : backends) sent.push_back({backend->messages, backend->bytes});
  return sent;
}

Sent sent_by_all(int ranks, Algorithm algorithm, Operation operation, DType dtype, std::size_t numel) {
  Sent sent;
  for (const Sent& each : sent_by_each(ranks, algorithm, operation, dtype, numel))
    sent = {sent.messages + each.messages, sent.bytes + each.bytes};
  return sent;
}

/// Returns the number of messages of all ranks in the addition by halving (halving_rounds.h).
std::size_t messages_of_addition(std::size_t ranks) {
  std::size_t messages = 0, before = 0;
  for (std::size_t left = ranks; left > 0; left -= before) {
    messages += before;
    before = std::bit_floor(left);
    messages += before * static_cast<std::size_t>(std::countr_zero(before));
  }
  return messages;
}

TEST(SentByNetworkAlgorithms, MessagesAndBytesEqualTheFormulas) {
  constexpr std::size_t kPart = 160, kNarrow = 2, kWide = 4;
  for (int n = 2; n <= 16; ++n) {
    const auto ranks = static_cast<std::size_t>(n), first_block = std::bit_floor(ranks);
    const auto rounds = static_cast<std::size_t>(std::bit_width(ranks - 1));
    const auto gather = [&](Algorithm algorithm) {
      return sent_by_all(n, algorithm, Operation::kAllGather, DType::kBF16, kPart);
    };
    const std::size_t gathered = ranks * (ranks - 1) * kPart * kNarrow;
    EXPECT_EQ(gather(Algorithm::kDirect), (Sent{ranks * (ranks - 1), gathered})) << ranks;
    EXPECT_EQ(gather(Algorithm::kRing), (Sent{ranks * (ranks - 1), gathered})) << ranks;
    EXPECT_EQ(gather(Algorithm::kDoubling), (Sent{ranks * rounds + ranks - 1 - rounds, gathered})) << ranks;

    // Contributions are bf16, and sums are fp32.
    const std::size_t narrow = ranks * ((ranks + 1) / 2), others = ranks - first_block;
    EXPECT_EQ(sent_by_all(n, Algorithm::kHalving, Operation::kReduceScatter, DType::kBF16, kPart),
              (Sent{messages_of_addition(ranks) + others,
                    kPart * (kNarrow * narrow + kWide * (ranks * (ranks - 1) - narrow + others))}))
        << ranks;
    // All slices have the same size.
    const std::size_t slice = 16, numel = slice * first_block, contributions = first_block * ((ranks + 1) / 2);
    EXPECT_EQ(sent_by_all(n, Algorithm::kHalving, Operation::kAllReduce, DType::kBF16, numel),
              (Sent{2 * messages_of_addition(ranks),
                    slice * (kNarrow * contributions + kWide * (2 * first_block * (ranks - 1) - contributions))}))
        << ranks;
    EXPECT_EQ(sent_by_all(n, Algorithm::kDoubling, Operation::kAllReduce, DType::kBF16, kPart),
              (Sent{ranks * rounds + ranks - 1 - rounds, gathered}))
        << ranks;
  }
}

// A call uses the direct algorithm if its operation does not have the wanted algorithm.
TEST(SentByNetworkAlgorithms, CallsWithoutTheAlgorithmAreSentDirectly) {
  EXPECT_EQ(sent_by_all(4, Algorithm::kRing, Operation::kAllReduce, DType::kF32, 10), (Sent{12, 12 * 40}));
  EXPECT_EQ(sent_by_all(4, Algorithm::kHalving, Operation::kAllGather, DType::kF32, 10), (Sent{12, 12 * 40}));
  EXPECT_EQ(sent_by_all(4, Algorithm::kDoubling, Operation::kReduceScatter, DType::kF32, 10), (Sent{12, 12 * 40}));
}

/// Makes a lossless all_reduce and reduce_scatter of `input` on each rank. Checks that the results have the same bits
/// as those of plain calls, and returns their bytes on the wire as shares of the bytes that plain calls send.
std::pair<double, double> packed_shares(int ranks, DType dtype, const std::vector<float>& input) {
  const auto mailboxes = std::make_shared<testing::Mailboxes>();
  const auto store = memory_store();
  const std::size_t numel = input.size(), part = numel / static_cast<std::size_t>(ranks);
  std::array<std::atomic<std::size_t>, 2> plain{}, packed{};
  {
    std::vector<std::jthread> threads;
    for (int rank = 0; rank < ranks; ++rank) {
      threads.emplace_back([&, rank] {
        const auto backend = c10::make_intrusive<testing::MailboxBackend>(rank, ranks, mailboxes);
        const auto group = c10d_collectives(world_of(rank, ranks, 20), TransportKind::kGloo, backend, store, nullptr);
        Bytes own(numel * size_of(dtype));
        for (std::size_t i = 0; i < numel; ++i) {
          const float value = input[i] * static_cast<float>(rank + 1);
          const auto bits = std::bit_cast<std::uint32_t>(value);
          const auto half = static_cast<std::uint16_t>(bits >> 16);
          dtype == DType::kF32 ? std::memcpy(own.data() + 4 * i, &bits, 4) : std::memcpy(own.data() + 2 * i, &half, 2);
        }
        ReduceOptions lossless;
        lossless.contributions = lossless.sums = WireForm::kLossless;
        std::array<std::vector<float>, 2> sums{std::vector<float>(numel), std::vector<float>(numel)};
        auto count = [&, before = std::size_t{0}](std::atomic<std::size_t>& sent) mutable {
          sent += backend->bytes - before;
          before = backend->bytes;
        };
        const auto reduce = [&](const ReduceOptions& options, std::array<std::atomic<std::size_t>, 2>& sent,
                                float* sum) {
          Bytes given = own;
          EXPECT_TRUE(group->all_reduce("r", given.data(), dtype, sum, numel, options).wait().ok());
          count(sent[0]);
          given = own;
          std::vector<float> mine(part);
          EXPECT_TRUE(group->reduce_scatter("s", given.data(), dtype, mine.data(), part, options).wait().ok());
          count(sent[1]);
          const float* const of_all = sum + static_cast<std::size_t>(rank) * part;
          EXPECT_EQ(std::memcmp(mine.data(), of_all, part * sizeof(float)), 0);
        };
        reduce({}, plain, sums[0].data());
        reduce(lossless, packed, sums[1].data());
        EXPECT_EQ(std::memcmp(sums[0].data(), sums[1].data(), numel * sizeof(float)), 0);
      });
    }
  }
  const auto share = [&](std::size_t i) { return static_cast<double>(packed[i]) / static_cast<double>(plain[i]); };
  return {share(0), share(1)};
}

// The input has several pieces, and the last one is padded.
TEST(SentByNetworkAlgorithms, PackedCallsSendLessAndGiveTheSameBits) {
  std::mt19937 random(5);
  std::normal_distribution<float> draw;
  for (const int ranks : {2, 3, 4}) {
    std::vector<float> input(1'400'000 / static_cast<std::size_t>(ranks) * static_cast<std::size_t>(ranks));
    const auto [of_zeros, scattered_zeros] = packed_shares(ranks, DType::kF32, input);
    EXPECT_NEAR(of_zeros, 0.001, 0.001) << "a byte a block";
    EXPECT_NEAR(scattered_zeros, 0.001, 0.001);
    for (float& value : input) value = draw(random);
    const auto [of_floats, scattered_floats] = packed_shares(ranks, DType::kF32, input);
    EXPECT_NEAR(of_floats, 0.853, 0.004);
    EXPECT_NEAR(scattered_floats, 0.853, 0.004);
    // Contributions are bf16, and sums of two or more numbers of 8 bits are fp32.
    const auto [of_halves, scattered_halves] = packed_shares(ranks, DType::kBF16, input);
    EXPECT_LT(of_halves, 0.86);
    EXPECT_NEAR(scattered_halves, 0.705, 0.008);
    std::fill(input.begin() + 400'000, input.begin() + 900'000, 0.0F);
    EXPECT_LT(packed_shares(ranks, DType::kF32, input).first, 0.7);
  }
}

/// Returns the bytes that ranks send to each other in a gather of `numel` elements from each.
std::size_t gathered_bytes(int ranks, DType dtype, WireForm form, std::size_t numel) {
  const auto mailboxes = std::make_shared<testing::Mailboxes>();
  const auto store = memory_store();
  std::atomic<std::size_t> sent = 0;
  {
    std::vector<std::jthread> threads;
    for (int rank = 0; rank < ranks; ++rank) {
      threads.emplace_back([&, rank] {
        const auto backend = c10::make_intrusive<testing::MailboxBackend>(rank, ranks, mailboxes);
        const auto group = c10d_collectives(world_of(rank, ranks, 20), TransportKind::kGloo, backend, store, nullptr);
        std::mt19937 random(static_cast<unsigned>(rank));
        std::normal_distribution<float> draw(0, 0.02F);
        Bytes own(numel * size_of(dtype)), full(own.size() * static_cast<std::size_t>(ranks));
        for (std::size_t i = 0; i < numel; ++i) {
          const auto bits = std::bit_cast<std::uint32_t>(draw(random));
          const std::uint32_t kept = dtype == DType::kF32 ? bits : bits >> 16;
          std::memcpy(own.data() + size_of(dtype) * i, &kept, size_of(dtype));
        }
        EXPECT_TRUE(
            group->all_gather("g", own.data(), full.data(), own.size(), {.dtype = dtype, .form = form}).wait().ok());
        sent += backend->bytes;
      });
    }
  }
  return sent;
}

TEST(SentByNetworkAlgorithms, GathersSendTheBytesOfTheirForm) {
  constexpr std::size_t kNumel = 300'000;
  for (const int ranks : {2, 3}) {
    const auto messages = static_cast<std::size_t>(ranks * (ranks - 1));
    for (const DType dtype : {DType::kF32, DType::kBF16}) {
      const std::size_t plain = messages * kNumel * size_of(dtype);
      EXPECT_EQ(gathered_bytes(ranks, dtype, WireForm::kPlain, kNumel), plain);
      for (const WireForm form : {WireForm::kInt8, WireForm::kInt4})
        EXPECT_EQ(gathered_bytes(ranks, dtype, form, kNumel), messages * encoded_bytes(form, kNumel));
      const auto packed = static_cast<double>(gathered_bytes(ranks, dtype, WireForm::kLossless, kNumel));
      EXPECT_NEAR(packed / static_cast<double>(plain), dtype == DType::kF32 ? 0.853 : 0.705, 0.005);
    }
  }
}

// Short messages, and numbers that cannot be packed, are sent unchanged.
TEST(SentByNetworkAlgorithms, ShortMessagesAreSentUnpacked) {
  EXPECT_EQ(packed_shares(2, DType::kF32, std::vector<float>(30'000)), (std::pair{1.0, 1.0}));
}

// The cost of a call is the cost of its messages. If all ranks send equally much, each rank sends exactly as much as
// the model says. If some ranks send less than others, no rank sends more than the model says.
TEST(SentByNetworkAlgorithms, MeasuredTrafficEqualsTheModelOfChoices) {
  const auto check = [](int ranks, Algorithm algorithm, Operation operation, std::size_t numel, bool is_alike) {
    const std::size_t input = numel * 2 * (operation == Operation::kReduceScatter ? ranks : 1);
    const CallWork work = work_of(operation, algorithm, ranks, DType::kBF16, input);
    const std::string call = std::string(name_of(algorithm)) + " " + std::string(name_of(operation)) + " of " +
                             std::to_string(numel) + ", " + std::to_string(ranks) + " ranks";
    for (const Sent& sent : sent_by_each(ranks, algorithm, operation, DType::kBF16, numel)) {
      EXPECT_LE(static_cast<double>(sent.messages), work.messages) << call;
      EXPECT_LE(static_cast<double>(sent.bytes), work.bytes) << call;
      if (!is_alike) continue;
      EXPECT_EQ(static_cast<double>(sent.messages), work.messages) << call;
      EXPECT_EQ(static_cast<double>(sent.bytes), work.bytes) << call;
    }
  };
  for (const int ranks : {2, 3, 4, 5, 7, 8, 13, 16}) {
    const bool is_power = std::has_single_bit(static_cast<unsigned>(ranks));
    const std::size_t of_one_piece = 16 * static_cast<std::size_t>(ranks * halving_slices(ranks));
    for (const std::size_t numel : {of_one_piece, 3 * kPieceBytes / 2}) {
      if (numel > of_one_piece && (!is_power || ranks > 4)) continue;  // left out to save memory: all pieces are alike
      for (const Algorithm algorithm : {Algorithm::kDirect, Algorithm::kRing})
        check(ranks, algorithm, Operation::kAllGather, numel, true);
      check(ranks, Algorithm::kDoubling, Operation::kAllGather, numel, ranks == 2);
      for (const Operation operation : {Operation::kReduceScatter, Operation::kAllReduce}) {
        const std::size_t part =
            operation == Operation::kReduceScatter ? numel / static_cast<std::size_t>(ranks) : numel;
        check(ranks, Algorithm::kDirect, operation, part, true);
        check(ranks, Algorithm::kHalving, operation, part, is_power);
      }
    }
  }
}

// --- Failures ---

struct Failing {
  Algorithm algorithm;
  Operation operation;
  int ranks;
};

class FailuresInRounds : public ::testing::TestWithParam<Failing> {
 protected:
  /// Returns the body of ranks that make calls until one fails. Rank 0 serves the store until the last rank has ended.
  static ForkedRanks::Body call_until_failure(double timeout_s) {
    const int port = free_port();
    return [=, what = GetParam()](int rank, KeyValueStore& outside) -> absl::Status {
      TESSERA_ASSIGN_OR_RETURN(const auto joined, WatchedRank::join(rank, what.ranks, port, what.algorithm, timeout_s));
      constexpr std::size_t kNumel = 10'000;
      std::vector<float> input(kNumel * static_cast<std::size_t>(what.ranks)), output(input.size());
      absl::Status status;
      for (int i = 0; status.ok(); ++i) {
        status = call_once(*joined.group, what.operation, input.data(), DType::kF32, output.data(), kNumel);
        if (i == 5) TESSERA_RETURN_IF_ERROR(outside.set("working/" + std::to_string(rank), "yes"));
      }
      for (int other = 1; rank == 0 && other < what.ranks; ++other)
        if (other != 1) told(outside, "end/" + std::to_string(other)).status().IgnoreError();
      return status;
    };
  }

  /// Sends rank 1 a signal while all ranks work, and checks that every other rank names rank 1.
  static void expect_named(double timeout_s, int signal) {
    const Failing what = GetParam();
    ForkedRanks ranks(what.ranks, call_until_failure(timeout_s));
    for (int rank = 0; rank < what.ranks; ++rank)
      ASSERT_TRUE(told(ranks.store(), "working/" + std::to_string(rank)).ok());
    Deadline soon(std::chrono::seconds(signal == SIGSTOP ? 7 : 10));  // Gloo sometimes misses that a connection ended
    ranks.signal(1, signal);
    const std::string operation(name_of(what.operation));
    for (int rank = what.ranks - 1; rank >= 0; --rank) {
      if (rank == 1) continue;
      const RankEnd end = ranks.wait(rank);
      EXPECT_EQ(end.exit_code, ExitCode::kPeerLost) << end.message << ", signal " << end.signal;
      // A rank may notice late that its connection has ended. It then answers the questions of the other ranks late, so
      // the message may name this rank too.
      EXPECT_THAT(end.message, AllOf(HasSubstr("rank " + std::to_string(rank) + "/" + std::to_string(what.ranks) +
                                               " blocks.3 " + operation + " #"),
                                     ContainsRegex("; rank (0, )?1([-,][-, 0-9]*)? do(es)? not answer")));
    }
    EXPECT_FALSE(soon.passed());
  }
};

TEST_P(FailuresInRounds, KilledRankIsNamedByTheOthers) { expect_named(kNeverPassed, SIGKILL); }

TEST_P(FailuresInRounds, StoppedRankIsNamedAtTheTimeLimit) { expect_named(patient_s(1), SIGSTOP); }

/// Returns how rank 0 ends in `call` after rank 1 has failed, while rank 1's connections stay open. A rank whose
/// network library did not notice the end of its connections is in the same situation.
RankEnd end_of_lonely(const std::function<Work(Collectives&)>& call) {
  const int port = free_port();
  ForkedRanks ranks(2, [&](int rank, KeyValueStore& outside) -> absl::Status {
    TESSERA_ASSIGN_OR_RETURN(const auto joined, WatchedRank::join(rank, 2, port, Algorithm::kDirect));
    TESSERA_RETURN_IF_ERROR(joined.group->barrier("start").wait());
    if (rank == 0) return call(*joined.group).wait();
    FailureReport(world_of(1, 2), joined.store).publish_reason(make_error(ExitCode::kIo, "the disk is full"));
    return told(outside, "over").status();
  });
  const RankEnd end = ranks.wait(0);
  require_ok(ranks.store().set("over", "yes"));
  EXPECT_EQ(ranks.wait(1).exit_code, ExitCode::kOk) << "rank 1 ended first";
  return end;
}

TEST(FailureWithOpenConnections, WaitingRankLearnsItFromTheStore) {
  std::vector<int> full(200);
  const RankEnd end = end_of_lonely(
      [&](Collectives& group) { return group.all_gather("step", full.data(), full.data(), 100 * sizeof(int)); });
  EXPECT_EQ(end.exit_code, ExitCode::kPeerLost) << end.message << ", signal " << end.signal;
  EXPECT_THAT(end.message,
              AllOf(HasSubstr("rank 0/2 step all_gather #2"), HasSubstr("rank 1 gave up: the disk is full")));
}

// No function can end a barrier of Gloo.
TEST(FailureWithOpenConnections, ProcessWhoseCallCannotBeEndedEnds) {
  const RankEnd end = end_of_lonely([](Collectives& group) { return group.barrier("step"); });
  EXPECT_EQ(end.exit_code, ExitCode::kPeerLost) << end.message << ", signal " << end.signal;
}

/// Returns the local port of a TCP connection over IPv4, or the port of its other end. Returns 0 for anything else.
int port_of(int fd, bool of_other_end) {
  sockaddr_in address{};
  socklen_t length = sizeof address;
  auto* const raw = reinterpret_cast<sockaddr*>(&address);
  if ((of_other_end ? getpeername(fd, raw, &length) : getsockname(fd, raw, &length)) != 0) return 0;
  return address.sin_family == AF_INET ? ntohs(address.sin_port) : 0;
}

constexpr int kDescriptors = 4096;  // more than a rank of these tests opens

/// Returns the port at which other ranks watch `rank`.
int port_of_watch(KeyValueStore& store, int rank) {
  const std::string place = store.get("listens/" + std::to_string(rank), 20s).value_or("");
  if (place.empty()) throw std::runtime_error("this rank cannot be watched");
  return std::atoi(place.c_str() + place.find(' ') + 1);
}

/// Waits until the rank before this one watches this process, at `port`.
void wait_until_watched(int port) {
  for (Deadline limit(20s); !limit.passed(); std::this_thread::sleep_for(50ms))
    for (int fd = 0; fd < kDescriptors; ++fd)
      if (port_of(fd, false) == port && port_of(fd, true) != 0) return;
  throw std::runtime_error("nobody watches this rank");
}

/// Calls `last`, and then kills this process. Its connections over Gloo stay open until the test ends, since a child
/// process keeps these connections, and nothing else.
[[noreturn]] void die_with_open_connections(int store_port, int watch_port, const std::function<void()>& last) {
  std::array<bool, kDescriptors> stays{};
  for (int fd = 0; fd < kDescriptors; ++fd) {
    const int here = port_of(fd, false), there = port_of(fd, true);
    stays[static_cast<std::size_t>(fd)] = there != 0 && here != store_port && there != store_port && here != watch_port;
  }
  const pid_t test = getppid();
  if (fork() == 0) {
    for (int fd = 0; fd < kDescriptors; ++fd)
      if (!stays[static_cast<std::size_t>(fd)]) close(fd);
    alarm(60);
    while (kill(test, 0) == 0) usleep(50'000);
    _exit(0);
  }
  last();
  for (;;) raise(SIGKILL);
}

/// Makes two ranks. Rank `ends` makes one call, calls `last`, and ends with open connections over Gloo. The other rank
/// makes another call.
std::unique_ptr<ForkedRanks> world_where(int ends, void (*last)(const CallWatch& watch)) {
  const int port = free_port();
  return std::make_unique<ForkedRanks>(2, [=](int rank, KeyValueStore& outside) -> absl::Status {
    TESSERA_ASSIGN_OR_RETURN(const auto joined, WatchedRank::join(rank, 2, port, Algorithm::kDirect));
    TESSERA_RETURN_IF_ERROR(joined.group->barrier("start").wait());
    if (rank == ends) {
      const int watch_port = port_of_watch(*joined.store, rank);
      wait_until_watched(watch_port);
      TESSERA_RETURN_IF_ERROR(outside.set("dies", "yes"));
      die_with_open_connections(port, watch_port, [&] { last(*joined.watch); });
    }
    TESSERA_RETURN_IF_ERROR(told(outside, "dies", 30s).status());
    std::vector<int> full(200);
    return joined.group->all_gather("step", full.data(), full.data(), 100 * sizeof(int)).wait();
  });
}

// About once in 300 kills, Gloo does not notice the end of a connection. Here no connection over Gloo ends.
TEST(FailureWithOpenConnections, KilledRankIsNamedThoughItSaidNothing) {
  std::array<std::unique_ptr<ForkedRanks>, 2> worlds;  // both at the same time, since each waits for seconds
  for (int killed = 0; killed < 2; ++killed)
    worlds[static_cast<std::size_t>(killed)] = world_where(killed, [](const CallWatch&) {});
  for (int killed = 0; killed < 2; ++killed) {
    ForkedRanks& ranks = *worlds[static_cast<std::size_t>(killed)];
    const RankEnd end = ranks.wait(1 - killed);
    EXPECT_EQ(end.exit_code, ExitCode::kPeerLost) << end.message << ", signal " << end.signal;
    EXPECT_THAT(end.message,
                AllOf(HasSubstr("/2 step all_gather #2"),
                      HasSubstr(killed == 0 ? "rank 0 is gone, which serves the store" : "rank 1 does not answer")));
    EXPECT_EQ(ranks.wait(killed).signal, SIGKILL);
  }
}

// A program that returns from main too early reports that it ends without an error, and how many calls it has begun.
TEST(FailureWithOpenConnections, RankThatEndsWellTooEarlyIsNamed) {
  std::array<std::unique_ptr<ForkedRanks>, 2> worlds;
  for (int ends = 0; ends < 2; ++ends)
    worlds[static_cast<std::size_t>(ends)] = world_where(ends, [](const CallWatch& watch) { watch.tell_end(); });
  for (int ends = 0; ends < 2; ++ends) {
    const RankEnd end = worlds[static_cast<std::size_t>(ends)]->wait(1 - ends);
    EXPECT_EQ(end.exit_code, ExitCode::kInternal) << end.message << ", signal " << end.signal;
    EXPECT_THAT(end.message,
                HasSubstr("which rank " + std::to_string(ends) + " has not begun: its program has ended; every rank"));
  }
}

// A static object is destroyed after the program has reported that it ends without an error. Here the object's
// destructor makes a call. The other rank waits for this call longer than it would wait for a rank that has ended.
TEST(FailureWithOpenConnections, RankWhoseDestructorsRunLongIsNotSaidToHaveEnded) {
  const int port = free_port();
  expect_all_ok(fork_ranks(2, [&](int rank, KeyValueStore&) -> absl::Status {
    TESSERA_ASSIGN_OR_RETURN(const auto joined, WatchedRank::join(rank, 2, port, Algorithm::kDirect));
    TESSERA_RETURN_IF_ERROR(joined.group->barrier("start").wait());
    if (rank == 1) {
      wait_until_watched(port_of_watch(*joined.store, rank));
      joined.watch->tell_end();
      std::this_thread::sleep_for(CallWatch::kLong + 3s);
    }
    TESSERA_RETURN_IF_ERROR(joined.group->barrier("of a destructor").wait());
    return joined.group->barrier("end").wait();
  }));
}

// A rank whose program has ended well has done its part of each call. Other ranks may need more time for the call.
TEST(FailureWithOpenConnections, RankWhoseProgramEndedWellLeavesNobodyAlone) {
  const auto store = memory_store();
  const FailureReport report(world_of(0, 3, kNeverPassed), store);
  const auto is_left_alone = [&] {
    return report.is_left_alone([&](const std::string& key) { return store->has(key); });
  };
  EXPECT_FALSE(is_left_alone());
  for (const std::string& key : {std::string(kAnyGoneRank), key_of_gone_rank(1)}) ASSERT_TRUE(store->set(key, "").ok());
  EXPECT_TRUE(is_left_alone());
  ASSERT_TRUE(store->set(key_of_ended_rank(1), "").ok());
  EXPECT_FALSE(is_left_alone());
  ASSERT_TRUE(store->set(key_of_gone_rank(2), "").ok());
  EXPECT_TRUE(is_left_alone());
}

// A firewall may end an idle connection. Here the other end of such a connection is closed, while the process continues
// to run.
TEST(FailureWithOpenConnections, RankThatTakesAnotherConnectionIsNotGone) {
  NextRank watching(0, 2, "127.0.0.1");
  auto watched = std::make_unique<NextRank>(1, 2, "127.0.0.1");
  ASSERT_TRUE(watching.connect(watched->places().own));
  EXPECT_FALSE(watching.has_ended());
  int ended = 0;
  for (const int listener : listening_sockets()) {
    pollfd readable{listener, POLLIN, 0};
    if (poll(&readable, 1, 0) <= 0) continue;
    close(accept(listener, nullptr, nullptr));
    ++ended;
  }
  EXPECT_EQ(ended, 1);
  std::this_thread::sleep_for(50ms);
  EXPECT_FALSE(watching.has_ended());
  watched.reset();
  Deadline limit(10s);
  while (!watching.has_ended() && !limit.passed()) std::this_thread::sleep_for(10ms);
  EXPECT_FALSE(limit.passed());
}

// Only ranks of the job know the word that a process must send to the port.
TEST(FailureWithOpenConnections, StrangersAtThePortOfTheWatchAreBounded) {
  constexpr int kStrangers = 200, kKept = 64;
  auto watched = std::make_unique<NextRank>(0, 2, "127.0.0.1");
  NextRank watching(1, 2, "127.0.0.1"), wrong(1, 2, "127.0.0.1");
  const std::string place = watched->places().own;
  ASSERT_TRUE(watching.connect(place));
  ASSERT_TRUE(wrong.connect(place.substr(0, place.rfind(' ')) + " 0000"));
  const SocketAddress there = numeric_address("127.0.0.1", std::atoi(place.c_str() + place.find(' ') + 1));
  std::vector<int> strangers;
  for (int i = 0; i < kStrangers; ++i) {
    const Connected made = connect_in_time(there, 10s);
    ASSERT_EQ(made.error, 0) << i;
    strangers.push_back(made.socket);
    if (i % 50 == 0) watched->take_watchers();
  }
  watched->take_watchers();
  const auto is_open = [](int fd) {
    char word = 0;
    return recv(fd, &word, 1, MSG_DONTWAIT) < 0 && errno == EAGAIN;
  };
  Deadline limit(10s);
  while (std::ranges::count_if(strangers, is_open) > kKept && !limit.passed()) std::this_thread::sleep_for(10ms);
  EXPECT_EQ(std::ranges::count_if(strangers, is_open), kKept);
  EXPECT_TRUE(std::all_of(strangers.end() - kKept, strangers.end(), is_open)) << "the oldest go first";
  for (const int fd : strangers) close(fd);
  watched->tell_end("its report");
  watched.reset();
  while (!watching.has_ended() && !limit.passed()) std::this_thread::sleep_for(10ms);
  EXPECT_EQ(watching.end_report(), "its report");
  EXPECT_FALSE(wrong.has_ended_well());
}

// The first watched rank ends as if it were killed, the second one like a program that returns from main.
TEST(FailureWithOpenConnections, RankThatEndsWellTellsThoseThatWatchIt) {
  for (const bool tells : {false, true}) {
    auto watched = std::make_unique<NextRank>(0, 3, "127.0.0.1");
    NextRank before(2, 3, "127.0.0.1"), other(/*watched=*/0);
    EXPECT_EQ(other.places().own, "");
    EXPECT_EQ(other.places().next_key, before.places().next_key);
    for (NextRank* const each : {&before, &other}) {
      EXPECT_FALSE(each->is_watched());
      ASSERT_TRUE(each->connect(watched->places().own));
      EXPECT_TRUE(each->is_watched());
      EXPECT_FALSE(each->has_ended_well());
    }
    if (tells) {
      watched->tell_end("its first report");
      for (NextRank* const each : {&before, &other}) {
        Deadline limit(10s);
        while (!each->has_ended_well() && !limit.passed()) std::this_thread::sleep_for(10ms);
        EXPECT_FALSE(each->has_ended()) << "its destructors may run long";
        EXPECT_EQ(each->end_report(), "");
      }
      watched->tell_end("its report");
    }
    EXPECT_EQ(NextRank(/*watched=*/0).connect(watched->places().own), !tells) << "who comes later would not be told";
    watched.reset();
    for (NextRank* const each : {&before, &other}) {
      Deadline limit(10s);
      while (!each->has_ended() && !limit.passed()) std::this_thread::sleep_for(10ms);
      EXPECT_FALSE(limit.passed());
      EXPECT_EQ(each->has_ended_well(), tells);
      EXPECT_EQ(each->end_report(), tells ? "its report" : "");
      EXPECT_FALSE(each->is_silent()) << "its host answers";
    }
    EXPECT_TRUE(before.go_on());
    EXPECT_EQ(before.rank(), 1);
    EXPECT_FALSE(before.is_watched()) << "its host is there, so only a connection counts";
    EXPECT_FALSE(before.go_on()) << "no other rank is left";
  }
}

// The thread that gathers gets the reason. The caller must get the reason too.
TEST(AbortInRounds, PeersLearnTheReason) {
  const int port = free_port();
  const auto ends = fork_ranks(3, [&](int rank, KeyValueStore& outside) -> absl::Status {
    TESSERA_ASSIGN_OR_RETURN(const auto group, join_gloo(rank, 3, port, std::make_shared<Algorithm>(Algorithm::kRing)));
    std::vector<int> full(300);
    const auto gather = [&] { return group->all_gather("step", full.data(), full.data(), 100 * sizeof(int)); };
    TESSERA_RETURN_IF_ERROR(gather().wait());
    if (rank != 0) return gather().wait();
    group->abort(make_error(ExitCode::kIo, "the disk is full"));
    for (const char* end : {"end/1", "end/2"}) told(outside, end).status().IgnoreError();
    return gather().wait();
  });
  EXPECT_EQ(ends[0].exit_code, ExitCode::kIo);
  for (const int rank : {1, 2}) {
    EXPECT_EQ(ends[rank].exit_code, ExitCode::kPeerLost);
    EXPECT_THAT(ends[rank].message, HasSubstr("rank 0 gave up: the disk is full"));
  }
}

INSTANTIATE_TEST_SUITE_P(Calls, FailuresInRounds,
                         ::testing::Values(Failing{Algorithm::kRing, Operation::kAllGather, 5},
                                           Failing{Algorithm::kDoubling, Operation::kAllGather, 4},
                                           Failing{Algorithm::kHalving, Operation::kReduceScatter, 5},
                                           Failing{Algorithm::kHalving, Operation::kAllReduce, 5},
                                           Failing{Algorithm::kDoubling, Operation::kAllReduce, 3}));

}  // namespace
}  // namespace tessera
