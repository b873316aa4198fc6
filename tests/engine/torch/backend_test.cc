// Tests a user's own c10d backend: training on it gives the bits of Tessera's transports.

#include "tessera/backend.h"

#include <ATen/ops/cross_entropy_loss.h>
#include <ATen/ops/linear.h>
#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <stdlib.h>

#include <cstring>

#include "runtime/border/throw.h"
#include "runtime/comm/c10d/tcp_store.h"
#include "runtime/comm/mesh_groups.h"
#include "runtime/comm/shared/run_ranks.h"
#include "runtime/torch/flat_collectives.h"
#include "tests/engine/on_hosts.h"
#include "tests/support/fork_ranks.h"
#include "tests/support/free_port.h"
#include "tests/support/session.h"

namespace tessera::testing {
namespace backend_test {

using ::testing::AllOf;
using ::testing::HasSubstr;

struct Done : c10d::Work {
  Done() { finish(); }
};

/// A slow and simple backend: every exchange goes through the rendezvous store. Classes below override the names that
/// LibTorch has for a gather and an exchange of equal parts.
class StoreBackend : public c10d::Backend {
 public:
  StoreBackend(int rank, int size, c10::intrusive_ptr<c10d::Store> store)
      : Backend(rank, size), store_(std::move(store)) {}
  const std::string getBackendName() const override { return "mine"; }

  c10::intrusive_ptr<c10d::Work> broadcast(std::vector<at::Tensor>& tensors,
                                           const c10d::BroadcastOptions& options) override {
    if (getRank() == options.rootRank) put(getRank(), tensors[0]);
    take(static_cast<int>(options.rootRank), tensors[0]);
    return done();
  }
  c10::intrusive_ptr<c10d::Work> barrier(const c10d::BarrierOptions&) override {
    at::Tensor byte = at::zeros({1}, at::kByte), all = at::zeros({getSize()}, at::kByte);
    return gather(all, byte);
  }

 protected:
  c10::intrusive_ptr<c10d::Work> gather(at::Tensor& output, at::Tensor& input) {
    put(getRank(), input);
    for (int rank = 0; rank < getSize(); ++rank) take(rank, output.narrow(0, rank * input.numel(), input.numel()));
    return done();
  }
  c10::intrusive_ptr<c10d::Work> exchange(at::Tensor& output, at::Tensor& input) {
    const std::int64_t part = input.numel() / getSize();
    for (int to = 0; to < getSize(); ++to) put(getRank() * getSize() + to, input.narrow(0, to * part, part));
    for (int from = 0; from < getSize(); ++from)
      take(from * getSize() + getRank(), output.narrow(0, from * part, part));
    return done();
  }

 private:
  std::string key(int from) const { return std::to_string(call_) + "." + std::to_string(from); }
  void put(int from, const at::Tensor& bytes) {
    const auto* data = bytes.const_data_ptr<std::uint8_t>();
    store_->set(key(from), std::vector<std::uint8_t>(data, data + bytes.numel()));
  }
  void take(int from, const at::Tensor& into) {
    const std::vector<std::uint8_t> bytes = store_->get(key(from));
    TORCH_CHECK(static_cast<std::int64_t>(bytes.size()) == into.numel(), "got ", bytes.size(), " bytes");
    std::memcpy(into.data_ptr(), bytes.data(), bytes.size());
  }
  c10::intrusive_ptr<c10d::Work> done() {
    ++call_;
    return c10::make_intrusive<Done>();
  }

