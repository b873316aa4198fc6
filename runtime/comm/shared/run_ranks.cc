#include "runtime/comm/shared/run_ranks.h"

#include <exception>
#include <numeric>
#include <stdexcept>
#include <thread>
#include <vector>

#include "runtime/base/mutex.h"
#include "runtime/base/status.h"
#include "runtime/comm/mesh_groups.h"
#include "runtime/comm/shared/thread_transport.h"

namespace tessera {
namespace {

std::vector<int> hosts_of(const ThreadRanks& options) {
  if (!options.ranks_of_hosts.empty()) return options.ranks_of_hosts;
  if (options.hosts < 1) return {};
  return std::vector<int>(static_cast<std::size_t>(options.hosts), options.ranks / options.hosts);
}

Topology topology_of(int rank, int ranks, const std::vector<int>& hosts) {
  Topology topology;
  topology.rank = rank;
  topology.world_size = ranks;
  topology.put_on_hosts(hosts);
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

// Stores the exception of the rank that failed first: the exceptions of other ranks mostly say only that it failed.
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
  const std::vector<int> hosts = hosts_of(options);
  if (options.ranks < 1 || std::accumulate(hosts.begin(), hosts.end(), 0) != options.ranks)
    throw std::invalid_argument("run_ranks: " + std::to_string(options.ranks) + " ranks do not fill " +
                                std::to_string(options.hosts) + " hosts, or not evenly");
  const auto run = std::make_shared<ThreadRun>(options);
  const auto store = memory_store();
  FirstFailure first;
  const auto run_one = [&](int rank) {
    absl::Status end;
    const Topology topology = topology_of(rank, options.ranks, hosts);
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
