#include "engine/replay/step_records.h"

#include <cerrno>
#include <cmath>
#include <cstdio>
#include <filesystem>
#include <limits>
#include <map>
#include <nlohmann/json.hpp>
#include <span>
#include <string_view>

#include "checkpoint/files/hash.h"
#include "checkpoint/files/json_fields.h"
#include "offload/files/atomic_file.h"
#include "offload/files/output_file.h"
#include "runtime/base/input_file.h"
#include "runtime/base/status.h"

namespace tessera {
namespace {

constexpr std::size_t kMostBytes = std::size_t{1} << 32, kMostValues = std::size_t{1} << 20;
constexpr std::int64_t kMany = std::int64_t{1} << 62;
constexpr const char* kWho = "record_hashes.file";

double number_or_nan(const JsonFields& fields, std::string_view key) {
  const JsonNode* const node = fields.find(key);
  if (node && node->value.is_null()) return std::numeric_limits<double>::quiet_NaN();
  return fields.number(key);
}

/// Returns null for NaN and infinity, for which JSON has no notation.
nlohmann::ordered_json json_of(double number) {
  return std::isfinite(number) ? nlohmann::ordered_json(number) : nlohmann::ordered_json(nullptr);
}

absl::StatusOr<StepRecord> parse_line(const std::string& place, std::string_view line) {
  TESSERA_ASSIGN_OR_RETURN(const JsonNode node, parse_checkpoint_json(place, line, kMostValues));
  absl::Status status;
  const JsonFields fields(node, place, "", status);
  StepRecord record;
  record.step = fields.integer("step", 1, kMany);
  record.microbatches = fields.integer("microbatches", 1, kMany);
  record.threads = fields.integer("threads", 1, kMany);
  record.loss = number_or_nan(fields, "loss");
  record.grad_norm = number_or_nan(fields, "grad_norm");
  const JsonNode* const units = fields.find("units");
  if (!units || !units->is_object()) {
    fields.refuse("units", "wanted an object of hashes");
    return status;
  }
  const JsonFields hashes(*units, place, "/units", status);
  for (const JsonNode& unit : units->children) record.units.emplace_back(unit.key, hashes.hash(unit.key));
  if (!status.ok()) return status;
  return record;
}

/// Calls `visit(line, number)` for the complete lines of a text, without their line ends.
template <class Visit>
absl::Status for_each_line(std::string_view text, const Visit& visit) {
  std::int64_t number = 0;
  for (std::size_t end; (end = text.find('\n')) != std::string_view::npos; text.remove_prefix(end + 1))
    TESSERA_RETURN_IF_ERROR(visit(text.substr(0, end), ++number));
  return absl::OkStatus();
}

absl::StatusOr<std::string> read_text(const std::string& path, const std::string& who) {
  return read_input_file(path, who + ": file of hashes", kMostBytes, ExitCode::kCorruptData);
}

/// Returns the lines of steps before `step`.
absl::StatusOr<std::string> lines_before(const std::string& path, std::int64_t step) {
  TESSERA_ASSIGN_OR_RETURN(const std::string text, read_text(path, kWho));
  std::string kept;
  TESSERA_RETURN_IF_ERROR(for_each_line(text, [&](std::string_view line, std::int64_t number) -> absl::Status {
    TESSERA_ASSIGN_OR_RETURN(const StepRecord record, parse_line(path + ":" + std::to_string(number), line));
    if (record.step < step) kept.append(line).push_back('\n');
    return absl::OkStatus();
  }));
  return kept;
}

absl::Status append(const std::string& path, const std::string& line) {
  std::FILE* const file = std::fopen(path.c_str(), "ae");
  if (!file) return cannot_create(std::string(kWho) + " " + path, errno);
  const bool is_written = std::fwrite(line.data(), 1, line.size(), file) == line.size();
  if (std::fclose(file) == 0 && is_written) return absl::OkStatus();
  return make_error(ExitCode::kIo,
                    std::string(kWho) + " " + path +
                        " cannot be written. [T0891] hint: free some room on its disk, or name a file on another one");
}

}  // namespace

std::string to_line(const StepRecord& record) {
  nlohmann::ordered_json units = nlohmann::ordered_json::object();
  for (const auto& [name, hash] : record.units) units[name] = hash_text(hash);
  const nlohmann::ordered_json line = {
      {"step", record.step},          {"microbatches", record.microbatches},    {"threads", record.threads},
      {"loss", json_of(record.loss)}, {"grad_norm", json_of(record.grad_norm)}, {"units", units}};
  return line.dump(-1, ' ', false, nlohmann::ordered_json::error_handler_t::replace) + "\n";
}

absl::StatusOr<std::vector<StepRecord>> read_step_records(const std::string& path, const std::string& who) {
  TESSERA_ASSIGN_OR_RETURN(const std::string text, read_text(path, who));
  std::map<std::int64_t, StepRecord> by_step;
  TESSERA_RETURN_IF_ERROR(for_each_line(text, [&](std::string_view line, std::int64_t number) -> absl::Status {
    TESSERA_ASSIGN_OR_RETURN(StepRecord record, parse_line(path + ":" + std::to_string(number), line));
    by_step.insert_or_assign(record.step, std::move(record));
    return absl::OkStatus();
  }));
  std::vector<StepRecord> records;
  for (auto& [step, record] : by_step) records.push_back(std::move(record));
  return records;
}

absl::StatusOr<StepRecordsFile> StepRecordsFile::open(const std::string& path) {
  const std::string folder = std::filesystem::path(path).parent_path().string();
  if (!folder.empty()) TESSERA_RETURN_IF_ERROR(make_folders(folder, kWho));
  TESSERA_RETURN_IF_ERROR(append(path, ""));
  TESSERA_RETURN_IF_ERROR(lines_before(path, kMany).status());
  return StepRecordsFile(path);
}

absl::Status StepRecordsFile::write(const StepRecord& record) {
  if (last_ < 0 || record.step <= last_) {
    TESSERA_ASSIGN_OR_RETURN(const std::string kept, lines_before(path_, record.step));
    TESSERA_RETURN_IF_ERROR(write_file_atomically(path_, std::as_bytes(std::span(kept)), kWho, 0644));
  }
  last_ = record.step;
  return append(path_, to_line(record));
}

}  // namespace tessera
