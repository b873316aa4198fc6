#pragma once

// See docs/glossary.md: agreement.

#include <absl/status/statusor.h>

#include <algorithm>
#include <cstdint>
#include <filesystem>
#include <string>

namespace tessera {

/// The time of one call of a group, and the number of bytes that one rank sends in it. Nothing is on the wire while
/// `latency_s` passes, so calls that begin together do not slow each other in that time. Calls share the wire while
/// `transfer_s` passes.
struct CallCost {
  double latency_s = 0, transfer_s = 0;
  std::int64_t sent_bytes = 0;
  /// The seconds that one core needs, during the call, to encode the data that a rank sends in fewer bits and to decode
  /// the data that the rank receives (CodingFit).
  double coding_s = 0;
  /// The seconds of compute that a rank with busy cores loses because of summing (Links::sum_s_per_byte).
  double sum_s = 0;
  /// `latency_s` and `transfer_s` while ranks compute (OperationFit). If such a value is below the value for idle
  /// ranks, the value for idle ranks is used.
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
  /// Alpha and beta while ranks compute. If no core is idle, the code that transfers the bytes must wait for a core. If
  /// such a value is below the value for idle ranks, the value for idle ranks is used.
  double busy_alpha_s = 0, busy_beta_s_per_byte = 0;
  friend bool operator==(const OperationFit&, const OperationFit&) = default;
};

/// The cost of codecs with fewer bits: the seconds of one core for encoding and decoding one byte of fp32.
struct CodingFit {
  double lossless_s_per_byte = 0, int8_s_per_byte = 0, int4_s_per_byte = 0;
  /// The share of the coding time by which simultaneous computation is delayed: 0 if a core is idle, 1 if all cores are
  /// busy.
  double load = 0;
  /// The coding work of a reduction and of an all-gather, relative to the work if each rank sent to all other ranks.
  /// Both numbers are less than 1 if the ranks of a host first sum and gather in the host's memory (Links::of_group).
  /// They are not in the file.
  double of_reductions = 1, of_gathers = 1;
  friend bool operator==(const CodingFit&, const CodingFit&) = default;
};

/// Measurements of a group's transport, on one axis of the mesh.
///
/// **Another number of ranks.** Ranks exchange their parts directly, each with one message to every other rank. So a
/// call of n ranks has n - 1 messages one after another. Alpha was measured with `ranks` ranks, so it is multiplied by
/// (n - 1) / (ranks - 1). A rank sends (n - 1)/n of a buffer that n ranks share in an all-gather or a reduce-scatter,
/// and twice as much in an all-reduce, which consists of both. Beta is not changed, except if ranks share the link of
/// their host (of_group). (R. Thakur, R. Rabenseifner, W. Gropp, "Optimization of Collective Communication Operations
/// in MPICH", 2005: pairwise exchange, and the ring.) The connections between ranks are not known, so a fit of one host
/// is not valid for two hosts.
///
/// **A reduction** is fitted as a whole: exchange, sum, and the overlap of the sum with the exchange of the next piece.
///
/// The file is links.json. Every key is needed; numbers are finite and from 0 to 1e9:
///
///     {
///       "transport": "gloo",                                        the value of Collectives::transport
///       "ranks": 4,                                                 number of ranks that measured, from 2 to 1048576
///       "hosts": 2,                                                 number of their hosts, at most `ranks`
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
  /// The seconds of compute that a rank with busy cores loses for each byte on the wire, and for each byte of another
  /// rank's fp32 values that it sums. The codec of these values does not matter. Both are 0 if a separate core does the
  /// transport's work.
  double cpu_s_per_byte = 0, sum_s_per_byte = 0;
  CodingFit coding = {};
  bool reduces_in_background = true;  ///< Collectives::reduces_in_background
  /// Collectives::gathers_in_background. It is false in shared memory, where a gather has ended when its call returns.
  bool gathers_in_background = true;

  /// Returns the cost of a call of `of_ranks` ranks, each of which sends `sent_bytes`. A call of one rank costs
  /// nothing.
  CallCost cost(const OperationFit& fit, int of_ranks, std::int64_t sent_bytes) const;
  /// Returns the cost of an all-gather in which each rank's part has `part_bytes`.
  CallCost all_gather_cost(int of_ranks, std::int64_t part_bytes) const;

  /// Returns the links of a group of `of_ranks` ranks on `of_hosts` hosts. A host's ranks belong to `groups` such
  /// groups, which make their calls at the same time and so share the host's link. The ranks of a host first sum and
  /// gather in its memory. So a call of N bytes sends groups * (of_hosts - 1) / of_hosts * N bytes from a host (twice
  /// that in an all-reduce). Beta, which counts the bytes that a rank would send alone, is scaled accordingly, and so
  /// is the work of codecs (CodingFit). Alpha, cpu_s_per_byte and sum_s_per_byte are not changed. Links that were
  /// measured on one host are not changed either.
  Links of_group(int of_ranks, int of_hosts, int groups) const;

  friend bool operator==(const Links&, const Links&) = default;
};

/// The links of both axes, and of the groups of ranks that together have a second copy of the parameters
/// (MemoryPlan::has_secondary). Links of an axis with one rank are not used. Links that were not set cost nothing.
struct MeshLinks {
  Links shard, replicate;
  Links secondary = {};
};

/// Returns an error (65) if the text is wrong. The message has one line for each mistake: the file, the line, the key,
/// the wanted value, and the value found. `name` is the file's name in the message.
absl::StatusOr<Links> parse_links(const std::string& text, const std::string& name);
/// Reads the file at `path`. Further errors: those of read_input_file.
absl::StatusOr<Links> read_links(const std::filesystem::path& path);
/// Returns a text that parse_links reads as equal links.
std::string to_json(const Links& links);

}  // namespace tessera
