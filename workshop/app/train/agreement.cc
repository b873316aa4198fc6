#include "workshop/app/train/agreement.h"

#include <chrono>
#include <numeric>
#include <vector>

#include "runtime/base/rank_name.h"
#include "runtime/base/seeded_fault.h"
#include "runtime/base/status.h"
#include "runtime/base/text.h"
#include "runtime/comm/meet_in_store.h"
#include "runtime/config/json_differences.h"

namespace tessera::app {
namespace {

constexpr std::chrono::seconds kFarewell{5};
constexpr char kReference[] = "agreement/reference";
constexpr char kVerdict[] = "agreement/verdict";

std::string answer_key(int rank) { return "agreement/answer/" + std::to_string(rank); }
std::string read_key(int rank) { return "agreement/read/" + std::to_string(rank); }

/// Returns the answer of a rank: whether the rank failed, or how its values differ. The answer is sent as JSON text,
/// such as {"failed": "..."}.
nlohmann::json answer_of(const absl::StatusOr<nlohmann::json>& prepared, const nlohmann::json& reference) {
  if (!prepared.ok()) return {{"failed", message_of(prepared.status())}};
  if (reference.is_null()) return nlohmann::json::object();  // rank 0 failed, so there is nothing to compare with
  const auto differ = differences(*prepared, reference);
  if (differ.empty()) return nlohmann::json::object();
  return {{"differs", joined(differ, "; ")}};
}

/// One exchange of this agreement, seen from one rank.
class Exchange {
 public:
  Exchange(const AgreementOptions& options, KeyValueStore& store)
      : options_(options), store_(store), ranks_(static_cast<std::size_t>(options.world_size)) {
    std::iota(ranks_.begin(), ranks_.end(), 0);
  }

  absl::Status run(const absl::StatusOr<nlohmann::json>& prepared) {
    if (options_.rank == 0)
      TESSERA_RETURN_IF_ERROR(store_.set(kReference, text_of_json(prepared.ok() ? *prepared : nlohmann::json())));
    TESSERA_ASSIGN_OR_RETURN(const nlohmann::json reference, get(kReference));
    TESSERA_RETURN_IF_ERROR(store_.set(answer_key(options_.rank), text_of_json(answer_of(prepared, reference))));
    if (options_.rank == 0) TESSERA_RETURN_IF_ERROR(collect());
    TESSERA_ASSIGN_OR_RETURN(const nlohmann::json verdict, get(kVerdict));
    const absl::Status status = status_of(verdict);
    if (!status.ok()) TESSERA_RETURN_IF_ERROR(part());
    return prepared.ok() ? status : prepared.status();
  }

 private:
  absl::StatusOr<nlohmann::json> get(const std::string& key) {
    const auto timeout = std::chrono::milliseconds(static_cast<std::int64_t>(options_.timeout_s * 1000));
    const absl::StatusOr<std::string> text = get_from_others(store_, key, timeout, ranks_);
    if (absl::IsDeadlineExceeded(text.status()))
      return make_error(ExitCode::kPeerLost,
                        rank_name(options_.rank, options_.world_size) + ": " + message_of(text.status()) +
                            " (comm.init_timeout_s). [T1071] hint: look for a rank that stands still "
                            "while it reads its files");
    TESSERA_RETURN_IF_ERROR(text.status());
    return nlohmann::json::parse(*text, nullptr, /*allow_exceptions=*/false);
  }

  /// Reads all answers on rank 0, and tells all ranks which ranks failed or differ.
  absl::Status collect() {
    nlohmann::json verdict = {{"failed", nlohmann::json::array()}, {"differs", nlohmann::json::array()}};
    const int answers = options_.world_size - (seeded_fault(SeededFault::kLastAnswerUnread) ? 1 : 0);
    for (int rank = 0; rank < answers; ++rank) {
      TESSERA_ASSIGN_OR_RETURN(const nlohmann::json answer, get(answer_key(rank)));
      for (const char* kind : {"failed", "differs"}) {
        if (answer.contains(kind))
          verdict[kind].push_back(rank_name(rank, options_.world_size) + ": " + answer[kind].get<std::string>());
      }
    }
    return store_.set(kVerdict, text_of_json(verdict));
  }

  /// If ranks do not agree, all of them call this function before they end. The store may be in rank 0's process, so
  /// rank 0 leaves last. Rank 0 waits at most kFarewell for a rank that is already gone.
  absl::Status part() {
    if (options_.rank != 0) return store_.set(read_key(options_.rank), "1");
    for (int rank = 1; rank < options_.world_size; ++rank) store_.get(read_key(rank), kFarewell).status().IgnoreError();
    return absl::OkStatus();
  }

  static absl::Status status_of(const nlohmann::json& verdict) {
    const auto failed = verdict.at("failed").get<std::vector<std::string>>();
    const auto differs = verdict.at("differs").get<std::vector<std::string>>();
    if (!failed.empty())
      return make_error(ExitCode::kPeerLost, "could not start: " + joined(failed, "; ") +
                                                 ". [T0001] hint: what those ranks said themselves tells more");
    if (differs.empty()) return absl::OkStatus();
    return make_error(
        ExitCode::kConfig,
        "ranks were started differently: " + joined(differs, "; ") +
            ". [T0002] hint: give every rank the same files and options; on several hosts, copy the files");
  }

  const AgreementOptions& options_;
  KeyValueStore& store_;
  std::vector<int> ranks_;  ///< all ranks of the job
};

}  // namespace

absl::Status agree(const absl::StatusOr<nlohmann::json>& prepared, const AgreementOptions& options,
                   KeyValueStore& store) {
  return Exchange(options, store).run(prepared);
}

}  // namespace tessera::app
