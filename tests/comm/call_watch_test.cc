// Tests the watch over calls: ranks on threads wait in different groups. Each scene takes some seconds, so scenes run
// at the same time.

#include "runtime/comm/call_watch.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <chrono>
#include <functional>
#include <string>
#include <thread>
#include <vector>

#include "runtime/base/status.h"
#include "runtime/comm/compose/background.h"
#include "runtime/comm/mesh_groups.h"
#include "runtime/comm/shared/run_ranks.h"
#include "tests/comm/collectives_properties.h"
#include "tests/support/limits/patience.h"

namespace tessera {
namespace {

using namespace std::chrono_literals;
using ::testing::HasSubstr;

/// The calls of two ranks (or `ranks`) in an Engine's groups, and the required end of each. A call must end within 10 s
/// with an error that has all texts of `wanted`, or without an error if `wanted` is empty.
struct Scene {
  const char* name;
  std::function<absl::Status(const Mesh& mesh, const MeshAxes& axes)> body;
  std::vector<std::string> wanted;
  int ranks = 2, hosts = 1;
};

absl::Status gather(Collectives& group, const char* label) {
  std::vector<float> full(100 * static_cast<std::size_t>(group.size()));
  return group.all_gather(label, full.data() + 100 * group.rank(), full.data(), 400).wait();
}

absl::Status reduce_later(Collectives& group, const char* label) {
  std::vector<float> input(100 * static_cast<std::size_t>(group.size())), output(100);
  Work work = group.reduce_scatter(label, input.data(), DType::kF32, output.data(), 100, Waits::kLater);
  return work.wait();
}

/// Reports, while it exists, the calls that an observer of another library would report: `begun` calls of a group of
/// both ranks. If `waits`, it also reports a wait in the latest of these calls, by the thread that made this object.
class Told {
 public:
  Told(const Mesh& mesh, std::uint64_t begun, bool waits)
      : watch_(groups_of(mesh).watch()), teller_([this, calls = calls_of(begun, waits)](const std::stop_token& ends) {
          for (; !ends.stop_requested(); std::this_thread::sleep_for(100ms)) watch_.tell(calls);
          watch_.tell({});
        }) {}

 private:
  static OutsideCalls calls_of(std::uint64_t begun, bool waits) {
    const int thread = CallWatch::number_of(pthread_self());
    const std::string text = "barrier of torch.distributed (#" + std::to_string(begun) + ")";
    OutsideCalls calls;
    calls.groups["torch"] = {.count = 2,
                             .family = "torch",
                             .begun = begun,
                             .threads = {thread},
                             .is_outside = true,
                             .latest = {{begun, text}}};
    if (waits) calls.waits.push_back({"torch", begun, thread, text});
    return calls;
  }

