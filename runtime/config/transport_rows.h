#pragma once

#include <string>
#include <vector>

#include "tessera/transports.h"

namespace tessera {

/// The words with which a row of TESSERA_TRANSPORTS (tessera/transports.h) says where its ranks are, and what its
/// groups can do.
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
  std::string text;  ///< what docs/strategy.md says about it
  unsigned traits;
};

/// Returns all rows, in their order; kAuto has none.
const std::vector<TransportRow>& transport_rows();

/// Returns the row of a transport. REQUIRES: it is not kAuto.
const TransportRow& row_of(TransportChoice choice);

/// Returns the transport with this word; kAuto where none has it, as for "" of an option that was not given.
TransportChoice transport_named(const std::string& word);

/// Returns whether the transport has one of `traits` (transport_traits, joined by |); false for kAuto, which trains on
/// the CPU.
bool has(TransportChoice choice, unsigned traits);

/// These return the words of all transports that have one of `traits`, and of those that have none of them: "nccl or
/// cuda_host".
std::string transports_with(unsigned traits);
std::string transports_without(unsigned traits);

}  // namespace tessera
