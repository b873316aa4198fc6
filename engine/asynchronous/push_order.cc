#include "engine/asynchronous/push_order.h"

#include <fcntl.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <map>
#include <nlohmann/json.hpp>
#include <string_view>
#include <tuple>
#include <utility>

#include "runtime/base/errno_hint.h"
#include "runtime/base/input_file.h"
#include "runtime/base/log.h"
#include "runtime/base/status.h"

namespace tessera {
namespace {

using json = nlohmann::ordered_json;
constexpr char kKind[] = "tessera_order";
constexpr std::size_t kMostBytes = std::size_t{1} << 32, kMostOfFirstLine = std::size_t{1} << 20;

absl::Status output_error(const std::string& path, const char* what, int error, ExitCode code) {
  return make_error(code, "sync.record_order " + path + ": " + what + ": " + reason_of_writing(error));
}

absl::Status bad_line(const std::string& path, std::size_t line, const std::string& what) {
  return make_error(ExitCode::kCorruptData,
                    "sync.play_order " + path + ", line " + std::to_string(line) + ": " + what +
                        ". [T0824] hint: give a file that sync.record_order wrote in a run of the same "
                        "model, units, number of ranks, and owners");
}

/// Returns a text such as "2 servers".
std::string text_of(const json& owners, const json& count) {
  return count.dump() + " " + (owners.is_string() ? owners.get<std::string>() : owners.dump());
}

/// Returns a text that says what is wrong with the file's first line. The text is empty if this run may replay the
/// order.
std::string fault_of(const json& first, const OrderParties& parties) {
  if (first.at(kKind) != 1) return "this is an order of another version";
  if (first.at("ranks") != parties.ranks)
    return "the order is of " + first.at("ranks").dump() + " ranks, and this run has " + std::to_string(parties.ranks);
  const json own_kind(parties.owners), own_count(parties.owner_count);
  const json kind = first.contains("owners") ? first.at("owners") : own_kind;
  const json count = first.contains("owner_count") ? first.at("owner_count") : own_count;
  if (kind == own_kind && count == own_count) return "";
  return "the order is of shards that " + text_of(kind, count) + " own, and in this run " +
         text_of(own_kind, own_count) + " do (sync.owners, TESSERA_SERVERS)";
}

}  // namespace

std::string first_line_of(const OrderParties& parties, const std::vector<std::int64_t>& steps) {
  json line = {{kKind, 1}, {"ranks", parties.ranks}, {"owners", parties.owners}, {"owner_count", parties.owner_count}};
  if (!steps.empty()) line["steps"] = steps;
  return line.dump() + "\n";
}

std::string line_of(const ShardEvent& event, const ShardName& shard) {
  const json line = {
      {"event", event.number}, {"rank", event.rank},   {"step", event.step},   {"op", event.is_push ? "push" : "pull"},
      {"unit", shard.unit},    {"group", shard.group}, {"shard", shard.owner}, {"version", event.version}};
  return line.dump() + "\n";
}

absl::Status end_of_turns(const std::string& operation, int rank) {
  return make_error(ExitCode::kUsage, operation +
                                          ": the order that is played (sync.play_order) has no more of it by rank " +
                                          std::to_string(rank) +
                                          ". [T0820] hint: make as many steps as the run that recorded the order, and "
                                          "read parameters (Gathered, evaluate) where it did");
}

absl::Status expect_turn(const ShardTurn& turn, bool is_push, const std::string& operation) {
  if (turn.is_push == is_push) return absl::OkStatus();
  return make_error(ExitCode::kUsage, operation + ": the order that is played (sync.play_order) has a " +
                                          (is_push ? "pull" : "push") + " by rank " + std::to_string(turn.rank) +
                                          " here. [T0821] hint: run the program that recorded the order");
}

absl::StatusOr<OrderWriter> OrderWriter::open(const std::string& path, const OrderParties& parties, bool is_first) {
  const int flags = O_WRONLY | O_APPEND | O_CREAT | O_CLOEXEC | (is_first ? O_TRUNC : 0);
  const int file = ::open(path.c_str(), flags, 0666);
  if (file < 0) {
    const int error = errno;
    return output_error(path, "cannot be opened", error, exit_code_of_creating(error));
  }
  OrderWriter writer(path, file);
  if (is_first) {
    writer.text_ = first_line_of(parties);
    TESSERA_RETURN_IF_ERROR(writer.write());
  }
  return writer;
}

OrderWriter::OrderWriter(OrderWriter&& other) noexcept
    : path_(std::move(other.path_)), file_(std::exchange(other.file_, -1)), text_(std::move(other.text_)) {}

OrderWriter::~OrderWriter() {
  if (file_ < 0) return;
  if (const absl::Status status = write(); !status.ok()) log_error(message_of(status));
  ::close(file_);
}

void OrderWriter::add(const ShardEvent& event, const ShardName& shard) { text_ += line_of(event, shard); }

absl::Status OrderWriter::write() {
  for (std::string_view rest = text_; !rest.empty();) {
    const ssize_t wrote = ::write(file_, rest.data(), rest.size());
    if (wrote < 0 && errno == EINTR) continue;
    if (wrote < 0) {
      const int error = errno;
      return output_error(path_, "cannot be written", error, exit_code_of_errno(error));
    }
    rest.remove_prefix(static_cast<std::size_t>(wrote));
  }
  text_.clear();
  return absl::OkStatus();
}

absl::StatusOr<std::vector<std::vector<ShardTurn>>> read_order(const std::string& path, const OrderParties& parties,
                                                               std::span<const ShardName> shards) {
  TESSERA_ASSIGN_OR_RETURN(const std::string text,
                           read_input_file(path, "sync.play_order", kMostBytes, ExitCode::kCorruptData));
  std::map<std::tuple<std::string, std::size_t, int>, std::size_t> known;
  for (std::size_t i = 0; i < shards.size(); ++i) known[{shards[i].unit, shards[i].group, shards[i].owner}] = i;
  std::vector<std::vector<std::pair<std::int64_t, ShardTurn>>> events(shards.size());
  std::size_t number = 0;
  for (std::string_view rest = text; !rest.empty();) {
    const std::string_view line = rest.substr(0, rest.find('\n'));
    rest.remove_prefix(std::min(rest.size(), line.size() + 1));
    ++number;
    try {
      const json item = json::parse(line);
      if (number == 1) {
        if (const std::string fault = fault_of(item, parties); !fault.empty()) return bad_line(path, number, fault);
        continue;
      }
      const auto shard = known.find({item.at("unit"), item.at("group"), item.at("shard")});
      const int rank = item.at("rank");
      if (shard == known.end())
        return bad_line(path, number,
                        "the model has no shard " + item.at("shard").dump() + " of group " + item.at("group").dump() +
                            " of a unit " + item.at("unit").dump());
      if (rank < 0 || rank >= parties.ranks) return bad_line(path, number, "there is no rank " + std::to_string(rank));
      events[shard->second].push_back({item.at("event"), {rank, item.at("op") == "push"}});
    } catch (const json::exception&) {
      return bad_line(path, number, "it is no line of an order");
    }
  }
  if (number == 0) return bad_line(path, 1, "the file is empty");
  std::vector<std::vector<ShardTurn>> turns(shards.size());
  for (std::size_t i = 0; i < shards.size(); ++i) {
    std::ranges::stable_sort(events[i], {}, [](const auto& event) { return event.first; });
    for (const auto& [event, turn] : events[i]) turns[i].push_back(turn);
  }
  return turns;
}

absl::StatusOr<OrderHead> read_order_head(const std::string& path) {
  TESSERA_ASSIGN_OR_RETURN(const InputFile file, InputFile::open(path, "sync.play_order"));
  std::string line(std::min(file.size(), kMostOfFirstLine), '\0');
  const ssize_t got = ::pread(file.fd(), line.data(), line.size(), 0);
  if (got < 0) return input_error(path, "sync.play_order", "cannot be read", errno);
  line.resize(std::min(static_cast<std::size_t>(got), line.find('\n')));
  OrderHead head;
  try {
    const json first = json::parse(line);
    head.ranks = first.at("ranks");
    if (first.contains("steps")) head.steps = first.at("steps").get<std::vector<std::int64_t>>();
  } catch (const json::exception&) {
    return bad_line(path, 1, "it is no line of an order");
  }
  if (!head.steps.empty() && std::ssize(head.steps) != head.ranks)
    return bad_line(path, 1,
                    "it has the steps of " + std::to_string(head.steps.size()) + " ranks, and the order is of " +
                        std::to_string(head.ranks));
  return head;
}

absl::Status PushOrder::open(const AsynchronousConfig& config, const OrderParties& parties, int rank,
                             absl::FunctionRef<void()> meet) {
  if (!config.play_order.empty()) {
    TESSERA_ASSIGN_OR_RETURN(turns_, read_order(config.play_order, parties, names_));
  }
  const auto record = [&](bool is_first) -> absl::Status {
    if (config.record_order.empty() || is_first != (rank == 0)) return absl::OkStatus();
    TESSERA_ASSIGN_OR_RETURN(OrderWriter writer, OrderWriter::open(config.record_order, parties, is_first));
    writer_.emplace(std::move(writer));
    return absl::OkStatus();
  };
  TESSERA_RETURN_IF_ERROR(record(/*is_first=*/true));
  meet();
  return record(/*is_first=*/false);
}

}  // namespace tessera
