#pragma once

#include <string>
#include <vector>

#include "tessera/transports.h"

namespace tessera {

/// The traits with which a row of TESSERA_TRANSPORTS (tessera/transports.h) describes where the transport's ranks are,
/// and what its groups can do.
namespace transport_traits {

enum TransportTrait : unsigned {
  kNothing = 0,
  kOneHost = 1u << 0,       ///< all ranks are on one host
  kSharedMemory = 1u << 1,  ///< Collectives::shares_memory: ranks hold one copy of parameters together
  kBackground = 1u << 2,    ///< Collectives::reduces_in_background
  kOnGpu = 1u << 3,         ///< the module is trained on a GPU
};

}  // namespace transport_traits

/// A row of TESSERA_TRANSPORTS.
struct TransportRow {
  TransportChoice choice;
  std::string word;  ///< "gloo"
  std::string text;  ///< description in docs/strategy.md
  unsigned traits;
};

/// Returns all rows, in their order. kAuto has no row.
const std::vector<TransportRow>& transport_rows();

/// Returns the row of a transport. REQUIRES: `choice` is not kAuto.
const TransportRow& row_of(TransportChoice choice);

/// Returns the word of a transport: that of its row, or "auto".
std::string word_of(TransportChoice choice);

/// Returns the transport with this word. It returns kAuto if no transport has the word: an option that was not given
/// has the word "".
TransportChoice transport_named(const std::string& word);

/// Returns whether the transport has one of `traits` (transport_traits, joined by |); false for kAuto, which trains on
/// the CPU.
bool has(TransportChoice choice, unsigned traits);

/// The first function returns the words of all transports that have one of `traits`. The second function returns the
/// words of all transports that have none of `traits`: "nccl or cuda_host".
std::string transports_with(unsigned traits);
std::string transports_without(unsigned traits);

}  // namespace tessera
