#include <ATen/ops/ones.h>
#include <fcntl.h>
#include <torch/nn/module.h>
#include <torch/nn/modules/linear.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <chrono>
#include <cmath>
#include <cstddef>
#include <cstdlib>
#include <cstring>
#include <functional>
#include <limits>
#include <memory>
#include <optional>
#include <string>
#include <vector>

#include "runtime/border/throw.h"
#include "runtime/comm/mesh_groups.h"
#include "tessera/checkpoint.h"
#include "tessera/collectives.h"
#include "tessera/durable.h"
#include "tessera/engine.h"
#include "workshop/bench/samples.h"
#include "workshop/bench/studies/studies.h"

namespace tessera::app {
namespace {

constexpr std::int64_t kUnits = 8;

struct Layers : torch::nn::Module {
  explicit Layers(std::int64_t width) {
    for (std::int64_t i = 0; i < kUnits; ++i)
      layers.push_back(register_module("layer" + std::to_string(i), torch::nn::Linear(width, width)));
  }
  at::Tensor forward(at::Tensor x) {
    for (auto& layer : layers) x = layer->forward(x);
    return x;
  }
  std::vector<torch::nn::Linear> layers;
};

/// Layers with an Engine that has made a step, so that the optimizer has states.
struct Trained {
  Trained(const Mesh& mesh, std::int64_t width, const std::function<void(Strategy&)>& adjust)
      : input(at::ones({1, width})) {
    Strategy strategy;
    strategy.units.classes = {"Linear"};
    if (adjust) adjust(strategy);
    module = std::make_shared<Layers>(width);
    engine = std::make_unique<Engine>(std::static_pointer_cast<torch::nn::Module>(module), strategy, mesh);
    step();
  }
  void step() const {
    engine->backward(module->forward(input).mean());
    engine->step();
  }
  at::Tensor input;
  std::shared_ptr<Layers> module;
  std::unique_ptr<Engine> engine;
};

/// Writes `bytes` to a new file through the page cache, in portions of a MiB, and then syncs the file.
void write_file(const std::filesystem::path& path, const std::vector<std::byte>& bytes) {
  const auto expect = [&](bool worked) {
    if (!worked) throw Error(ExitCode::kIo, path.string() + ": " + std::strerror(errno));
  };
  const int file = ::open(path.c_str(), O_CREAT | O_TRUNC | O_WRONLY | O_CLOEXEC, 0600);
  expect(file >= 0);
  for (std::size_t begin = 0; begin < bytes.size();) {
    const std::size_t count = std::min<std::size_t>(bytes.size() - begin, 1 << 20);
    const ssize_t written = ::write(file, bytes.data() + begin, count);
    expect(written > 0);
    begin += static_cast<std::size_t>(written);
  }
  expect(::fsync(file) == 0);
  expect(::close(file) == 0);
}

/// A file that is overwritten past the page cache, as a commit does, and then synced. The first round gives
/// the file its size.
class OverwrittenFile {
 public:
  OverwrittenFile(const std::filesystem::path& path, std::size_t bytes)
      : path_(path), file_(::open(path.c_str(), O_CREAT | O_WRONLY | O_DIRECT | O_CLOEXEC, 0600)), bytes_(bytes) {
    void* memory = nullptr;
    expect(file_ >= 0 && ::posix_memalign(&memory, 4096, kPortion) == 0);
    memory_.reset(static_cast<std::byte*>(memory));
    std::memset(memory_.get(), 3, kPortion);
  }
  ~OverwrittenFile() { ::close(file_); }
  OverwrittenFile(const OverwrittenFile&) = delete;
  OverwrittenFile& operator=(const OverwrittenFile&) = delete;

  void write() const {
    for (std::size_t begin = 0; begin < bytes_; begin += kPortion)
      expect(::pwrite(file_, memory_.get(), kPortion, static_cast<off_t>(begin)) == static_cast<ssize_t>(kPortion));
    expect(::fsync(file_) == 0);
  }

