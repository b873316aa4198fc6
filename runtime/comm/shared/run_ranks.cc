#include "runtime/comm/shared/run_ranks.h"

#include <exception>
#include <stdexcept>
#include <thread>
#include <vector>

#include "runtime/base/mutex.h"
#include "runtime/base/status.h"
#include "runtime/comm/mesh_groups.h"
#include "runtime/comm/shared/thread_transport.h"

namespace tessera {
namespace {

Topology topology_of(const ThreadRanks& options, int rank) {
  Topology topology;
  topology.rank = rank;
  topology.world_size = options.ranks;
  topology.local_world_size = options.ranks / options.hosts;
  topology.local_rank = rank % topology.local_world_size;
  topology.host = rank / topology.local_world_size;
  topology.launcher = "thread";
  return topology;
}

std::string text_of(const std::exception_ptr& failure) {
  try {
    std::rethrow_exception(failure);
  } catch (const std::exception& error) {
    return error.what();
  } catch (...) {
    return "an exception that is no std::exception";
  }
}

// Keeps the exception of the rank that failed first: the others' exceptions mostly say that this rank failed.
class FirstFailure {
 public:
  void keep(std::exception_ptr failure) {
    const MutexLock lock(mutex_);
    if (!failure_) failure_ = std::move(failure);
  }
  void rethrow() {
    const MutexLock lock(mutex_);
    if (failure_) std::rethrow_exception(failure_);
  }

 private:
  Mutex mutex_;
  std::exception_ptr failure_ ABSL_GUARDED_BY(mutex_);
};

}  // namespace

void run_ranks(const ThreadRanks& options, const std::function<void(const Mesh&)>& body) {
  if (options.ranks < 1 || options.hosts < 1 || options.ranks % options.hosts != 0)
    throw std::invalid_argument("run_ranks: " + std::to_string(options.ranks) + " ranks do not fill " +
                                std::to_string(options.hosts) + " hosts evenly");
  const auto run = std::make_shared<ThreadRun>(options);
  const auto store = memory_store();
  FirstFailure first;
  const auto run_one = [&](int rank) {
    absl::Status end;
    const Topology topology = topology_of(options, rank);
    std::shared_ptr<GroupFactory> groups = thread_group_factory(run, topology);
    if (options.wrap_groups) groups = options.wrap_groups(std::move(groups));
    const Mesh mesh = make_mesh(topology, std::move(groups), store);
    groups_of(mesh).expect_report();  // run->end tells every group of a failure
    try {
      body(mesh);
    } catch (...) {
      first.keep(std::current_exception());
      end = make_error(ExitCode::kInternal, text_of(std::current_exception()));
    }
    run->end(rank, end);
  };
  std::vector<std::jthread> threads;
  for (int rank = 0; rank < options.ranks; ++rank) threads.emplace_back(run_one, rank);
  threads.clear();  // joins
  first.rethrow();
}

}  // namespace tessera
