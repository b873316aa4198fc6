#pragma once

#include <absl/status/statusor.h>

#include <algorithm>
#include <cstdint>
#include <filesystem>
#include <string>

namespace tessera {

/// What one call of a group takes, and what one rank sends in it. While `latency_s` passes nothing is on the wire yet,
/// so calls that begin together do not slow each other. While `transfer_s` passes they share it.
struct CallCost {
  double latency_s = 0, transfer_s = 0;
  std::int64_t sent_bytes = 0;
  /// Of a core, meanwhile: in which a rank writes what it sends in fewer bits, and reads what comes (CodingFit).
  double coding_s = 0;
  double sum_s = 0;  ///< of compute, that adding up takes from a rank whose cores are busy (Links::sum_s_per_byte)
  /// Where ranks compute meanwhile (OperationFit); what is less than when they do not counts as that.
  double busy_latency_s = 0, busy_transfer_s = 0;
  double seconds() const { return latency_s + transfer_s; }
  double busy_seconds() const { return std::max(latency_s, busy_latency_s) + std::max(transfer_s, busy_transfer_s); }
};
CallCost operator+(const CallCost& a, const CallCost& b);

/// Hockney's model of an operation, fitted to measurements: a call in which one rank sends b bytes takes alpha + beta b
/// seconds (R. Hockney, "The communication challenge for MPP", Parallel Computing 20 (3), 1994).
struct OperationFit {
  double alpha_s = 0;
  double beta_s_per_byte = 0;
  /// The same while ranks compute beside it: where no core is idle, what moves the bytes waits for one. What is less than when they do not
  /// counts as that.
  double busy_alpha_s = 0, busy_beta_s_per_byte = 0;
  friend bool operator==(const OperationFit&, const OperationFit&) = default;
};

/// What it costs to send numbers in a form that takes fewer bits: seconds of a core in which a byte of fp32 is written so and read back.
struct CodingFit {
  double lossless_s_per_byte = 0, int8_s_per_byte = 0, int4_s_per_byte = 0;
  /// Of such a second, what compute beside it loses: 0 where a core is idle, 1 where all are busy.
  double load = 0;
  /// Of what ranks would write and read that send to all others: where ranks of a host add up and gather in its memory first
  /// (Links::of_group), in a reduction and in an all-gather. Not in the file.
  double of_reductions = 1, of_gathers = 1;
  friend bool operator==(const CodingFit&, const CodingFit&) = default;
};

/// What was measured of a group's transport, on one axis of the mesh.
///
/// **Another number of ranks.** Ranks exchange their parts directly, a message to each peer. So with n ranks a call has
/// n - 1 messages one after the other, and alpha, which was measured with `ranks`, counts (n - 1) / (ranks - 1) times.
/// Of a buffer that n ranks share, a rank sends (n - 1)/n in an all-gather or a reduce-scatter, and twice that in an
/// all-reduce, which is both; beta stays as it is, but where ranks share the link of their host (of_group). (R. Thakur,
/// R. Rabenseifner, W. Gropp, "Optimization of Collective Communication Operations in MPICH", 2005: pairwise exchange, and the ring.) What stands between ranks is not known:
/// a fit of one host says nothing of two.
///
/// **A reduction** is fitted as a whole: exchange, sum, and how much of the sum hides behind the exchange of the next
/// piece.
///
/// The file, links.json. Every key is needed; numbers are finite and from 0 to 1e9:
///
///     {
///       "transport": "gloo",                                        of Collectives::transport
///       "ranks": 4,                                                 measured with so many, from 2 to 1048576
///       "hosts": 2,                                                 on so many hosts, at most `ranks`
///       "all_gather": {"alpha_s": 2e-4, "beta_s_per_byte": 8e-10,   bytes are those that one rank sends
///                      "busy_alpha_s": 5e-4, "busy_beta_s_per_byte": 1e-9},
///       "reduce_scatter": {...}, "all_reduce": {...},
///       "small": {...},                                             an all-gather of a few bytes (the agreement)
///       "cpu_s_per_byte": 1e-10,
///       "sum_s_per_byte": 1e-10,
///       "coding": {"lossless_s_per_byte": 2e-10, "int8_s_per_byte": 6e-11, "int4_s_per_byte": 6e-11, "load": 1},
///       "reduces_in_background": true,
///       "gathers_in_background": true
///     }
struct Links {
  std::string transport = {};
  int ranks = 2, hosts = 1;
  OperationFit all_gather = {}, reduce_scatter = {}, all_reduce = {}, small = {};
  /// Seconds of compute that a byte on the wire takes from a rank whose cores are busy; and that a byte of a peer's fp32 takes more where it is
  /// added up, in however few bits it came. 0 where transport work has a core of its own.
  double cpu_s_per_byte = 0, sum_s_per_byte = 0;
  CodingFit coding = {};
  bool reduces_in_background = true;  ///< Collectives::reduces_in_background
  /// Collectives::gathers_in_background. Not so in shared memory: there the call is over when it returns.
  bool gathers_in_background = true;

  /// Of a call of `of_ranks` ranks, each of which sends `sent_bytes`. Nothing where a rank is alone.
  CallCost cost(const OperationFit& fit, int of_ranks, std::int64_t sent_bytes) const;
  /// Of an all-gather in which each rank's part is `part_bytes` long.
  CallCost all_gather_cost(int of_ranks, std::int64_t part_bytes) const;

  /// Of a group of `of_ranks` ranks on `of_hosts` hosts, where a host's ranks are of `groups` such groups that make their calls at the same
  /// time, and so share its link. Ranks of a host sum and gather in its memory first, so what a call of N bytes sends from a host is
  /// groups (of_hosts - 1)/of_hosts N (twice that in an all-reduce); beta, which is of what a rank would send alone, follows, and so does what is
  /// written in fewer bits. Links that
  /// were measured on one host stay as they are, and so do alpha, cpu_s_per_byte and sum_s_per_byte. REQUIRES: of_ranks >= of_hosts >= 1, groups >= 1.
  Links of_group(int of_ranks, int of_hosts, int groups) const;

  friend bool operator==(const Links&, const Links&) = default;
};

/// Of both axes. That of an axis of one rank is not looked at. Links that nobody filled cost nothing.
struct MeshLinks {
  Links shard, replicate;
};

/// Errors: 65 with all that is wrong in the text, one a line: file, line, key, wanted, got. `name` stands for the file.
absl::StatusOr<Links> parse_links(const std::string& text, const std::string& name);
/// The same; also as read_input_file.
absl::StatusOr<Links> read_links(const std::filesystem::path& path);
/// What parse_links reads as an equal one.
std::string to_json(const Links& links);

}  // namespace tessera
