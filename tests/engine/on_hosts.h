#pragma once

#include <ATen/Parallel.h>
#include <gtest/gtest.h>
#include <stdlib.h>

#include <cmath>
#include <functional>
#include <string>
#include <utility>

#include "runtime/border/throw.h"
#include "tessera/init.h"
#include "tests/support/fork_ranks.h"
#include "tests/support/free_port.h"
#include "tests/support/session.h"

namespace tessera::testing {

inline void join_as(int rank, int ranks, int port, int hosts = 1) {
  const int per_host = ranks / hosts;
  const std::pair<const char*, int> variables[] = {{"RANK", rank},
                                                   {"WORLD_SIZE", ranks},
                                                   {"LOCAL_RANK", rank % per_host},
                                                   {"LOCAL_WORLD_SIZE", per_host},
                                                   {"MASTER_PORT", port}};
  for (const auto& [name, value] : variables) setenv(name, std::to_string(value).c_str(), 1);
  setenv("MASTER_ADDR", "127.0.0.1", 1);
}

inline void require(bool holds, const std::string& what) {
  if (!holds) throw Error(ExitCode::kInternal, what);
}

/// Runs `body` in `ranks` processes on `hosts` hosts. Gloo joins hosts, and shared memory joins the ranks of one host.
/// A test that computes with LibTorch before the fork must use one thread: OpenMP's other threads do not exist in a
/// forked process, which would wait for them for ever.
inline void on_hosts(int ranks, int hosts, const std::function<void(const Mesh&)>& body, const CommConfig& comm = {}) {
  const int port = free_port();
  const auto ends = fork_ranks(ranks, [&](int rank, KeyValueStore&) -> absl::Status {
    join_as(rank, ranks, port, hosts);
    at::set_num_threads(1);  // else there are more threads than cores, and OpenMP's threads wait by spinning
    body(init(comm));
    return absl::OkStatus();
  });
  for (int rank = 0; rank < ranks; ++rank) expect_ok(ends[static_cast<std::size_t>(rank)], rank);
}

/// Returns the norm of the difference of `values` and `others`, divided by the norm of `others`.
inline double distance(const Values& values, const Values& others) {
  double difference = 0, size = 0;
  for (std::size_t i = 0; i < values.size(); ++i) {
    difference += (values[i].second.to(at::kDouble) - others[i].second.to(at::kDouble)).square().sum().item<double>();
    size += others[i].second.to(at::kDouble).square().sum().item<double>();
  }
  return std::sqrt(difference / size);
}

}  // namespace tessera::testing
