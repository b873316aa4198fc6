// Tests the results and the compressed transfers of groups of processes over shared memory, over Gloo and over both.
// Also tests what the other ranks learn when a rank dies, stops or makes another call.

#include "runtime/comm/job/process_mesh.h"

#include <fcntl.h>
#include <gmock/gmock.h>
#include <signal.h>
#include <sys/resource.h>
#include <sys/socket.h>
#include <unistd.h>

#include <algorithm>
#include <cstdio>
#include <cstdlib>
#include <filesystem>
#include <fstream>
#include <optional>
#include <set>
#include <sstream>
#include <thread>

#include "runtime/base/process/process_limits.h"
#include "runtime/comm/c10d/tcp_store.h"
#include "runtime/comm/sum/pairwise_sum.h"
#include "runtime/comm/sum/wire_codec.h"
#include "runtime/config/transport_rows.h"
#include "tests/comm/collectives_properties.h"
#include "tests/comm/process_world.h"
#include "tests/support/fork_ranks.h"
#include "tests/support/free_port.h"
#include "tests/support/limits/patience.h"

namespace tessera {
namespace {

using testing::AllOf;
using testing::AnyOf;
using testing::ContainsRegex;
using testing::HasSubstr;
using testing::Not;
using namespace std::chrono_literals;

struct World {
  int ranks, hosts;
  TransportChoice choice;
  std::string transport;
};

class ProcessMesh : public testing::TestWithParam<World> {};

TEST_P(ProcessMesh, EveryOperationIsExactOnTheChosenTransport) {
  const World world = GetParam();
  const int port = free_port();
  expect_all_ok(fork_ranks(world.ranks, [&](int rank, KeyValueStore&) -> absl::Status {
    TESSERA_ASSIGN_OR_RETURN(const Mesh mesh,
                             make_process_mesh(topology_of(rank, world.ranks, world.hosts, port), over(world.choice)));
    TESSERA_ASSIGN_OR_RETURN(const MeshAxes axes, groups_of(mesh).axes(1, world.ranks));
    require(axes.world->transport() == world.transport, axes.world->transport());
    check_all_operations(*axes.world, true, 8200);
    check_all_reduce(*axes.reduce, DType::kBF16, 50'001, false, false);
    check_all_reduce(*axes.reduce, DType::kF32, 50'001, false, true);
    return axes.world->barrier("end").wait();
  }));
}

INSTANTIATE_TEST_SUITE_P(Worlds, ProcessMesh,
                         testing::Values(World{2, 1, TransportChoice::kAuto, "host"},
                                         World{2, 1, TransportChoice::kGloo, "gloo"},
                                         World{3, 3, TransportChoice::kAuto, "gloo"},
                                         World{4, 2, TransportChoice::kAuto, "hierarchical(host, gloo)"},
                                         World{4, 2, TransportChoice::kGloo, "gloo"}));

// Calls over Gloo ask the job's ChooseAlgorithm which algorithm to use. A group across hosts consists of one group
// inside each host and one group that joins the hosts.
TEST(ProcessMeshTest, CallsOverGlooAskForTheirAlgorithm) {
  for (const World& world :
       {World{3, 1, TransportChoice::kGloo, "gloo"}, World{4, 2, TransportChoice::kAuto, "hierarchical(host, gloo)"}}) {
    const int port = free_port();
    expect_all_ok(fork_ranks(world.ranks, [&](int rank, KeyValueStore&) -> absl::Status {
      const int ranks_over_gloo = world.hosts == 1 ? world.ranks : world.hosts;
      int asked = 0;
      const ChooseAlgorithm choose = [&](Operation operation, int ranks, DType, std::size_t) {
        require(ranks == ranks_over_gloo, "ranks of the group");
        ++asked;
        return operation == Operation::kAllGather ? Algorithm::kRing : Algorithm::kHalving;
      };
      TESSERA_ASSIGN_OR_RETURN(const Mesh mesh, make_process_mesh(topology_of(rank, world.ranks, world.hosts, port),
                                                                  over(world.choice), choose));
      TESSERA_ASSIGN_OR_RETURN(const MeshAxes axes, groups_of(mesh).axes(1, world.ranks));
      require(axes.world->transport() == world.transport, axes.world->transport());
      check_all_gather(*axes.world, 1000, false, false);
      require(asked > 0, "a gather asks");
      asked = 0;
      check_all_reduce(*axes.reduce, DType::kBF16, 50'001, false, false);
      require(asked > 0, "a reduction asks");
      return axes.world->barrier("end").wait();
    }));
  }
}

// --- MPI, which only some machines have ---

Topology started_by_mpirun(int rank, int ranks, int port) {
  Topology topology = topology_of(rank, ranks, 1, port);
  topology.launcher = "openmpi";
  return topology;
}

TEST(Mpi, RanksOfAnotherLauncherAreRefused) {
  const auto mesh = make_process_mesh(topology_of(0, 2, 1, free_port()), over(TransportChoice::kMpi));
  EXPECT_EQ(exit_code_of(mesh.status()), ExitCode::kConfig);
  EXPECT_THAT(message_of(mesh.status()), AllOf(HasSubstr("started by tessera"), HasSubstr("mpirun -n N")));
}

TEST(Mpi, OneRankNeedsNoPlugIn) {
  const auto mesh = make_process_mesh(topology_of(0, 1, 1, 0), over(TransportChoice::kMpi));
  EXPECT_TRUE(mesh.ok()) << mesh.status();
}

TEST(Mpi, MissingPlugInIsReportedWithItsRemedy) {
  // This runs in a separate process, since a process looks for the plug-in only once.
  const auto ends = fork_ranks(1, [](int, KeyValueStore&) -> absl::Status {
    setenv("TESSERA_MPI_PLUGIN", "/none/libtessera_mpi.so", 1);
    return make_process_mesh(started_by_mpirun(0, 2, 0), over(TransportChoice::kMpi)).status();
  });
  EXPECT_EQ(ends[0].exit_code, ExitCode::kUnavailable);
  EXPECT_THAT(ends[0].message, AllOf(HasSubstr("/none/libtessera_mpi.so"), HasSubstr("libopenmpi-dev")));
}

/// Makes all calls, as one of the ranks that mpirun started.
absl::Status call_over_mpi(int rank, int ranks, int port) {
  TESSERA_ASSIGN_OR_RETURN(const Mesh mesh,
                           make_process_mesh(started_by_mpirun(rank, ranks, port), over(TransportChoice::kMpi)));
  TESSERA_ASSIGN_OR_RETURN(const MeshAxes axes, groups_of(mesh).axes(1, ranks));
  require(axes.world->transport() == "mpi", axes.world->transport());
  check_all_operations(*axes.world, true, 8200);
  check_all_reduce(*axes.reduce, DType::kBF16, 50'001, false, false);
  check_all_reduce(*axes.reduce, DType::kF32, 1'500'001, false, true);
  // Packed messages are shorter than the memory that receives them.
  const auto inputs = inputs_of_all(ranks, DType::kF32, 400'003, 17);
  Bytes input = inputs[static_cast<std::size_t>(rank)];
  std::vector<float> sum(400'003);
  ReduceOptions packed;
  packed.contributions = packed.sums = WireForm::kLossless;
  TESSERA_RETURN_IF_ERROR(
      axes.reduce->all_reduce("packed", input.data(), DType::kF32, sum.data(), sum.size(), packed).wait());
  require(same_bits(sum, reference_sum(inputs, DType::kF32, 0, sum.size())), "packed sums");
  return axes.world->barrier("end").wait();
}

/// A rank that mpirun has started for a test, and the port at which it meets the other ranks.
struct RankOfMpirun {
  int rank, ranks, port;
};

/// Returns nothing if run_by_mpirun has not started this process.
std::optional<RankOfMpirun> rank_of_mpirun() {
  if (!std::getenv("TESSERA_TEST_MPI_PORT")) return std::nullopt;
  const auto number = [](const char* name) { return std::stoi(std::getenv(name)); };
  return RankOfMpirun{number("OMPI_COMM_WORLD_RANK"), number("OMPI_COMM_WORLD_SIZE"), number("TESSERA_TEST_MPI_PORT")};
}

/// Runs the current test again on ranks that mpirun starts, and expects that it passes on each. Skips the test if there
/// is no MPI.
void run_by_mpirun([[maybe_unused]] int ranks) {
#ifdef TESSERA_MPI_FILE
  if (!std::filesystem::exists("/usr/bin/mpirun")) GTEST_SKIP() << "there is no /usr/bin/mpirun (Debian: openmpi-bin)";
  const testing::TestInfo& test = *testing::UnitTest::GetInstance()->current_test_info();
  const std::string self = std::filesystem::read_symlink("/proc/self/exe").string();
  const std::string command =
      "TESSERA_MPI_PLUGIN='" TESSERA_MPI_FILE "' TESSERA_TEST_MPI_PORT=" + std::to_string(free_port()) +
      " /usr/bin/mpirun --allow-run-as-root --oversubscribe --bind-to none -n " + std::to_string(ranks) + " '" + self +
      "' --gtest_filter=" + test.test_suite_name() + "." + test.name() + " 2>&1";
  FILE* const started = popen(command.c_str(), "r");
  ASSERT_NE(started, nullptr);
  std::string output;
  char part[4096];
  while (const std::size_t bytes = fread(part, 1, sizeof part, started)) output.append(part, bytes);
  EXPECT_EQ(pclose(started), 0) << output;
#else
  GTEST_SKIP() << "this build has no plug-in for MPI (Debian: libopenmpi-dev)";
#endif
}

TEST(Mpi, EveryOperationIsExact) {
  const auto self = rank_of_mpirun();
  if (!self) return run_by_mpirun(3);
  const absl::Status end = call_over_mpi(self->rank, self->ranks, self->port);
  EXPECT_TRUE(end.ok()) << message_of(end);
}

TEST(Mpi, RanksThatMpiCountsDifferentlyAreRefused) {
  const auto self = rank_of_mpirun();
  if (!self) return run_by_mpirun(2);
  const auto mesh = make_process_mesh(started_by_mpirun(1 - self->rank, 2, self->port), over(TransportChoice::kMpi));
  ASSERT_TRUE(mesh.ok()) << mesh.status();
  const absl::Status refused = groups_of(*mesh).axes(1, 2).status();
  EXPECT_EQ(exit_code_of(refused), ExitCode::kConfig) << refused;
  EXPECT_THAT(message_of(refused), AllOf(HasSubstr("/2 to MPI"), HasSubstr("by one mpirun")));
}

// The receive that still waits is cancelled, so both ranks can end MPI and their programs normally.
TEST(MpiFailures, RankThatDoesNotCallIsNamedAtTheTimeLimit) {
  const auto self = rank_of_mpirun();
  if (!self) return run_by_mpirun(2);
  const auto mesh =
      make_process_mesh(started_by_mpirun(self->rank, 2, self->port), over(TransportChoice::kMpi, patient_s(1)));
  ASSERT_TRUE(mesh.ok()) << mesh.status();
  const auto axes = groups_of(*mesh).axes(1, 2);
  ASSERT_TRUE(axes.ok()) << axes.status();
  KeyValueStore& store = groups_of(*mesh).store();
  if (self->rank == 1) {
    EXPECT_TRUE(store.get("end", 1h).ok());
    store.set("heard", "").IgnoreError();
    return;
  }
  std::vector<float> full(100);
  const absl::Status late = axes->world->all_gather("a", full.data(), full.data(), 50 * sizeof(float)).wait();
  EXPECT_EQ(exit_code_of(late), ExitCode::kPeerLost) << late;
  EXPECT_THAT(message_of(late), HasSubstr("rank 1 does not answer"));
  EXPECT_TRUE(store.set("end", "").ok());
  EXPECT_TRUE(store.get("heard", 1h).ok());  // this rank serves the store until then
}

/// The end of a rank's call, and the seconds that the call took.
struct TimedEnd {
  absl::Status status;
  double seconds = 0;
};

/// Makes different calls on the ranks: rank 0 gathers, and the other ranks reduce. The two calls are calls of different
/// groups, so no transport notices the mistake.
TimedEnd call_in_different_groups(const MeshAxes& axes, int rank) {
  std::vector<float> full(100 * static_cast<std::size_t>(axes.world->size()));
  const auto begin = std::chrono::steady_clock::now();
  TimedEnd end;
  end.status =
      rank == 0 ? axes.gather->all_gather("blocks.3", full.data(), full.data(), 400).wait()
                : axes.reduce->reduce_scatter("head", full.data(), DType::kF32, full.data(), 100, Waits::kLater).wait();
  end.seconds = std::chrono::duration<double>(std::chrono::steady_clock::now() - begin).count();
  return end;
}

void expect_both_calls_are_named(const RankEnd& end, double seconds, int rank) {
  EXPECT_EQ(end.exit_code, ExitCode::kInternal) << end.message;
  EXPECT_THAT(end.message,
              AllOf(HasSubstr("rank " + std::to_string(rank) + "/"),
                    HasSubstr("rank 0 waits in all_gather 'blocks.3' of 400 bytes (#1), which rank"),
                    HasSubstr("waits in reduce_scatter 'head' of 100 fp32 (#1), which rank 0 has not begun"),
                    HasSubstr("hint: where one rank alone evaluates")));
  EXPECT_TRUE(in_time(seconds, 10)) << seconds << " s";
}

TEST(MpiFailures, RanksWaitingInDifferentGroupsAreNamed) {
  const auto self = rank_of_mpirun();
  if (!self) return run_by_mpirun(2);
  const auto mesh = make_process_mesh(started_by_mpirun(self->rank, 2, self->port), over(TransportChoice::kMpi));
  ASSERT_TRUE(mesh.ok()) << mesh.status();
  const auto axes = groups_of(*mesh).axes(1, 2);
  ASSERT_TRUE(axes.ok()) << axes.status();
  ASSERT_EQ(axes->world->transport(), "mpi");
  const TimedEnd end = call_in_different_groups(*axes, self->rank);
  expect_both_calls_are_named({.exit_code = exit_code_of(end.status), .message = message_of(end.status)}, end.seconds,
                              self->rank);
  KeyValueStore& store = groups_of(*mesh).store();
  if (self->rank == 1) store.set("ended", "").IgnoreError();
  if (self->rank == 1) return;
  EXPECT_TRUE(store.get("ended", 1h).ok());  // this rank serves the store until then
}

/// Returns `all` after it was encoded as a whole and decoded into `to`.
Bytes rounded(WireForm form, const Bytes& all, DType dtype, DType to = DType::kF32) {
  const std::size_t numel = all.size() / size_of(dtype);
  if (!is_lossy(form)) return all;
  std::vector<std::uint32_t> wire(encoded_bytes(form, numel) / 4);
  encode(form, all.data(), dtype, numel, reinterpret_cast<std::byte*>(wire.data()));
  Bytes result(numel * size_of(to));
  decode(form, reinterpret_cast<const std::byte*>(wire.data()), to, result.data(), numel);
  return result;
}

/// Returns the pairwise sum of elements [begin, begin + numel) of all inputs.
std::vector<float> sum_of(const std::vector<Bytes>& inputs, DType dtype, std::size_t begin, std::size_t numel) {
  std::vector<const void*> sources;
  for (const Bytes& input : inputs) sources.push_back(input.data() + begin * size_of(dtype));
  std::vector<float> sum(numel);
  pairwise_sum(sources, dtype, sum.data(), numel);
  return sum;
}

Bytes bytes_of(const std::vector<float>& values) {
  Bytes bytes(values.size() * sizeof(float));
  std::memcpy(bytes.data(), values.data(), bytes.size());
  return bytes;
}

/// Makes three gathers at a time, each with its own codec. The second gather is in place.
void check_gathers_in_forms(Collectives& group, DType dtype, std::size_t numel, bool is_in_background) {
  const auto ranks = static_cast<std::size_t>(group.size()), mine = static_cast<std::size_t>(group.rank());
  const std::size_t bytes = numel * size_of(dtype);
  const std::vector<Bytes> inputs = inputs_of_all(group.size(), dtype, numel, 37);
  using enum WireForm;
  const std::array forms{kLossless, kInt8, kInt4};
  std::array<Bytes, 3> full;
  std::vector<Work> works;
  for (std::size_t i = 0; i < forms.size(); ++i) {
    full[i].resize(ranks * bytes);
    std::byte* const own = full[i].data() + mine * bytes;
    if (i == 1 && bytes > 0) std::memcpy(own, inputs[mine].data(), bytes);
    works.push_back(group.all_gather("forms", i == 1 ? own : inputs[mine].data(), full[i].data(), bytes,
                                     {.dtype = dtype, .form = forms[i]}));
    if (!is_in_background) require_ok(works.back().wait());
  }
  for (std::size_t i = 0; i < forms.size(); ++i) {
    require_ok(works[i].wait());
    for (std::size_t q = 0; q < ranks; ++q)
      require(equal(full[i].data() + q * bytes, rounded(forms[i], inputs[q], dtype, dtype)),
              at(std::to_string(i) + " gather", dtype, numel, group.rank()));
  }
}

void check_whole_numbers_stay(Collectives& group) {
  for (const DType dtype : {DType::kI64, DType::kI32, DType::kU8, DType::kF64}) {
    for (const WireForm form : {WireForm::kInt8, WireForm::kLossless}) {
      const std::vector<Bytes> inputs = inputs_of_all(group.size(), DType::kF32, 40'000, 43);
      Bytes full(static_cast<std::size_t>(group.size()) * inputs[0].size());
      require_ok(group
                     .all_gather("whole", inputs[static_cast<std::size_t>(group.rank())].data(), full.data(),
                                 inputs[0].size(), {.dtype = dtype, .form = form})
                     .wait());
      for (std::size_t q = 0; q < inputs.size(); ++q)
        require(equal(full.data() + q * inputs[q].size(), inputs[q]),
                std::string(name_of(dtype)) + " is not as it was");
    }
  }
}

TEST(GathersInForms, BringTheSameValuesToAllRanks) {
  for (const auto& [ranks, hosts] : {std::pair(2, 2), {3, 3}, {4, 2}}) {
    const int port = free_port();
    expect_all_ok(fork_ranks(ranks, [&, hosts = hosts, ranks = ranks](int rank, KeyValueStore&) -> absl::Status {
      TESSERA_ASSIGN_OR_RETURN(const Mesh mesh, make_process_mesh(topology_of(rank, ranks, hosts, port), over()));
      TESSERA_ASSIGN_OR_RETURN(const MeshAxes axes, groups_of(mesh).axes(1, ranks));
      for (const DType dtype : {DType::kF32, DType::kBF16, DType::kF16}) {
        for (const std::size_t numel : {0, 1, 777, 70'000})
          check_gathers_in_forms(*axes.gather, dtype, numel, axes.gather->gathers_in_background());
      }
      check_gathers_in_forms(*axes.gather, DType::kF32, 600'077,
                             axes.gather->gathers_in_background());  // background gathers have several pieces
      check_whole_numbers_stay(*axes.gather);
      return axes.world->barrier("end").wait();
    }));
  }
}

// Shared memory rounds nothing.
TEST(GathersInForms, RoundNothingOnOneHost) {
  const int port = free_port();
  expect_all_ok(fork_ranks(2, [&](int rank, KeyValueStore&) -> absl::Status {
    TESSERA_ASSIGN_OR_RETURN(const Mesh mesh, make_process_mesh(topology_of(rank, 2, 1, port), over()));
    TESSERA_ASSIGN_OR_RETURN(const MeshAxes axes, groups_of(mesh).axes(1, 2));
    const std::vector<Bytes> inputs = inputs_of_all(2, DType::kF32, 500, 41);
    Bytes full(2 * inputs[0].size());
    require_ok(axes.gather
                   ->all_gather("plain", inputs[static_cast<std::size_t>(rank)].data(), full.data(), inputs[0].size(),
                                {.dtype = DType::kF32, .form = WireForm::kInt8})
                   .wait());
    for (std::size_t q = 0; q < 2; ++q) require(equal(full.data() + q * inputs[q].size(), inputs[q]), "exact");
    return axes.world->barrier("end").wait();
  }));
}

struct Forms {
  WireForm contributions, sums;
};

/// Checks sums of compressed contributions to parts of `share` elements. The runs of elements that the codec encodes
/// together begin where they would begin if the whole input were encoded. This is checked for all-reduce and for
/// reduce-scatter, so the bits do not depend on the strategy.
void check_compressed_sums(Collectives& group, Forms forms, Waits waits, DType dtype, std::size_t share) {
  ReduceOptions options(waits);
  options.contributions = forms.contributions;
  options.sums = forms.sums;
  const auto ranks = static_cast<std::size_t>(group.size()), mine = static_cast<std::size_t>(group.rank());
  const std::vector<Bytes> inputs = inputs_of_all(group.size(), dtype, share * ranks, 17);
  const DType sent_as = is_lossy(forms.contributions) ? DType::kF32 : dtype;
  // The last run that the codec encodes together has fewer elements in the second pass.
  for (std::size_t numel : {share * ranks, share * ranks - 77}) {
    std::vector<Bytes> sent;
    for (const Bytes& input : inputs)
      sent.push_back(rounded(forms.contributions, part(input, 0, numel * size_of(dtype)), dtype));
    const Bytes expected = rounded(forms.sums, bytes_of(sum_of(sent, sent_as, 0, numel)), DType::kF32);
    std::vector<float> output(numel);
    RecordingVisitor visitor(numel);
    Bytes input = inputs[mine];
    options.visitor = &visitor;
    require_ok(group.all_reduce("r", input.data(), dtype, output.data(), numel, options).wait());
    require(equal(reinterpret_cast<const std::byte*>(output.data()), expected),
            at("reduce", dtype, numel, group.rank()));
    require(visitor.seen() == output, "the visitor sees what all have");
    if (numel < share * ranks) continue;
    output.resize(share);
    RecordingVisitor sees_part(share);
    input = inputs[mine];
    options.visitor = &sees_part;
    require_ok(group.reduce_scatter("s", input.data(), dtype, output.data(), share, options).wait());
    require(same_bits(output, sum_of(sent, sent_as, mine * share, share)), at("scatter", dtype, share, group.rank()));
    require(sees_part.seen() == output, "the visitor sees the sums");
  }
}

/// Returns the messages of `parts` equal parts of `values`, one after the other.
Bytes messages_of(WireForm form, const Bytes& values, DType dtype, std::size_t parts) {
  const std::size_t numel = values.size() / size_of(dtype) / parts, message = encoded_bytes(form, numel);
  Bytes messages(parts * message);
  for (std::size_t q = 0; q < parts; ++q)
    encode(form, values.data() + q * numel * size_of(dtype), dtype, numel, messages.data() + q * message);
  return messages;
}

/// Checks that sums of contributions that were encoded before the call (ReduceOptions::encoded) are those of the
/// elements themselves.
void check_encoded_sums(Collectives& group, Forms forms, Waits waits, DType dtype, std::size_t share) {
  const auto ranks = static_cast<std::size_t>(group.size());
  const Bytes values = inputs_of_all(group.size(), dtype, share * ranks, 17)[static_cast<std::size_t>(group.rank())];
  for (const bool scatters : {false, true}) {
    const std::size_t numel = scatters ? share : share * ranks;
    ReduceOptions options(waits);
    options.contributions = forms.contributions;
    options.sums = forms.sums;
    Bytes input = values;
    std::vector<float> wanted(numel), got(numel);
    require_ok(group.reduce({scatters, "v", input.data(), dtype, wanted.data(), numel, options}).wait());
    const Bytes messages = messages_of(forms.contributions, values, dtype, scatters ? ranks : 1);
    options.encoded = messages.data();
    std::ranges::fill(input, std::byte{0});
    require_ok(group.reduce({scatters, "m", input.data(), dtype, got.data(), numel, options}).wait());
    require(same_bits(got, wanted), at(scatters ? "scatter" : "reduce", dtype, share, group.rank()));
  }
}

TEST(CompressedSums, EqualSumsOfTheRoundedContributions) {
  for (int ranks : {2, 3}) {
    const int port = free_port();
    expect_all_ok(fork_ranks(ranks, [&](int rank, KeyValueStore&) -> absl::Status {
      TESSERA_ASSIGN_OR_RETURN(const Mesh mesh,
                               make_process_mesh(topology_of(rank, ranks, 1, port), over(TransportChoice::kGloo)));
      TESSERA_ASSIGN_OR_RETURN(const MeshAxes axes, groups_of(mesh).axes(1, ranks));
      require(axes.reduce->compressed_part() == 1, "all is compressed");
      using enum WireForm;
      // These calls come first, when the group's own memory is not larger than they need.
      for (const DType dtype : {DType::kBF16, DType::kF32}) {
        check_reduce_scatter(*axes.reduce, dtype, 1'800'064, false, false);
        check_compressed_sums(*axes.reduce, {kPlain, kPlain}, Waits::kAtOnce, dtype, 1'800'064);
        check_compressed_sums(*axes.reduce, {kLossless, kLossless}, Waits::kAtOnce, dtype, 1'800'064);
        check_compressed_sums(*axes.reduce, {kLossless, kInt8}, Waits::kLater, dtype, 600'064);
        check_compressed_sums(*axes.reduce, {kInt8, kLossless}, Waits::kLater, dtype, 600'064);
      }
      for (const Forms forms : {Forms{kInt8, kPlain}, Forms{kInt4, kInt8}, Forms{kPlain, kInt8}}) {
        for (std::size_t share : {256, 5120}) {
          check_compressed_sums(*axes.reduce, forms, Waits::kAtOnce, DType::kF32, share);
          check_compressed_sums(*axes.reduce, forms, Waits::kLater, DType::kBF16, share);
        }
        check_compressed_sums(*axes.reduce, forms, Waits::kLater, DType::kF32, 600'064);  // three pieces
        if (!is_lossy(forms.contributions)) continue;
        for (const std::size_t share : {192, 5120, 600'064})  // less than a run of the codec, and several pieces
          check_encoded_sums(*axes.reduce, forms, Waits::kLater, share == 5120 ? DType::kBF16 : DType::kF32, share);
      }
      return axes.world->barrier("end").wait();
    }));
  }
}

// There are two hosts of two ranks. Ranks of a host are summed exactly, and the sum that goes to the other host is
// rounded once.
TEST(CompressedSums, RanksOfAHostAreSummedExactlyFirst) {
  const int port = free_port();
  expect_all_ok(fork_ranks(4, [&](int rank, KeyValueStore&) -> absl::Status {
    TESSERA_ASSIGN_OR_RETURN(const Mesh mesh, make_process_mesh(topology_of(rank, 4, 2, port), over()));
    TESSERA_ASSIGN_OR_RETURN(const MeshAxes axes, groups_of(mesh).axes(1, 4));
    require(axes.reduce->compressed_part() == 2, "half of each rank's");
    ReduceOptions options;
    options.contributions = WireForm::kInt8;
    constexpr std::size_t kPart = 2560;
    const std::vector<Bytes> inputs = inputs_of_all(4, DType::kF32, 4 * kPart, 23);
    std::vector<Bytes> hosts;
    for (std::size_t host = 0; host < 2; ++host) {
      const std::vector<float> sum = reference_sum({inputs[2 * host], inputs[2 * host + 1]}, DType::kF32, 0, 4 * kPart);
      hosts.push_back(rounded(WireForm::kInt8, bytes_of(sum), DType::kF32));
    }
    Bytes input = inputs[static_cast<std::size_t>(rank)];
    std::vector<float> output(kPart);
    require_ok(axes.reduce->reduce_scatter("s", input.data(), DType::kF32, output.data(), kPart, options).wait());
    require(same_bits(output, reference_sum(hosts, DType::kF32, static_cast<std::size_t>(rank) * kPart, kPart)),
            "sums");
    return axes.world->barrier("end").wait();
  }));
}

TEST(ProcessMeshTest, LoneRankNeedsNoPort) {
  Topology alone;
  alone.master_port = -1;
  auto mesh = make_process_mesh(alone, over());
  ASSERT_TRUE(mesh.ok());
  auto axes = groups_of(*mesh).axes(1, 1);
  ASSERT_TRUE(axes.ok());
  EXPECT_EQ(axes->world->transport(), "solo");
}

TEST(ProcessMeshTest, ReductionAndGatherMayBeUnderWayTogether) {
  const int port = free_port();
  expect_all_ok(fork_ranks(2, [&](int rank, KeyValueStore&) -> absl::Status {
    TESSERA_ASSIGN_OR_RETURN(const Mesh mesh,
                             make_process_mesh(topology_of(rank, 2, 1, port), over(TransportChoice::kGloo)));
    TESSERA_ASSIGN_OR_RETURN(const MeshAxes axes, groups_of(mesh).axes(1, 2));
    std::vector<float> input(20'000, static_cast<float>(rank + 1)), sum(10'000), full(2);
    Work reduce = axes.reduce->reduce_scatter("a", input.data(), DType::kF32, sum.data(), sum.size());
    const float mine = static_cast<float>(rank);
    Work gather = axes.gather->all_gather("b", &mine, full.data(), sizeof mine);
    TESSERA_RETURN_IF_ERROR(gather.wait());
    TESSERA_RETURN_IF_ERROR(reduce.wait());
    require(full[0] == 0 && full[1] == 1 && sum.front() == 3 && sum.back() == 3, "values");
    return axes.world->barrier("end").wait();
  }));
}

/// Returns the body of ranks that make sums until a sum fails. One rank serves the store until the last rank has ended.
ForkedRanks::Body sum_until_failure(int ranks, int port, double timeout_s) {
  return [=](int rank, KeyValueStore& outside) -> absl::Status {
    TESSERA_ASSIGN_OR_RETURN(
        const Mesh mesh, make_process_mesh(topology_of(rank, ranks, 1, port), over(TransportChoice::kGloo, timeout_s)));
    TESSERA_ASSIGN_OR_RETURN(const MeshAxes axes, groups_of(mesh).axes(1, ranks));
    TESSERA_ASSIGN_OR_RETURN(const MeshAxes more, groups_of(mesh).axes(1, ranks));  // these calls end in time too
    absl::Status status;
    std::vector<float> data(30'000);
    for (int i = 0; status.ok(); ++i) {
      status = axes.world->all_reduce("blocks.3", data.data(), DType::kF32, data.data(), data.size()).wait();
      if (i == 5) TESSERA_RETURN_IF_ERROR(outside.set("working/" + std::to_string(rank), "yes"));
    }
    groups_of(mesh).abort(status);  // in programs, tessera::run does this
    if (rank == 0) told(outside, "end/" + std::to_string(ranks - 1)).status().IgnoreError();
    return status;
  };
}

void wait_until_working(ForkedRanks& ranks, int count) {
  for (int rank = 0; rank < count; ++rank) ASSERT_TRUE(told(ranks.store(), "working/" + std::to_string(rank)).ok());
}

TEST(GlooFailures, KilledRankIsNamedByTheOthers) {
  ForkedRanks ranks(3, sum_until_failure(3, free_port(), kNeverPassed));
  wait_until_working(ranks, 3);
  Deadline soon(12s);  // Gloo may miss the end of a connection; CallWatch then ends the call
  ranks.signal(1, SIGKILL);
  std::string both;
  for (int rank : {2, 0}) {
    const RankEnd end = ranks.wait(rank);
    EXPECT_EQ(end.exit_code, ExitCode::kPeerLost) << end.message;
    EXPECT_THAT(end.message, AllOf(HasSubstr("rank " + std::to_string(rank) + "/3 blocks.3 all_reduce #"),
                                   ContainsRegex("; rank (0, )?1(, 2)? do(es)? not answer")));
    both += end.message;
  }
  // The rank that fails last learns in which call the other rank was.
  EXPECT_THAT(both, ContainsRegex("rank [02] was in all_reduce 'blocks.3'"));
  EXPECT_FALSE(soon.passed());
}

TEST(GlooFailures, KilledRankZeroThatServesTheStoreIsNamed) {
  ForkedRanks ranks(3, sum_until_failure(3, free_port(), kNeverPassed));
  wait_until_working(ranks, 3);
  Deadline soon(12s);  // Gloo may miss the end of a connection (see above)
  ranks.signal(0, SIGKILL);
  for (int rank : {1, 2}) {
    const RankEnd end = ranks.wait(rank);
    EXPECT_EQ(end.exit_code, ExitCode::kPeerLost) << end.message;
    EXPECT_THAT(end.message, AllOf(HasSubstr("rank " + std::to_string(rank) + "/3 blocks.3 all_reduce #"),
                                   HasSubstr("; rank 0 is gone, which serves the store"),
                                   Not(HasSubstr("rank " + std::to_string(3 - rank) + " does not answer"))));
  }
  EXPECT_FALSE(soon.passed());
}

// Fault F1 (docs/faults.md): rank 1 has announced itself, and dies before the ranks have connected over a transport.
// Ranks of its host notice its end. Gloo does not report which rank is missing if that rank is alive but does not
// connect. The other ranks name the missing rank anyway.
TEST(ProcessMeshTest, RankThatDiesBeforeTheFirstCallIsMissed) {
  struct Absent {
    TransportChoice transport;
    bool dies;
  };
  for (const Absent absent : {Absent{TransportChoice::kGloo, true}, Absent{TransportChoice::kAuto, true},
                              Absent{TransportChoice::kGloo, false}}) {
    const int port = free_port();
    CommConfig config = over(absent.transport);
    if (!absent.dies) config.init_timeout_s = patient_s(3);
    Deadline soon(3s + 7s);
    ForkedRanks ranks(3, [&](int rank, KeyValueStore& outside) -> absl::Status {
      if (rank == 1) {
        const std::string word = word_of(absent.transport);
        TESSERA_ASSIGN_OR_RETURN(const auto store, tcp_store(topology_of(rank, 3, 1, port), kNeverPassed, word));
        if (absent.dies) ::raise(SIGKILL);
        return told(outside, "end/2").status();
      }
      TESSERA_ASSIGN_OR_RETURN(const Mesh mesh, make_process_mesh(topology_of(rank, 3, 1, port), config));
      const auto axes = groups_of(mesh).axes(1, 3);
      if (rank == 0) told(outside, "end/2").status().IgnoreError();
      return axes.ok() ? axes->world->barrier("first").wait() : axes.status();
    });
    for (int rank : {2, 0}) {
      const RankEnd end = ranks.wait(rank);
      EXPECT_EQ(end.exit_code, ExitCode::kPeerLost) << end.message;
      EXPECT_THAT(end.message, HasSubstr(absent.dies ? "the process of rank 1 has ended" : "rank 1 has not come"))
          << rank;
    }
    EXPECT_FALSE(soon.passed());
  }
}

// Rank 1 fails before it has made a group, so nothing but the store can tell the others.
TEST(ProcessMeshTest, RankThatGivesUpBeforeItsFirstGroupIsNamed) {
  for (const TransportChoice transport : {TransportChoice::kHost, TransportChoice::kGloo}) {
    for (const bool throws : {false, true}) {
      const int port = free_port();
      Deadline soon(10s);
      const auto ends = fork_ranks(3, [&](int rank, KeyValueStore& outside) -> absl::Status {
        TESSERA_ASSIGN_OR_RETURN(const Mesh mesh, make_process_mesh(topology_of(rank, 3, 1, port), over(transport)));
        if (rank == 1 && throws) throw std::runtime_error("there are no data");
        if (rank == 1) {
          const absl::Status status = make_error(ExitCode::kNoInput, "there are no data");
          groups_of(mesh).abort(status);  // in programs, tessera::run does this
          return status;
        }
        const auto axes = groups_of(mesh).axes(1, 3);
        if (rank == 0) told(outside, "end/2").status().IgnoreError();  // rank 0 serves the store
        return axes.status();
      });
      for (const int rank : {0, 2}) {
        const RankEnd& end = ends[static_cast<std::size_t>(rank)];
        EXPECT_EQ(end.exit_code, ExitCode::kPeerLost) << end.message << ", signal " << end.signal;
        EXPECT_THAT(end.message, AllOf(HasSubstr("rank " + std::to_string(rank) + "/3: group "),
                                       HasSubstr(throws ? "rank 1/3 gave up: an exception"
                                                        : "rank 1/3 gave up: there are no data")));
      }
      EXPECT_FALSE(soon.passed());
    }
  }
}

/// Returns the ports at which this process listens.
std::vector<int> own_ports() {
  std::vector<std::string> inodes;
  for (const auto& entry : std::filesystem::directory_iterator("/proc/self/fd")) {
    std::error_code error;
    const std::string link = std::filesystem::read_symlink(entry.path(), error).string();
    if (link.starts_with("socket:[")) inodes.push_back(" " + link.substr(8, link.size() - 9) + " ");
  }
  std::vector<int> ports;
  std::ifstream table("/proc/net/tcp");
  for (std::string line; std::getline(table, line);) {
    const bool is_own =
        std::any_of(inodes.begin(), inodes.end(), [&](const auto& inode) { return line.find(inode) != line.npos; });
    if (is_own && line.find(" 00000000:0000 0A") != line.npos)
      ports.push_back(std::stoi(line.substr(line.find(':', line.find(':') + 1) + 1, 4), nullptr, 16));
  }
  return ports;
}

/// Makes `count` connections to `port`, either slowly or all at once. They send nothing.
void connect_in_silence(int port, int count, bool at_once, std::vector<int>& sockets) {
  for (int i = 0; i < count; ++i) {
    const int fd = socket(AF_INET, SOCK_STREAM | SOCK_NONBLOCK, 0);
    ASSERT_GE(fd, 0);
    sockets.push_back(fd);
    sockaddr_in address{};
    address.sin_family = AF_INET;
    address.sin_addr.s_addr = htonl(INADDR_LOOPBACK);
    address.sin_port = htons(static_cast<std::uint16_t>(port));
    (void)connect(fd, reinterpret_cast<sockaddr*>(&address), sizeof address);
    if (!at_once && i % 20 == 19) std::this_thread::sleep_for(std::chrono::milliseconds(5));
  }
}

/// Strangers (processes that are no ranks of the job) connect to the store before two ranks have met, and to
/// `most_ports` ports of the ranks after the ranks have met. They make `count` connections to each of these ports.
struct Strangers {
  int count;
  bool at_once;
  std::size_t most_ports;
};

void expect_ranks_go_on(const rlimit& limit, const Strangers& coming) {
  const int port = free_port();
  take_process_limits();  // this process holds the strangers' ends of connections
  ForkedRanks ranks(2, [&](int rank, KeyValueStore& outside) -> absl::Status {
    require(::setrlimit(RLIMIT_NOFILE, &limit) == 0, "setrlimit");
    take_process_limits();
    if (rank == 1) TESSERA_RETURN_IF_ERROR(told(outside, "strangers/store", 30s).status());
    TESSERA_ASSIGN_OR_RETURN(const Mesh mesh,
                             make_process_mesh(topology_of(rank, 2, 1, port), over(TransportChoice::kGloo)));
    TESSERA_ASSIGN_OR_RETURN(const MeshAxes axes, groups_of(mesh).axes(1, 2));
    std::string ports;
    for (const int each : own_ports()) ports += std::to_string(each) + " ";
    TESSERA_RETURN_IF_ERROR(outside.set("ports/" + std::to_string(rank), ports));
    TESSERA_RETURN_IF_ERROR(told(outside, "strangers/gloo", 30s).status());
    std::vector<float> data(5000, 1);
    TESSERA_RETURN_IF_ERROR(axes.world->all_reduce("sum", data.data(), DType::kF32, data.data(), data.size()).wait());
    require(data[0] == 2 && data.back() == 2, "sums");
    std::vector<int> opened;  // a save opens files, too
    for (rlim_t i = 0; i < limit.rlim_cur / 2; ++i) opened.push_back(::open("/dev/null", O_RDONLY));
    require(opened.back() >= 0, "descriptors are left");
    TESSERA_ASSIGN_OR_RETURN(const MeshAxes again, groups_of(mesh).axes(2, 1));  // this call needs the store
    return again.world->barrier("end").wait();
  });
  std::vector<int> strangers;
  ASSERT_TRUE(is_listened_at(port));
  connect_in_silence(port, coming.count, coming.at_once, strangers);
  ASSERT_TRUE(ranks.store().set("strangers/store", "yes").ok());
  std::set<int> ports;
  for (int rank = 0; rank < 2; ++rank) {
    const auto text = told(ranks.store(), "ports/" + std::to_string(rank), 30s);
    ASSERT_TRUE(text.ok()) << text.status();
    std::istringstream words(*text);
    for (int each = 0; words >> each;) ports.insert(each);
  }
  EXPECT_GE(ports.size(), 3u);
  std::size_t taken = 0;
  for (const int each : ports)
    if (taken++ < coming.most_ports) connect_in_silence(each, coming.count, coming.at_once, strangers);
  ASSERT_TRUE(ranks.store().set("strangers/gloo", "yes").ok());
  expect_ok(ranks, 0, 2);
  for (const int fd : strangers) close(fd);
}

// Fault F21 (docs/faults.md): strangers hold more connections than a rank may have descriptors, both before and after
// the ranks have met. The limits are Debian's soft limit, which a job raises, and a hard limit that this many strangers
// do not fill.
TEST(ProcessMeshTest, StrangersBeyondTheDescriptorLimitEndNoRank) {
  expect_ranks_go_on({1024, 8192}, {.count = 1100, .at_once = false, .most_ports = 100});
}

TEST(ProcessMeshTest, BurstOfStrangersBeyondTheHardDescriptorLimitEndsNoRank) {
  expect_ranks_go_on({1024, 1024}, {.count = 3000, .at_once = true, .most_ports = 3});
}

// Fault F21 (docs/faults.md): a job over Gloo continues, while strangers hold many connections to each of its ports and
// send random bytes.
TEST(ProcessMeshTest, StrangersHoldingConnectionsDisturbNoRank) {
  constexpr int kStrangers = 200;
  const int port = free_port();
  ForkedRanks ranks(2, [&](int rank, KeyValueStore& outside) -> absl::Status {
    TESSERA_ASSIGN_OR_RETURN(const Mesh mesh,
                             make_process_mesh(topology_of(rank, 2, 1, port), over(TransportChoice::kGloo)));
    TESSERA_ASSIGN_OR_RETURN(const MeshAxes axes, groups_of(mesh).axes(1, 2));
    TESSERA_RETURN_IF_ERROR(axes.world->barrier("first").wait());
    std::string ports;
    for (const int each : own_ports()) ports += std::to_string(each) + " ";
    TESSERA_RETURN_IF_ERROR(outside.set("ports/" + std::to_string(rank), ports));
    for (bool ends = false; !ends;) {
      std::vector<float> data(5000, 1);
      data[0] = rank == 0 && outside.get("stop", std::chrono::milliseconds(1)).ok() ? 1.0F : 0.0F;
      TESSERA_RETURN_IF_ERROR(axes.world->all_reduce("sum", data.data(), DType::kF32, data.data(), data.size()).wait());
      require(data[1] == 2 && data.back() == 2, "sums");
      ends = data[0] > 0;
    }
    TESSERA_ASSIGN_OR_RETURN(const MeshAxes again, groups_of(mesh).axes(2, 1));  // this call needs the store
    return again.world->barrier("end").wait();
  });
  std::vector<int> strangers;
  std::set<int> ports;
  for (int rank = 0; rank < 2; ++rank) {
    const auto text = told(ranks.store(), "ports/" + std::to_string(rank));
    ASSERT_TRUE(text.ok()) << text.status();
    std::istringstream words(*text);
    for (int each = 0; words >> each;) ports.insert(each);
  }
  EXPECT_GE(ports.size(), 3u) << "the store's, and one of Gloo for each rank";
  for (const int each : ports) {
    for (int i = 0; i < kStrangers; ++i) {
      const int fd = socket(AF_INET, SOCK_STREAM, 0);
      ASSERT_GE(fd, 0);
      strangers.push_back(fd);
      sockaddr_in address{};
      address.sin_family = AF_INET;
      address.sin_addr.s_addr = htonl(INADDR_LOOPBACK);
      address.sin_port = htons(static_cast<std::uint16_t>(each));
      if (connect(fd, reinterpret_cast<sockaddr*>(&address), sizeof address) != 0) continue;
      const Bytes garbage = random_values(DType::kBF16, 100, i);
      (void)!send(fd, garbage.data(), garbage.size(), MSG_NOSIGNAL | MSG_DONTWAIT);
    }
  }
  std::this_thread::sleep_for(std::chrono::milliseconds(300));
  ASSERT_TRUE(ranks.store().set("stop", "yes").ok());
  expect_ok(ranks, 0, 2);
  for (const int fd : strangers) close(fd);
}

TEST(GlooFailures, StoppedRankIsNamedEvenIfItServesTheStore) {
  for (int stopped : {0, 1}) {
    ForkedRanks ranks(2, sum_until_failure(2, free_port(), patient_s(1)));
    wait_until_working(ranks, 2);
    Deadline soon(1s + 5s);
    ranks.signal(stopped, SIGSTOP);
    ASSERT_TRUE(ranks.store().set("end/1", "").ok());  // rank 0 need not wait for the stopped rank
    const RankEnd end = ranks.wait(1 - stopped);
    EXPECT_EQ(end.exit_code, ExitCode::kPeerLost) << end.message;
    EXPECT_THAT(end.message, AllOf(HasSubstr("blocks.3 all_reduce #"),
                                   HasSubstr("rank " + std::to_string(stopped) + (stopped ? " does" : ", does")),
                                   HasSubstr("hint: a rank that does not answer stands still")));
    EXPECT_FALSE(soon.passed());
  }
}

/// Returns the body of ranks that make different calls. A rank tells `outside` how long its call took.
ForkedRanks::Body in_different_groups(const World& world, int port) {
  return [=](int rank, KeyValueStore& outside) -> absl::Status {
    TESSERA_ASSIGN_OR_RETURN(const Mesh mesh,
                             make_process_mesh(topology_of(rank, world.ranks, world.hosts, port), over(world.choice)));
    TESSERA_ASSIGN_OR_RETURN(const MeshAxes axes, groups_of(mesh).axes(1, world.ranks));
    require(axes.world->transport() == world.transport, axes.world->transport());
    const TimedEnd end = call_in_different_groups(axes, rank);
    outside.set("seconds/" + std::to_string(rank), std::to_string(end.seconds)).IgnoreError();
    if (rank == 0) told(outside, "end/1").status().IgnoreError();  // rank 0 serves the store until rank 1 has ended
    return end.status;
  };
}

TEST(CallsOfRanks, RanksWaitingInDifferentGroupsAreNamed) {
  const World worlds[] = {{2, 1, TransportChoice::kHost, "host"},
                          {2, 1, TransportChoice::kGloo, "gloo"},
                          {4, 2, TransportChoice::kAuto, "hierarchical(host, gloo)"}};
  std::vector<std::unique_ptr<ForkedRanks>> started;
  for (const World& world : worlds)
    started.push_back(std::make_unique<ForkedRanks>(world.ranks, in_different_groups(world, free_port())));
  for (std::size_t i = 0; i < started.size(); ++i) {
    for (int rank = 0; rank < worlds[i].ranks; ++rank) {
      SCOPED_TRACE(worlds[i].transport + ", rank " + std::to_string(rank));
      const RankEnd end = started[i]->wait(rank);
      const auto seconds = told(started[i]->store(), "seconds/" + std::to_string(rank));
      ASSERT_TRUE(seconds.ok()) << seconds.status();
      expect_both_calls_are_named(end, std::stod(*seconds), rank);
    }
  }
}

TEST(GlooFailures, PeersLearnTheReasonOfAnAbort) {
  const int port = free_port();
  const auto ends = fork_ranks(2, [&](int rank, KeyValueStore& outside) -> absl::Status {
    TESSERA_ASSIGN_OR_RETURN(const Mesh mesh,
                             make_process_mesh(topology_of(rank, 2, 1, port), over(TransportChoice::kGloo)));
    TESSERA_ASSIGN_OR_RETURN(const MeshAxes axes, groups_of(mesh).axes(1, 2));
    TESSERA_RETURN_IF_ERROR(axes.world->barrier("warm").wait());
    if (rank == 1) return axes.world->barrier("step").wait();
    groups_of(mesh).abort(make_error(ExitCode::kIo, "the disk is full"));
    told(outside, "end/1").status().IgnoreError();
    return axes.world->barrier("later").wait();
  });
  EXPECT_EQ(ends[0].exit_code, ExitCode::kIo);
  EXPECT_EQ(ends[1].exit_code, ExitCode::kPeerLost);
  EXPECT_THAT(ends[1].message, HasSubstr("rank 0 gave up: the disk is full"));
}

TEST(GlooFailures, RanksThatDisagreeAreBothNamed) {
  const int port = free_port();
  const double timeout_s = patient_s(2);
  const auto ends = fork_ranks(2, [&](int rank, KeyValueStore& outside) -> absl::Status {
    TESSERA_ASSIGN_OR_RETURN(const Mesh mesh,
                             make_process_mesh(topology_of(rank, 2, 1, port), over(TransportChoice::kGloo, timeout_s)));
    TESSERA_ASSIGN_OR_RETURN(const MeshAxes axes, groups_of(mesh).axes(1, 2));
    std::vector<float> full(100);
    const absl::Status status =
        rank == 0 ? axes.world->barrier("a").wait()
                  : axes.world->all_gather("b", full.data() + 50, full.data(), 50 * sizeof(float)).wait();
    if (rank == 0) told(outside, "end/1").status().IgnoreError();
    return status;
  });
  EXPECT_EQ(ends[0].exit_code, ExitCode::kInternal) << ends[0].message;
  EXPECT_EQ(ends[1].exit_code, ExitCode::kInternal) << ends[1].message;
  // If the machine is slow, the time limit is longer than the time that CallWatch waits, and CallWatch's text comes
  // first.
  EXPECT_THAT(ends[0].message, ContainsRegex("rank 1 (was in|calls) all_gather 'b' of 200 bytes"));
  EXPECT_THAT(ends[1].message, ContainsRegex("rank 0 (was in|calls) barrier 'a'"));
}

}  // namespace
}  // namespace tessera
