#include "runtime/config/transport_rows.h"

#include <algorithm>

#include "runtime/base/text.h"

namespace tessera {
namespace {

std::string words_of(unsigned traits, bool has_one) {
  std::vector<std::string> words;
  for (const TransportRow& row : transport_rows()) {
    if (((row.traits & traits) != 0) == has_one) words.push_back(row.word);
  }
  return either(words);
}

}  // namespace

const std::vector<TransportRow>& transport_rows() {
  using namespace transport_traits;
#define TESSERA_ROW(enumerator, word, text, traits) {TransportChoice::enumerator, word, text, traits},
  static const std::vector<TransportRow> rows = {TESSERA_TRANSPORTS(TESSERA_ROW)};
#undef TESSERA_ROW
  return rows;
}

const TransportRow& row_of(TransportChoice choice) {
  return *std::ranges::find(transport_rows(), choice, &TransportRow::choice);
}

std::string word_of(TransportChoice choice) { return choice == TransportChoice::kAuto ? "auto" : row_of(choice).word; }

TransportChoice transport_named(const std::string& word) {
  const auto found = std::ranges::find(transport_rows(), word, &TransportRow::word);
  return found == transport_rows().end() ? TransportChoice::kAuto : found->choice;
}

bool has(TransportChoice choice, unsigned traits) {
  return choice != TransportChoice::kAuto && (row_of(choice).traits & traits) != 0;
}

std::string transports_with(unsigned traits) { return words_of(traits, true); }
std::string transports_without(unsigned traits) { return words_of(traits, false); }

}  // namespace tessera
