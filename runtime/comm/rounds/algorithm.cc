#include "runtime/comm/rounds/algorithm.h"

namespace tessera {

std::string_view name_of(Algorithm algorithm) {
  switch (algorithm) {
    case Algorithm::kDirect:
      return "direct";
    case Algorithm::kRing:
      return "ring";
    case Algorithm::kDoubling:
      return "doubling";
    case Algorithm::kHalving:
      return "halving";
  }
  return "?";
}

bool has_algorithm(Operation operation, Algorithm algorithm, std::size_t bytes) {
  switch (algorithm) {
    case Algorithm::kDirect:
      return true;
    case Algorithm::kRing:
      return operation == Operation::kAllGather;
    case Algorithm::kDoubling:
      return operation == Operation::kAllGather || (operation == Operation::kAllReduce && bytes <= kDoublingBytes);
    case Algorithm::kHalving:
      return operation == Operation::kReduceScatter || operation == Operation::kAllReduce;
  }
  return false;
}

bool has_choice(Operation operation) {
  return operation == Operation::kAllGather || operation == Operation::kReduceScatter ||
         operation == Operation::kAllReduce;
}

}  // namespace tessera
