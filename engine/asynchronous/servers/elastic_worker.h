#pragma once

// See docs/glossary.md: dealt.

#include <cstdint>
#include <optional>
#include <string>
#include <utility>

#include "engine/asynchronous/servers/job_members.h"
#include "engine/asynchronous/servers/server_link.h"

namespace tessera {

/// The number of a worker, and its steps, in a run whose workers come and go ("sync.elastic"). JobMembers of server 0
/// gives them. ServedShards owns an ElasticWorker. If the run is not elastic, the object keeps its first state:
/// gives_values() is true, and has_begun() is false.
class ElasticWorker {
 public:
  /// Takes server 0's answer to the join: the worker's number, and whether it gives the servers their first values.
  void join(const MessageHead& answer) {
    number_ = static_cast<int>(answer.first);
    gives_values_ = answer.turn == 1;
  }
  /// Returns the number under which the worker has joined; JobMembers::kAnyNumber before that.
  int number() const { return number_; }
  /// Returns "worker 3", for errors.
  std::string name() const {
    return number_ == JobMembers::kAnyNumber ? "a worker" : "worker " + std::to_string(number_);
  }

  /// Returns whether the servers get their first values from this worker. If not, this worker gets the servers' values.
  bool gives_values() const { return gives_values_; }
  /// Says that values are no longer written. Returns whether this is the first call.
  bool begin() { return !std::exchange(has_begun_, true); }
  bool has_begun() const { return has_begun_; }

  /// Takes the answer kDone to the question kTake. Returns the step that was dealt; nothing if the worker gets no more
  /// steps now.
  std::optional<std::int64_t> take(const MessageHead& answer) {
    is_over_ = answer.first == MessageHead::kOver;
    finishes_ = is_over_ && answer.second == 1;
    if (answer.first < 0) return std::nullopt;
    ++taken_;
    return answer.first;
  }
  /// Returns the number of steps that were dealt to this worker so far.
  std::int64_t taken() const { return taken_; }
  bool is_over() const { return is_over_; }
  bool finishes() const { return finishes_; }

  /// Says that the program has asked for a step, or was warned that it has not asked. Returns whether an earlier call
  /// has said that.
  bool know_data() { return std::exchange(knows_data_, true); }

 private:
  int number_ = JobMembers::kAnyNumber;
  bool gives_values_ = true, has_begun_ = false;
  std::int64_t taken_ = 0;
  bool is_over_ = false, finishes_ = false;
  bool knows_data_ = false;
};

}  // namespace tessera
