#include "tessera/metrics_file.h"

#include <optional>
#include <system_error>
#include <utility>

#include "runtime/base/log.h"
#include "runtime/base/metrics/metrics.h"
#include "runtime/base/status.h"
#include "runtime/border/expect.h"
#include "runtime/border/throw.h"

namespace tessera {

struct MetricsFile::State {
  State(std::filesystem::path path_given, Start start, MetricsFormat format) : path(std::move(path_given)) {
    std::error_code error;
    if (path.has_parent_path())
      std::filesystem::create_directories(path.parent_path(), error);  // an error is reported when the file is opened
    MetricsWriter::Options options;
    options.start = start == Start::kNew       ? MetricsWriter::Start::kNew
                    : start == Start::kReplace ? MetricsWriter::Start::kReplace
                                               : MetricsWriter::Start::kAppend;
    options.format = format;
    writer = value_or_throw(MetricsWriter::open(path, options));
  }

  std::filesystem::path path;
  std::optional<MetricsWriter> writer;
};

MetricsFile::MetricsFile(const std::filesystem::path& path, Start start)
    : MetricsFile(std::make_unique<State>(path, start, metrics_format_of(path))) {}

MetricsFile::MetricsFile(std::unique_ptr<State> state) : state_(std::move(state)) {}

MetricsFile MetricsFile::in_tensorboard(const std::filesystem::path& folder, Start start) {
  return MetricsFile(std::make_unique<State>(folder / event_file_name(), start, MetricsFormat::kEvents));
}

MetricsFile::~MetricsFile() = default;
MetricsFile::MetricsFile(MetricsFile&& other) noexcept = default;
MetricsFile& MetricsFile::operator=(MetricsFile&& other) noexcept = default;

bool MetricsFile::is_open() const { return state_->writer.has_value(); }
const std::filesystem::path& MetricsFile::path() const { return state_->path; }

void MetricsFile::write(std::int64_t step, const std::vector<Metric>& metrics) {
  if (!state_->writer) return;
  std::vector<Metric> row = {{"step", step}};
  row.insert(row.end(), metrics.begin(), metrics.end());
  const absl::Status status = state_->writer->write(row);
  if (status.ok()) return;
  expect(exit_code_of(status) != ExitCode::kUsage, "MetricsFile::write: ", message_of(status));
  log_warning(message_of(status) + "; training goes on without metrics from here");
  state_->writer.reset();
}

}  // namespace tessera
