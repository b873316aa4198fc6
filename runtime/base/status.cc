#include "runtime/base/status.h"

#include <absl/strings/cord.h>

namespace tessera {
namespace {

constexpr char kExitCodeUrl[] = "tessera/exit_code";
constexpr char kToldByPeerUrl[] = "tessera/told_by_peer";

absl::StatusCode status_code_of(ExitCode code) {
  switch (code) {
    case ExitCode::kOk:
      return absl::StatusCode::kOk;
    case ExitCode::kUsage:
    case ExitCode::kConfig:
      return absl::StatusCode::kInvalidArgument;
    case ExitCode::kCorruptData:
      return absl::StatusCode::kDataLoss;
    case ExitCode::kNoInput:
      return absl::StatusCode::kNotFound;
    case ExitCode::kUnavailable:
      return absl::StatusCode::kUnavailable;
    case ExitCode::kInternal:
      return absl::StatusCode::kInternal;
    case ExitCode::kOsResource:
      return absl::StatusCode::kResourceExhausted;
    case ExitCode::kCannotCreate:
      return absl::StatusCode::kFailedPrecondition;
    case ExitCode::kIo:
      return absl::StatusCode::kUnknown;
    case ExitCode::kPeerLost:
      return absl::StatusCode::kAborted;
    case ExitCode::kPermission:
      return absl::StatusCode::kPermissionDenied;
  }
  return absl::StatusCode::kInternal;
}

}  // namespace

absl::Status make_error(ExitCode code, std::string message) {
  absl::Status status(status_code_of(code), message);
  status.SetPayload(kExitCodeUrl, absl::Cord(std::to_string(static_cast<int>(code))));
  return status;
}

ExitCode exit_code_of(const absl::Status& status) {
  if (status.ok()) return ExitCode::kOk;
  if (auto payload = status.GetPayload(kExitCodeUrl)) return static_cast<ExitCode>(std::stoi(std::string(*payload)));
  switch (status.code()) {
    case absl::StatusCode::kInvalidArgument:
      return ExitCode::kConfig;
    case absl::StatusCode::kDataLoss:
      return ExitCode::kCorruptData;
    case absl::StatusCode::kNotFound:
      return ExitCode::kNoInput;
    case absl::StatusCode::kUnavailable:
      return ExitCode::kUnavailable;
    case absl::StatusCode::kResourceExhausted:
      return ExitCode::kOsResource;
    case absl::StatusCode::kDeadlineExceeded:
    case absl::StatusCode::kAborted:
      return ExitCode::kPeerLost;
    case absl::StatusCode::kPermissionDenied:
      return ExitCode::kPermission;
    default:
      return ExitCode::kInternal;
  }
}

absl::Status told_by_peer(absl::Status status) {
  status.SetPayload(kToldByPeerUrl, absl::Cord());
  return status;
}

bool is_told_by_peer(const absl::Status& status) { return status.GetPayload(kToldByPeerUrl).has_value(); }

std::string message_of(const absl::Status& status) { return std::string(status.message()); }

}  // namespace tessera