  CallWatch& watch_;
  std::jthread teller_;
};

/// Takes the place of a call of the other library. The call ends after `most`. It also ends when the ranks have a
/// verdict, since the process would end if the call continued. Returns the mesh's status at the end of the call.
absl::Status outside_barrier(const Mesh& mesh, std::chrono::milliseconds most) {
  const auto is_told = [&] { return groups_of(mesh).store().get("waits/verdict", 0ms).ok(); };
  {
    const Told told(mesh, 1, /*waits=*/true);
    const auto end = std::chrono::steady_clock::now() + most;
    while (!is_told() && std::chrono::steady_clock::now() < end) std::this_thread::sleep_for(50ms);
  }
  // If a rank's wait ends before its watch checks it, the rank does not learn the verdict. The rank therefore waits
  // again and again. In the pauses, the rank's watch can notice that the rank is outside of the call.
  while (is_told() && groups_of(mesh).status().ok()) {
    {
      const Told again(mesh, 1, /*waits=*/true);
      std::this_thread::sleep_for(300ms);
    }
    std::this_thread::sleep_for(300ms);
  }
  return groups_of(mesh).status();
}

const Scene kScenes[] = {
    {"a call of another library, and one of an Engine",
     [](const Mesh& mesh, const MeshAxes& axes) {
       if (mesh.rank() == 0) return outside_barrier(mesh, 60s);
       const Told told(mesh, 0, /*waits=*/false);
       return axes.world->barrier("step").wait();
     },
     {"rank 0 waits in barrier of torch.distributed (#1), which rank 1 has not begun",
      "rank 1 waits in barrier 'step' (#1), which rank 0 has not begun", "hint: "}},
    {"the same where the other rank has begun that call, and does not wait in it",
     [](const Mesh& mesh, const MeshAxes& axes) {
       if (mesh.rank() == 0) {
         TESSERA_RETURN_IF_ERROR(outside_barrier(mesh, 7s));
         return axes.world->barrier("step").wait();
       }
       const Told told(mesh, 1, /*waits=*/false);
       return axes.world->barrier("step").wait();
     },
     {}},
    {"a gather and a reduction",
     [](const Mesh& mesh, const MeshAxes& axes) {
       TESSERA_RETURN_IF_ERROR(gather(*axes.gather, "blocks.0"));
       return mesh.rank() == 0 ? gather(*axes.gather, "blocks.1") : reduce_later(*axes.reduce, "head");
     },
     {"rank 0 waits in all_gather 'blocks.1' of 400 bytes (#2), which rank 1 has not begun",
      "rank 1 waits in reduce_scatter 'head' of 100 fp32 (#1), which rank 0 has not begun",
      "every rank must make the same calls", "hint: ", "tessera launch --strict"}},
    {"the same across hosts, where groups work in the background",
     [](const Mesh& mesh, const MeshAxes& axes) {
       return mesh.rank() == 1 ? gather(*axes.gather, "blocks.1") : reduce_later(*axes.reduce, "head");
     },
     {"rank 1 waits in all_gather 'blocks.1'", "rank 0 waits in reduce_scatter 'head'"},
     2,
     2},
    {"one of three alone",
     [](const Mesh& mesh, const MeshAxes& axes) {
       if (mesh.rank() == 2) return gather(*axes.gather, "evaluation");
       return axes.world->barrier("step").wait();
     },
     {"waits in barrier 'step' (#1)", "rank 2 waits in all_gather 'evaluation'"},
     3},
    {"a group that one rank makes alone",
     [](const Mesh& mesh, const MeshAxes& axes) {
       if (mesh.rank() == 1) return axes.world->barrier("step").wait();
       auto other = groups_of(mesh).axes(1, 2);
       return other.ok() ? other->world->barrier("ready").wait() : other.status();
     },
     {"rank 0 waits in", "rank 1 waits in barrier 'step'"}},
    {"a rank that computes for long, twice",
     [](const Mesh& mesh, const MeshAxes& axes) {
       for (int busy = 0; busy < 2; ++busy) {
         if (mesh.rank() == busy) std::this_thread::sleep_for(4500ms);
         TESSERA_RETURN_IF_ERROR(gather(*axes.gather, "blocks.0"));
         TESSERA_RETURN_IF_ERROR(reduce_later(*axes.reduce, "blocks.0"));
       }
       return absl::OkStatus();
     },
     {}},
    {"ranks that wait in two calls for a third that computes",
     [](const Mesh& mesh, const MeshAxes& axes) {
       if (mesh.rank() == 2) std::this_thread::sleep_for(6500ms);
       int data = 0;
       // The root has sent its values, and waits in the barrier.
       TESSERA_RETURN_IF_ERROR(gather(*axes.reduce, "values"));
       TESSERA_RETURN_IF_ERROR(axes.gather->broadcast("values", &data, sizeof data, 0).wait());
       return axes.world->barrier("step").wait();
     },
     {},
     3},
    {"two models on two threads of each rank, which come in any order",
     [](const Mesh& mesh, const MeshAxes& axes) {
       auto other = groups_of(mesh).axes(1, 2);
       TESSERA_RETURN_IF_ERROR(other.status());
       absl::Status second;
       const auto busy = [&](int rank) {
         if (mesh.rank() == rank) std::this_thread::sleep_for(7s);
       };
       std::thread thread([&] {
         second = gather(*other->gather, "second");
         busy(1);
         if (second.ok()) second = gather(*other->gather, "second");
       });
       absl::Status first = gather(*axes.gather, "first");
       busy(0);
       if (first.ok()) first = gather(*axes.gather, "first");
       thread.join();
       return first.ok() ? second : first;
     },
     {}},
};

/// The end of a rank's calls, and the seconds from the time when the rank had the groups.
struct End {
  absl::Status status;
  double seconds = 0;
};

void play(const Scene& scene, std::vector<End>& ends) {
  run_ranks({.ranks = scene.ranks, .hosts = scene.hosts, .timeout_s = 100}, [&](const Mesh& mesh) {
    auto axes = groups_of(mesh).axes(1, scene.ranks);
    require_ok(axes.status());
    const auto begin = std::chrono::steady_clock::now();
    End& end = ends[mesh.rank()];
    end.status = scene.body(mesh, *axes);
    end.seconds = std::chrono::duration<double>(std::chrono::steady_clock::now() - begin).count();
  });
}

TEST(CallWatch, MutuallyWaitingRanksAreNamedAndOthersLeftAlone) {
  constexpr std::size_t kCount = std::size(kScenes);
  std::vector<std::vector<End>> ends(kCount);
  std::vector<std::jthread> threads;
  for (std::size_t i = 0; i < kCount; ++i) {
    ends[i].resize(kScenes[i].ranks);
    threads.emplace_back([&, i] { play(kScenes[i], ends[i]); });
  }
  threads.clear();  // joins
  for (std::size_t i = 0; i < kCount; ++i) {
    for (std::size_t rank = 0; rank < ends[i].size(); ++rank) {
      SCOPED_TRACE(std::string(kScenes[i].name) + ", rank " + std::to_string(rank));
      const auto& [status, seconds] = ends[i][rank];
      const std::string text = message_of(status);
      if (kScenes[i].wanted.empty()) {
        EXPECT_EQ(text, "");
        continue;
      }
      EXPECT_EQ(exit_code_of(status), ExitCode::kInternal);
      EXPECT_TRUE(in_time(seconds, 10)) << seconds << " s";
      EXPECT_THAT(text, HasSubstr("rank " + std::to_string(rank) + "/" + std::to_string(kScenes[i].ranks)));
      for (const std::string& words : kScenes[i].wanted) EXPECT_THAT(text, HasSubstr(words));
    }
  }
}

}  // namespace
}  // namespace tessera