  const c10::intrusive_ptr<c10d::Store> store_;
  int call_ = 0;
};

using Sizes = std::vector<std::int64_t>;

/// Overrides the names of LibTorch before 2.14, which later versions have too.
class OldNames final : public StoreBackend {
 public:
  using StoreBackend::StoreBackend;
  c10::intrusive_ptr<c10d::Work> _allgather_base(at::Tensor& output, at::Tensor& input,
                                                 const c10d::AllgatherOptions&) override {
    return gather(output, input);
  }
  c10::intrusive_ptr<c10d::Work> alltoall_base(at::Tensor& output, at::Tensor& input, Sizes&, Sizes&,
                                               const c10d::AllToAllOptions&) override {
    return exchange(output, input);
  }
};

#if TESSERA_TORCH_HAS_SINGLE_NAMES
/// Overrides only the functions that have new names in LibTorch 2.14 and later.
class NewNames final : public StoreBackend {
 public:
  using StoreBackend::StoreBackend;
  c10::intrusive_ptr<c10d::Work> all_gather_single(at::Tensor& output, at::Tensor& input,
                                                   const c10d::AllgatherOptions&) override {
    return gather(output, input);
  }
  c10::intrusive_ptr<c10d::Work> all_to_all_single(at::Tensor& output, at::Tensor& input, Sizes&, Sizes&,
                                                   const c10d::AllToAllOptions&) override {
    return exchange(output, input);
  }
};
#endif

template <typename Named>
c10::intrusive_ptr<c10d::Backend> make_named(const BackendRequest& request) {
  return c10::make_intrusive<Named>(request.rank, static_cast<int>(request.world_ranks.size()), request.store);
}

const MakeBackend make_backend = make_named<OldNames>;

/// Returns the results of a run as text: losses and every bit of the parameters.
std::string train(const Mesh& mesh, const Strategy& strategy) {
  Session session(mesh, strategy);
  std::string text;
  for (std::size_t i = 0; i < 3; ++i) text += std::to_string(session.train(i).loss) + " ";
  for (const auto& [name, value] : session.values()) {
    text.append(static_cast<const char*>(value.const_data_ptr()), value.nbytes());
  }
  return text;
}

/// Expects that two ranks over `make`'s backends train to the bits of two threads.
void expect_bits_of_threads(const MakeBackend& make, const Strategy& strategy) {
  const int port = free_port();
  const auto ends = fork_ranks(2, [&](int rank, KeyValueStore&) -> absl::Status {
    join_as(rank, 2, port);
    const Mesh mesh = init({}, make);
    const std::string mine = train(mesh, strategy);
    if (value_or_throw(groups_of(mesh).axes(1, 2)).world->transport() != "mine")
      return make_error(ExitCode::kInternal, "transport");
    std::string wanted;
    if (rank == 0) {
      run_ranks({.ranks = 2}, [&](const Mesh& threads) {
        const std::string text = train(threads, strategy);
        if (threads.rank() == 0) wanted = text;
      });
      if (mine != wanted) return make_error(ExitCode::kInternal, "other bits than on threads");
    }
    return absl::OkStatus();
  });
  for (const RankEnd& end : ends) EXPECT_EQ(end.exit_code, ExitCode::kOk) << end.message;
}

TEST(Backend, TrainsLikeTheOtherTransports) {
  for (const Placed& kind : kOnePerPlacement) {
    SCOPED_TRACE(name_of(kind));
    expect_bits_of_threads(make_backend, strategy_for(kind));
  }
}

TEST(Backend, NewNamesOfLibTorchAloneTrainLikeTheOtherTransports) {
#if TESSERA_TORCH_HAS_SINGLE_NAMES
  expect_bits_of_threads(make_named<NewNames>, strategy_for(ShardingStrategy::kFullShard));
#else
  GTEST_SKIP() << "this LibTorch has the old names alone";
#endif
}

/// Returns Tiny's loss with its blocks run in another order.
at::Tensor loss_through(Session& session, std::initializer_list<std::size_t> blocks) {
  const Batch& batch = session.batches[0];
  at::Tensor x = session.model->embedding(rows_of(batch.tokens, session.mesh));
  for (std::size_t i : blocks) x = session.model->blocks->ptr<BlockImpl>(i)->forward(x);
  return at::cross_entropy_loss(at::linear(x, session.model->head).flatten(0, 1),
                                rows_of(batch.targets, session.mesh).flatten());
}

// This backend moves any bytes that it is given. Only the Engine can notice that ranks gathered different units of the
// same size.
TEST(Backend, UnitsGatheredInDifferentOrdersEndTheStepOnAllRanks) {
  const int port = free_port();
  const auto ends = fork_ranks(2, [&](int rank, KeyValueStore&) -> absl::Status {
    join_as(rank, 2, port);
    const Mesh mesh = init({}, make_backend);
    Session session(mesh, strategy_for(ShardingStrategy::kFullShard));
    session.engine.backward(rank == 0 ? loss_through(session, {0, 1, 2}) : loss_through(session, {0, 2, 1}));
    session.engine.step();
    return absl::OkStatus();
  });
  for (const RankEnd& end : ends) {
    EXPECT_EQ(end.exit_code, ExitCode::kInternal) << end.message;
    EXPECT_THAT(end.message, AllOf(HasSubstr("different orders"), HasSubstr("unit blocks.1 on rank 0"),
                                   HasSubstr("unit blocks.2 on rank 1")));
  }
}

// A call of this backend cannot be ended. Each rank therefore reports which calls wait for each other, and its process
// ends.
TEST(Backend, RanksThatWaitForEachOtherEndWithTheirCalls) {
  const int port = free_port();
  const auto ends = fork_ranks(2, [&](int rank, KeyValueStore&) -> absl::Status {
    join_as(rank, 2, port);
    const Mesh mesh = init({}, make_backend);
    TESSERA_ASSIGN_OR_RETURN(const MeshAxes axes, groups_of(mesh).axes(1, 2));
    float data[2] = {};
    TESSERA_RETURN_IF_ERROR(rank == 0 ? axes.gather->all_gather("blocks.1", data, data, sizeof(float)).wait()
                                      : axes.reduce->barrier("step").wait());
    return make_error(ExitCode::kUsage, "the call ended");
  });
  for (const RankEnd& end : ends) EXPECT_EQ(end.exit_code, ExitCode::kInternal) << end.message;
}

TEST(Backend, ExceptionOfItsMakerIsReported) {
  const int port = free_port();
  const auto ends = fork_ranks(2, [&](int rank, KeyValueStore& told) -> absl::Status {
    join_as(rank, 2, port);
    const Mesh mesh = init(
        {}, [](const BackendRequest&) -> c10::intrusive_ptr<c10d::Backend> { throw std::runtime_error("no cable"); });
    const absl::Status made = groups_of(mesh).axes(1, 2).status();
    // Rank 0 serves the rendezvous store, in which the ranks meet before they call their makers. So rank 0 stays until
    // the other rank's maker has ended.
    if (rank == 0) TESSERA_RETURN_IF_ERROR(tessera::told(told, "made").status());
    if (rank == 1) TESSERA_RETURN_IF_ERROR(told.set("made", "yes"));
    return made;
  });
  for (const RankEnd& end : ends) {
    EXPECT_EQ(end.exit_code, ExitCode::kPeerLost);
    EXPECT_THAT(end.message, AllOf(HasSubstr("no cable"), HasSubstr("MakeBackend")));
  }
}

TEST(Backend, AnotherTransportInTheStrategyIsRefused) {
  CommConfig comm;
  comm.transport = TransportChoice::kGloo;
  EXPECT_THAT(error_of(ExitCode::kConfig, [&] { init(comm, make_backend); }), HasSubstr("comm.transport"));
}

/// Returns how ranks end if their strategy names a transport, but their mesh over `hosts` hosts was made without one.
std::vector<RankEnd> ends_where_the_file_names(TransportChoice transport, int ranks, int hosts) {
  const int port = free_port();
  return fork_ranks(ranks, [=](int rank, KeyValueStore&) -> absl::Status {
    join_as(rank, ranks, port, hosts);
    const Mesh mesh = init();
    Strategy strategy;
    strategy.comm.transport = transport;
    try {
      Session session(mesh, strategy);
    } catch (const Error& error) {
      return make_error(error.exit_code(), error.message());
    }
    return absl::OkStatus();
  });
}

TEST(Transport, MeshThatMatchesTheStrategyIsAccepted) {
  for (const RankEnd& end : ends_where_the_file_names(TransportChoice::kHost, 2, 1))
    EXPECT_EQ(end.exit_code, ExitCode::kOk) << end.message;
  for (const RankEnd& end : ends_where_the_file_names(TransportChoice::kGloo, 2, 2))
    EXPECT_EQ(end.exit_code, ExitCode::kOk) << end.message;
}

TEST(Transport, MeshOfTwoTransportsIsRefusedIfOneIsNamed) {
  for (const TransportChoice named : {TransportChoice::kGloo, TransportChoice::kHost}) {
    for (const RankEnd& end : ends_where_the_file_names(named, 4, 2)) {
      EXPECT_EQ(end.exit_code, ExitCode::kConfig) << end.message;
      EXPECT_THAT(end.message, HasSubstr("hierarchical(host, gloo)"));
    }
  }
}

}  // namespace backend_test
}  // namespace tessera::testing