 private:
  static constexpr std::size_t kPortion = 4 << 20;
  struct Free {
    void operator()(std::byte* memory) const { std::free(memory); }
  };
  void expect(bool worked) const {
    if (!worked) throw Error(ExitCode::kIo, path_.string() + ": " + std::strerror(errno));
  }
  const std::filesystem::path path_;
  const int file_;
  const std::size_t bytes_;
  std::unique_ptr<std::byte, Free> memory_;
};

class CheckpointStudy {
 public:
  CheckpointStudy(const Mesh& mesh, const CheckpointStudyOptions& options)
      : mesh_(mesh),
        folder_(options.folder / "tessera-bench-checkpoint"),
        width_(static_cast<std::int64_t>(std::sqrt(static_cast<double>(options.parameters) / kUnits))),
        waiting_(mesh, width_, nullptr),
        beside_(mesh, width_, [](Strategy& strategy) { strategy.checkpoint.async = true; }),
        durable_(mesh, width_,
                 [&](Strategy& strategy) { strategy.durable = {.every = 1, .dir = (folder_ / "durable").string()}; }) {
    save_checkpoint(*beside_.engine, folder_);
    bytes_ = checkpoint_progress(*beside_.engine)->bytes;
    finish_checkpoint(*beside_.engine);
    from_.resize(static_cast<std::size_t>(bytes_), std::byte{1});
    to_.resize(static_cast<std::size_t>(bytes_), std::byte{2});
    const auto committed = static_cast<std::size_t>(durable_.engine->plan().disk.written_in_commit);
    overwritten_.emplace(folder_ / ("overwritten-" + std::to_string(mesh.rank())), committed);
  }
  ~CheckpointStudy() {
    std::error_code ignored;
    if (mesh_.is_main()) std::filesystem::remove_all(folder_, ignored);
  }

  void round(bool counts) {
    time(counts, kCopy, [&] { std::memcpy(to_.data(), from_.data(), from_.size()); });
    time(counts, kWrite, [&] { write_file(folder_ / ("plain-" + std::to_string(mesh_.rank())), from_); });
    time(counts, kSave, [&] { save_checkpoint(*waiting_.engine, folder_, {}, {.keep = 1}); });
    // A save leaves nothing in the page cache, if its file system can bypass the cache.
    for (const Number number : {kLoadFirst, kLoad}) {
      time(counts, number, [&] { load_checkpoint(*waiting_.engine, folder_); });
    }
    const Clock::time_point begin = Clock::now();
    time(counts, kHold, [&] { save_checkpoint(*beside_.engine, folder_, {}, {.keep = 1}); });
    finish_checkpoint(*beside_.engine);
    note(counts, kCommit, begin);
    time(counts, kOverwrite, [&] { overwritten_->write(); });
    durable_.step();
    // A commit normally runs during training. No training runs here.
    time(counts, kDurable, [&] {
      commit_durable(*durable_.engine);
      finish_commit(*durable_.engine);
    });
  }

  BenchTable to_table() const {
    BenchTable table{{"what", "median_s", "p10_s", "p90_s", "rank_bytes", "of_limit"}, {}};
    for (const Row& row : rows_) {
      const double median = row.samples.median_s(), limit = rows_[row.limit].samples.median_s();
      const double of_limit = &row == &rows_[row.limit] ? std::numeric_limits<double>::quiet_NaN() : median / limit;
      table.rows.push_back({row.name, median, row.samples.quantile_s(0.1), row.samples.quantile_s(0.9),
                            static_cast<double>(bytes_), of_limit});
    }
    return table;
  }

 private:
  using Clock = std::chrono::steady_clock;
  enum Number { kCopy, kWrite, kSave, kHold, kCommit, kLoadFirst, kLoad, kOverwrite, kDurable };
  struct Row {
    std::string name;
    Number limit;
    Samples samples = {};
  };

  /// Adds the time from the moment when all ranks are ready to the moment when all ranks have run `body`.
  void time(bool counts, Number number, const std::function<void()>& body) {
    barrier(mesh_);
    const Clock::time_point begin = Clock::now();
    body();
    barrier(mesh_);
    note(counts, number, begin);
  }
  void note(bool counts, Number number, Clock::time_point begin) {
    const std::chrono::nanoseconds taken = Clock::now() - begin;
    if (counts) rows_[number].samples.ns.push_back(taken.count());
  }

  const Mesh& mesh_;
  const std::filesystem::path folder_;
  const std::int64_t width_;
  Trained waiting_, beside_, durable_;
  std::optional<OverwrittenFile> overwritten_;
  std::int64_t bytes_ = 0;
  std::vector<std::byte> from_, to_;
  std::vector<Row> rows_ = {{"copy in memory", kCopy},
                            {"plain file, written and synced", kWrite},
                            {"save that training waits for", kWrite},
                            {"save beside training: what training waits for", kCopy},
                            {"save beside training: until it is committed", kWrite},
                            {"load, the first after a save", kCopy},
                            {"load, from the page cache", kCopy},
                            {"file, overwritten past the page cache and synced", kOverwrite},
                            {"commit of a step (durable)", kOverwrite}};
};

}  // namespace

BenchTable study_checkpoints(const Mesh& mesh, const CheckpointStudyOptions& options) {
  CheckpointStudy study(mesh, options);
  for (int round = -1; round < options.rounds; ++round) study.round(round >= 0);
  return study.to_table();
}

}  // namespace tessera::app
